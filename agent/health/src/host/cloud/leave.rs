//! When the jobs of a machine must save and end because of an announcement of the cloud, and by when.
//!
//! - A preemption: at once. There are seconds left, two minutes at most.
//! - A stop, reboot or maintenance at a known time: `limits.host.cloud.leave` before, so that steps until then count.
//! - A maintenance that has started already, or whose start is unknown: never. The machine runs, and a job started on
//!   it again would end again.

use std::collections::BTreeSet;

use super::{NAME, Notice, NoticeKind, describe_notice, observed};
use mainstay_model::entry::Fact;
use mainstay_model::observation::Weight;
use mainstay_model::time::{Span, Wall};

/// The event that asks jobs to leave.
pub const EVENT: &str = "cloud_leave";

/// By when ranks must have ended, in nanoseconds of the wall clock.
const BY: &str = "by_ns";

/// A request to jobs to save and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leave {
    /// The announcement, in one line.
    pub reason: String,
    /// When the machine is taken away; `None` if now or unknown.
    pub by: Option<Wall>,
}

impl Leave {
    /// The request in this fact, if it is one.
    pub fn from_fact(fact: &Fact) -> Option<Leave> {
        let Fact::Observed(observation) = fact else { return None };
        let by = observation.values.get(BY).and_then(|by| by.parse().ok()).map(Wall);
        (observation.event == EVENT).then(|| Leave { reason: observation.detail.clone(), by })
    }
}

/// The id of the notice that this fact reports: announced, changed, over, or the reason to leave.
pub fn notice_of(fact: &Fact) -> Option<&str> {
    let Fact::Observed(observation) = fact else { return None };
    let id = observation.values.get("id")?;
    (observation.component == NAME).then_some(id.as_str())
}

/// One fact for each notice for which the machine must be left now and jobs were not asked before.
pub(super) fn due(notices: &[Notice], left_for: &mut BTreeSet<String>, now: Wall, before: Span) -> Vec<Fact> {
    let mut due: Vec<&Notice> = notices.iter().filter(|notice| is_due(notice, now, before)).collect();
    // The notice that leaves the least time comes first.
    due.sort_by_key(|notice| notice.starts.filter(|starts| *starts > now));
    due.retain(|notice| left_for.insert(notice.id.clone()));
    due.into_iter().map(|notice| fact(notice, now)).collect()
}

fn is_due(notice: &Notice, now: Wall, before: Span) -> bool {
    let starts_in = notice.starts.map(|starts| starts.0.saturating_sub(now.0)).filter(|_| !notice.ongoing);
    let before = i64::try_from(before.0).unwrap_or(i64::MAX);
    match notice.kind {
        NoticeKind::AtRisk | NoticeKind::Migration => false,
        NoticeKind::Preemption => true,
        NoticeKind::Termination => starts_in.is_none_or(|starts_in| starts_in <= before),
        NoticeKind::Maintenance => starts_in.is_some_and(|starts_in| (1..=before).contains(&starts_in)),
    }
}

fn fact(notice: &Notice, now: Wall) -> Fact {
    let mut fact = observed(EVENT, Weight::Warning, &notice.id, &describe_notice(notice, now));
    if let Fact::Observed(observation) = &mut fact
        && let Some(starts) = notice.starts.filter(|starts| *starts > now && !notice.ongoing)
    {
        observation.values.insert(BY.to_owned(), starts.0.to_string());
    }
    fact
}
