//! The peers and spares of a service, which change with the hosts of a job.

use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};

use super::{Service, Shared};

/// A launch of a job, and the attempt and step from which its owners on this host keep their shards.
pub(crate) type KeptFrom = (String, (u64, u64));

/// What a launcher tells its service of the hosts of its job. An agent tells nothing: its peers are those of the
/// configuration, and no one else reports which of them are lost.
#[derive(Debug, Default)]
pub(super) struct JobHosts {
    /// Hosts that wait to replace another one. They store additional copies, which do not count.
    pub(super) spares: BTreeSet<String>,
    pub(super) keeps_from: Option<KeptFrom>,
}

impl Service {
    /// Sets the peers, which may include this host. Spares stay, and so does the state of known peers.
    pub fn meet(&self, peers: &[String]) {
        self.meet_with_spares(peers, self.shared.spares().into_iter().collect());
    }

    /// Same as [`Service::meet`], and sets the spares. A peer in both lists is not a spare.
    pub fn meet_with_spares(&self, peers: &[String], mut spares: Vec<String>) {
        spares.retain(|name| !peers.contains(name));
        let mut known = self.shared.peers();
        let before: Vec<String> = known.keys().cloned().collect();
        known.retain(|name, _| peers.contains(name) || spares.contains(name));
        for peer in peers.iter().chain(&spares).filter(|peer| *peer != self.name()) {
            known.entry(peer.clone()).or_default();
        }
        let are_others = !known.keys().eq(&before);
        drop(known);
        self.shared.job().get_or_insert_default().spares = spares.into_iter().collect();
        if are_others {
            self.nudge();
        } else {
            self.shared.signals.wake();
        }
    }

    /// Keeps this step of a launch from now on if the files of this host's shards of it are held open. Returns whether they
    /// are.
    pub fn keep_from_files(&self, launch: &str, at: (u64, u64)) -> bool {
        // The files of a step that is not kept are released with this lock held.
        let mut job = self.shared.job();
        let are_held = self.shared.own.holds_all_of(launch, at);
        if are_held {
            job.get_or_insert_default().keeps_from = Some((launch.to_owned(), at));
        }
        are_held
    }

    /// Keeps this step of a launch, in the memory of its owners on this host or in files that are held open: only copies of
    /// older ones may be deleted.
    pub fn keep_from(&self, launch: &str, at: (u64, u64)) {
        self.shared.job().get_or_insert_default().keeps_from = Some((launch.to_owned(), at));
    }
}

impl Shared {
    /// The hosts of the job, if a launcher told them.
    pub(super) fn job(&self) -> MutexGuard<'_, Option<JobHosts>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a leader reports which peers are lost.
    pub(super) fn has_leader(&self) -> bool {
        self.job().is_some()
    }

    pub(super) fn spares(&self) -> BTreeSet<String> {
        self.job().as_ref().map(|job| job.spares.clone()).unwrap_or_default()
    }

    pub(super) fn keeps_from(&self) -> Option<KeptFrom> {
        self.job().as_ref()?.keeps_from.clone()
    }
}
