//! The advised save interval of jobs for each tier: the job's own advice, and how long a step takes to reach the
//! next tiers.

use mainstay_checkpoint::tiers::Tier;
use mainstay_tier::peer::Service;
use mainstay_view::node::{JobPhase, JobView};

/// Seconds between saves for each tier with known values, nearest tier first. Empty for an ended job or one with
/// hardly any saves.
pub(super) fn by_tier(job: &JobView, checkpoints: Option<&Service>) -> Vec<(Tier, f64)> {
    let Some(advised) = &job.saving else { return Vec::new() };
    if matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost) {
        return Vec::new();
    }
    advised.by_tier(&checkpoints.map(|known| known.arrivals(&job.id.0)).unwrap_or_default())
}
