//! Eligibility of this host and its peers as holders of replicas: each agent judges its own host.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Instant;

use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_checkpoint::placement::{Host, Rules};
use mainstay_checkpoint::spares::SpareHost;

use super::{Peer, Service, Settings, Shared};

impl Service {
    /// Sets this host's eligibility; peers receive it with its inventory.
    pub fn stands(&self, standing: PlacementEligibility) {
        let shared = &self.shared;
        let before = {
            let mut known = shared.reports.standing.lock().unwrap_or_else(PoisonError::into_inner);
            if *known == standing {
                return;
            }
            std::mem::replace(&mut *known, standing.clone())
        };
        report("this host", before.excluded.as_deref(), standing.excluded.as_deref());
        shared.changed();
    }

    /// This host's current eligibility.
    pub fn standing(&self) -> PlacementEligibility {
        self.shared.standing()
    }
}

impl Shared {
    pub(super) fn standing(&self) -> PlacementEligibility {
        self.reports.standing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All agents that count for replicas. Copies on spares are made in addition.
    pub(super) fn hosts(&self) -> Vec<Host> {
        let now = Instant::now();
        let spares = self.spares();
        let mut hosts = vec![Host {
            name: self.name().to_owned(),
            domain: self.settings.domain.clone(),
            usable: true,
            excluded: self.standing().excluded.is_some(),
        }];
        let peers = self.peers();
        let others = peers.iter().filter(|(name, _)| !spares.contains(*name));
        hosts.extend(others.map(|(name, peer)| Host {
            name: name.clone(),
            domain: peer.inventory.domain.clone(),
            usable: peer.alive && peer.not_before.is_none_or(|until| until <= now),
            excluded: peer.inventory.excluded().is_some(),
        }));
        hosts
    }

    /// The spares that answer, with the room in their last inventory.
    pub(super) fn spare_hosts(&self) -> Vec<SpareHost> {
        let now = Instant::now();
        let spares = self.spares();
        let peers = self.peers();
        let usable = peers.iter().filter(|(name, peer)| {
            spares.contains(*name) && peer.alive && peer.not_before.is_none_or(|until| until <= now)
        });
        let room = |peer: &Peer| peer.inventory.quota.saturating_sub(peer.inventory.used);
        usable.map(|(name, peer)| SpareHost { name: name.clone(), free_bytes: room(peer) }).collect()
    }

    /// Rules for a placement: avoid the hosts in the configuration, and those whose ranks are next to this host's.
    pub(super) fn rules(&self) -> Rules {
        let Settings { copies, avoid, parity, .. } = &self.settings;
        let own = self.standing();
        let peers = self.peers();
        let beside = peers.iter().filter(|(_, peer)| own.is_beside(&peer.inventory.standing));
        let avoid: BTreeSet<String> = beside.map(|(name, _)| name).chain(avoid).cloned().collect();
        Rules { copies: *copies, avoid, parity: *parity }
    }
}

/// Logs that a host is excluded as a holder of replicas, or is eligible again.
pub(super) fn report(host: &str, before: Option<&str>, now: Option<&str>) {
    match (before, now) {
        (None, Some(reason)) => {
            tracing::warn!(
                host,
                reason,
                "a host is excluded: replicas go elsewhere, and those it has no longer count"
            );
        }
        (Some(_), None) => tracing::info!(host, "a host is a place for replicas again"),
        _ => {}
    }
}
