//! How jobs failed on this host and on its peers: handed on as it was told, for whoever judges failures.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use mainstay_core::failure::repeats::{MAX_REPORTED, RemoteFailure, RemoteFailures};

use super::{Service, Shared};

/// The longest name of a program or fingerprint that is taken from a peer, in bytes: they are numbers of 16 digits.
const LONGEST: usize = 64;

impl Service {
    /// How jobs failed here; peers hear of it when they ask what this host has.
    pub fn failed(&self, reported: Vec<RemoteFailure>) {
        *self.shared.failures.lock().unwrap_or_else(PoisonError::into_inner) = reported;
    }

    /// What peers told last of how jobs failed there, those that answer no more included, and how many answer.
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
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn is_sound(reported: &RemoteFailure) -> bool {
    let names = [Some(&reported.program), Some(&reported.fingerprint), reported.content.as_ref()];
    names.into_iter().flatten().all(|name| name.len() <= LONGEST)
}
