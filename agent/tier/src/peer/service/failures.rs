//! Failures of jobs on this host and on its peers: passed on unchanged to the code that diagnoses failures.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use mainstay_diagnosis::repeats::{MAX_REPORTED, RemoteFailure, RemoteFailures};

use super::{Service, Shared};

/// Maximum length of a program name or fingerprint from a peer, bytes: they are numbers of 16 digits.
const LONGEST: usize = 64;

impl Service {
    /// Sets the failures of jobs on this host; peers receive them with its inventory.
    pub fn failed(&self, reported: Vec<RemoteFailure>) {
        *self.shared.reports.failures.lock().unwrap_or_else(PoisonError::into_inner) = reported;
    }

    /// The failures that peers reported last, including peers that no longer answer, and the number of peers that answer.
    pub fn failed_elsewhere(&self) -> RemoteFailures {
        let peers = self.shared.peers();
        let answered_by = peers.values().filter(|peer| peer.alive).count();
        let reported = |(name, peer): (&String, &super::Peer)| {
            let sound = peer.inventory.failures.iter().filter(|reported| is_sound(reported));
            let failures: Vec<RemoteFailure> = sound.take(MAX_REPORTED).cloned().collect();
            (!failures.is_empty()).then(|| (name.clone(), failures))
        };
        let failures: BTreeMap<String, Vec<RemoteFailure>> = peers.iter().filter_map(reported).collect();
        RemoteFailures { answered_by: u32::try_from(answered_by).unwrap_or(u32::MAX), failures }
    }
}

impl Shared {
    pub(super) fn failures(&self) -> Vec<RemoteFailure> {
        self.reports.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn is_sound(reported: &RemoteFailure) -> bool {
    let names = [Some(&reported.program), Some(&reported.fingerprint), reported.content.as_ref()];
    names.into_iter().flatten().all(|name| name.len() <= LONGEST)
}
