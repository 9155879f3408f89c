//! Memory shortage in control groups: in which groups the kernel killed processes, and which groups reach their limit.
//! These are only facts: a group that is at its limit because of the page cache is healthy.

use std::collections::BTreeMap;

use super::sample::{GroupEvents, MemoryGroup};
use mainstay_model::entry::Fact;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::units::Bytes;

#[derive(Clone, Debug, Default)]
pub(super) struct GroupWatch {
    groups: BTreeMap<String, GroupState>,
}

#[derive(Clone, Copy, Debug)]
struct GroupState {
    last: GroupEvents,
    /// How often it reached its limit since the last report.
    unreported: u64,
    reported_at: Option<Mono>,
}

impl GroupWatch {
    /// Returns the events since the last sample. A group that reaches its limit is reported at most once per `window`.
    pub(super) fn step(&mut self, at: Mono, groups: &[MemoryGroup], window: Span) -> Vec<Fact> {
        self.groups.retain(|source, _| groups.iter().any(|group| group.source == *source));
        groups.iter().flat_map(|group| self.follow(at, group, window)).collect()
    }

    fn follow(&mut self, at: Mono, group: &MemoryGroup, window: Span) -> Vec<Fact> {
        let Some(events) = group.events else { return Vec::new() };
        let first = GroupState { last: events, unreported: 0, reported_at: None };
        let seen = self.groups.entry(group.source.clone()).or_insert(first);
        let kills = events.kills.saturating_sub(seen.last.kills);
        seen.unreported = seen.unreported.saturating_add(events.at_limit.saturating_sub(seen.last.at_limit));
        seen.last = events;
        let limit = group
            .usage
            .value()
            .map_or("its limit".to_owned(), |usage| format!("its limit of {}", Bytes(usage.limit).rounded()));
        let mut facts = Vec::new();
        if kills > 0 {
            let processes = if kills == 1 { "1 process".to_owned() } else { format!("{kills} processes") };
            let detail = format!(
                "the kernel killed {processes} of the control group {}: it was at {limit}",
                group.source
            );
            facts.push(observed("host.oom", "group_kill", Weight::Warning, detail, &group.source, kills));
        }
        let silent = seen.reported_at.is_none_or(|reported_at| at.since(reported_at) >= window);
        if seen.unreported > 0 && silent {
            let times = std::mem::take(&mut seen.unreported);
            seen.reported_at = Some(at);
            let detail = format!("the control group {} reached {limit} {times} times", group.source);
            facts.push(observed("host.memory", "group_at_limit", Weight::Info, detail, &group.source, times));
        }
        facts
    }
}

fn observed(component: &str, event: &str, weight: Weight, detail: String, group: &str, count: u64) -> Fact {
    let values = [("group", group.to_owned()), ("count", count.to_string())];
    Fact::Observed(Observation {
        component: component.to_owned(),
        event: event.to_owned(),
        weight,
        detail,
        values: values.map(|(name, value)| (name.to_owned(), value)).into(),
    })
}
