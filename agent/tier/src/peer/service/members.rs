//! The peers and spares of a service, which change with the hosts of a job.

use std::sync::atomic::Ordering;

use super::Service;

impl Service {
    /// Sets the peers, which may include this host. Spares stay, and so does the state of known peers.
    pub fn meet(&self, peers: &[String]) {
        let spares = self.shared.spares().clone();
        self.meet_with_spares(peers, spares.into_iter().collect());
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
        *self.shared.spares() = spares.into_iter().collect();
        self.shared.meets.store(true, Ordering::Relaxed);
        if are_others {
            self.nudge();
        } else {
            self.shared.wake();
        }
    }
}
