//! Measures whether copies keep up with saves: the newest step that survives the loss of a host, and how long a newer
//! one has waited.

use std::collections::{BTreeMap, BTreeSet};

use crate::inventory::{Copy, StepKey, steps};
use mainstay_model::time::{Mono, Span};

/// A lag is reported if steps wait for this long while no newer step gets its copies.
pub const REPORTED_AFTER: Span = Span::seconds(60);

/// Why copies do not keep up. The word is a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LagReason {
    /// No peer is configured, or a peer does not answer or refuses shards.
    Peer,
    /// The budget for slowing down training is used up (`slowdown_percent`).
    Slowdown,
    /// Copies are paused to measure their cost for training.
    Measurement,
    /// Nothing blocks them: a copy takes longer than the time between saves.
    Speed,
}

impl LagReason {
    /// All reasons.
    pub const ALL: [LagReason; 4] =
        [LagReason::Peer, LagReason::Slowdown, LagReason::Measurement, LagReason::Speed];

    /// The word for this reason.
    pub fn as_str(self) -> &'static str {
        match self {
            LagReason::Peer => "peer",
            LagReason::Slowdown => "slowdown",
            LagReason::Measurement => "measurement",
            LagReason::Speed => "speed",
        }
    }
}

/// The lag of the copies of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyLag {
    /// The run.
    pub run: String,
    /// The newest step that survives the loss of any host, and when its last shard was sealed (seconds since 1970).
    pub copied: Option<(StepKey, i64)>,
    /// The newest step of which this host has saved a shard.
    pub saved: u64,
    /// How long newer steps have waited while none of them got its copies; zero if none waits.
    pub waits: Span,
}

impl CopyLag {
    /// Whether the lag is long enough to be reported.
    pub fn is_reported(&self) -> bool {
        self.waits >= REPORTED_AFTER
    }

    /// How long steps have waited, in whole seconds.
    pub fn seconds(&self) -> u64 {
        self.waits.0 / Span::seconds(1).0
    }

    /// The message for users.
    pub fn sentence(&self, why: &str) -> String {
        let which = match &self.copied {
            Some((key, _)) => format!("no step after {}", key.step),
            None => "no step".to_owned(),
        };
        format!("checkpoint: {which} has been copied to peers for {} s ({why})", self.seconds())
    }
}

/// Remembers since when steps wait, for each run.
#[derive(Clone, Debug, Default)]
pub struct CopyLags(BTreeMap<String, (Option<StepKey>, Option<Mono>)>);

impl CopyLags {
    /// The lag of each run of which ranks on the host `me` have saved something. `copies` are all known copies.
    pub fn look(&mut self, now: Mono, me: &str, copies: &[Copy]) -> Vec<CopyLag> {
        let is_saved_here = |copy: &&Copy| copy.own && copy.holder == me;
        let runs: BTreeSet<&str> =
            copies.iter().filter(is_saved_here).map(|copy| copy.shard.key.run_id()).collect();
        self.0.retain(|run, _| runs.contains(run.as_str()));
        let mut lags = Vec::new();
        for run in runs {
            let states = steps(copies, Some(run));
            let has_here = |step_key: &StepKey| {
                copies.iter().any(|copy| is_saved_here(&copy) && copy.shard.key == *step_key)
            };
            let at = states.iter().position(|state| state.is_whole() && state.least_copies() > 1);
            let newer = &states[..at.unwrap_or(states.len())];
            let copied = at.map(|at| (states[at].key.clone(), states[at].created));
            let saved = newer.iter().find(|state| has_here(&state.key)).map(|state| state.key.step);
            let (newest, since) = self.0.entry(run.to_owned()).or_default();
            let key = copied.as_ref().map(|(step_key, _)| step_key.clone());
            if *newest != key {
                (*newest, *since) = (key, None);
            }
            *since = saved.is_some().then(|| since.unwrap_or(now));
            let waits = since.map_or(Span::default(), |since| now.since(since));
            let Some(saved) = saved.or(copied.as_ref().map(|(step_key, _)| step_key.step)) else { continue };
            lags.push(CopyLag { run: run.to_owned(), copied, saved, waits });
        }
        lags
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Medium, Shard};

    fn copy(holder: &str, own: bool, step: u64, rank: u32) -> Copy {
        let key = StepKey { step, job: "job".into(), run: "run@7".into(), attempt: 0, world: 2 };
        let root = format!("{step}.{rank}");
        let shard = Shard { key, rank, root, bytes: 1, created: 1000 + step as i64, piece: None };
        Copy { holder: holder.into(), medium: Medium::Memory, own, verified: true, shard }
    }

    /// The copies of a step of two ranks on two hosts; if `copied`, each host also has a copy of the other's shard.
    fn saved(step: u64, copied: bool) -> Vec<Copy> {
        let mut copies = vec![copy("a", true, step, 0), copy("b", true, step, 1)];
        if copied {
            copies.extend([copy("b", false, step, 0), copy("a", false, step, 1)]);
        }
        copies
    }

    #[test]
    fn a_step_waits_from_its_save_until_it_or_a_newer_one_has_its_copies() {
        let mut lags = CopyLags::default();
        let mut look = |seconds: u64, copies: &[Copy]| lags.look(Mono(seconds * 1_000_000_000), "a", copies);
        assert!(look(1, &[]).is_empty());
        let first = look(2, &saved(10, false));
        assert_eq!((first[0].copied.clone(), first[0].saved, first[0].waits), (None, 10, Span::default()));
        let first = look(70, &saved(10, false)).remove(0);
        assert!(first.is_reported(), "{first:?}");
        testing::snapshot!("messages", "lag: no step has been copied", first.sentence("why"));
        // Half an hour without a save is not a lag.
        for at in [71, 1871] {
            let lag = look(at, &saved(10, true)).remove(0);
            assert_eq!(
                (lag.copied.map(|(key, _)| key.step), lag.saved, lag.waits),
                (Some(10), 10, Span::default())
            );
        }
        let both = [saved(20, false), saved(10, true)].concat();
        assert!(!look(1872, &both)[0].is_reported(), "it was just saved");
        // Each save is replaced by the next one before it is copied.
        let both = [saved(30, false), saved(10, true)].concat();
        let lag = look(1935, &both).remove(0);
        assert!(lag.is_reported() && lag.saved == 30, "{lag:?}");
        testing::snapshot!("messages", "lag: an older step has been copied", lag.sentence("why"));
        // A step that arrives ends the lag, although the next one already waits.
        let both = [saved(40, false), saved(30, true)].concat();
        assert_eq!(look(1936, &both)[0].waits, Span::default());
    }

    #[test]
    fn steps_and_copies_of_other_hosts_are_not_a_lag_of_this_host() {
        let mut lags = CopyLags::default();
        assert!(lags.look(Mono(1), "c", &saved(10, false)).is_empty());
        assert!(lags.look(Mono(1), "c", &[copy("c", false, 10, 0)]).is_empty());
        // A step of which this host saved nothing is the lag of other hosts.
        let others = [saved(10, true), vec![copy("b", true, 20, 1)]].concat();
        assert_eq!(lags.look(Mono(1), "a", &others)[0].waits, Span::default());
    }
}
