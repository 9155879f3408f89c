//! How often jobs had better save, tier by tier: the job's own advice, and how long a step takes to come to the tiers behind.

use mainstay_core::checkpoint::tiers::Tier;
use mainstay_core::view::node::{JobPhase, JobView};
use mainstay_tier::peer::Service;

/// Seconds from one save to the next in each tier of which something is known, the nearest first. Empty for a job that has hardly saved, or
/// that is over.
pub(super) fn by_tier(job: &JobView, checkpoints: Option<&Service>) -> Vec<(Tier, f64)> {
    let Some(advised) = &job.saving else { return Vec::new() };
    if matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost) {
        return Vec::new();
    }
    advised.by_tier(&checkpoints.map(|known| known.arrivals(&job.id.0)).unwrap_or_default())
}
