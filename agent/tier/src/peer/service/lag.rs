//! Whether replicas keep up with the saves of this host's ranks, and the reason if not.

use std::sync::PoisonError;

use mainstay_checkpoint::lag::{CopyLag, LagReason};
use mainstay_checkpoint::replication_cost::DelayReason;

use super::Service;
use crate::os::monotonic;

/// How far the replicas of a run lag, and the reason.
#[derive(Clone, Debug)]
pub struct Lag {
    /// The lag.
    pub of: CopyLag,
    /// The reason.
    pub reason: LagReason,
    /// The reason as text.
    pub why: String,
}

impl Lag {
    /// The message for users if a step has waited for long.
    pub fn sentence(&self) -> Option<String> {
        self.of.is_reported().then(|| self.of.sentence(&self.why))
    }
}

impl Service {
    /// The lag of the replicas of each run of this host, without asking peers. Empty if no replicas are made.
    pub fn lags(&self) -> Vec<Lag> {
        let shared = &self.shared;
        if shared.settings.copies == 0 && shared.settings.parity.is_none() {
            return Vec::new();
        }
        let mut copies = shared.copies();
        let needs_none = shared.own.shared();
        copies.retain(|copy| !needs_none.contains(&copy.shard.root));
        let mut known = shared.reports.lags.lock().unwrap_or_else(PoisonError::into_inner);
        let lags = known.look(monotonic(), shared.name(), &copies);
        drop(known);
        let (reason, why) = self.delay();
        lags.into_iter().map(|of| Lag { of, reason, why: why.clone() }).collect()
    }

    /// Why copies do not keep up with saves, as far as known, as a reason and as text.
    pub fn delay(&self) -> (LagReason, String) {
        let shared = &self.shared;
        let peers = shared.peers();
        let fails = peers.iter().find(|(_, peer)| !peer.alive || peer.not_before.is_some());
        if let Some((name, peer)) = fails {
            let error = peer.error.as_deref().unwrap_or("it does not answer");
            return (LagReason::Peer, format!("{name}: {error}"));
        }
        if peers.is_empty() {
            return (LagReason::Peer, "no peer is configured".to_owned());
        }
        drop(peers);
        match shared.throttle.holds() {
            Some(DelayReason::Spent) => {
                let percent = shared.settings.slowdown * 100.0;
                let why = format!(
                    "copies have used their {percent:.0} % of training time; an agent's limit is `checkpoint.slowdown_percent`"
                );
                return (LagReason::Slowdown, why);
            }
            Some(DelayReason::Measurement) => {
                let why = "one is left out, to measure what copies cost training".to_owned();
                return (LagReason::Measurement, why);
            }
            None => {}
        }
        let rate = shared.sender.limit.rate();
        let limit = if rate > 0 { format!(" at {} MiB/s at most", rate >> 20) } else { String::new() };
        (LagReason::Speed, format!("saves come faster than copies{limit}"))
    }
}
