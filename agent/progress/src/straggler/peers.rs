//! Which ranks do the same work, and so should take the same time.

use std::collections::BTreeMap;

/// The role of a rank in its job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// Ranks with the same number do the same work: one pipeline stage, one kind of expert.
    pub group: u32,
    /// Its pipeline stage, where there are any.
    pub stage: Option<u32>,
    /// Its host, by a number of the caller's choice, if known.
    pub host: Option<u32>,
}

/// The roles of all ranks, ordered so that a step can be judged in one pass.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    roles: Vec<Role>,
    /// All ranks, with those of a group next to each other.
    order: Vec<u32>,
    /// Where each group starts in `order`, and the end of the last one.
    bounds: Vec<usize>,
    /// The stage of each group.
    stages: Vec<Option<u32>>,
    hosts: BTreeMap<u32, Vec<u32>>,
}

impl Peers {
    /// Ranks 0, 1, … with these roles.
    pub fn new(roles: Vec<Role>) -> Peers {
        let mut order: Vec<u32> = (0..roles.len() as u32).collect();
        // Stable, so that the ranks of a group keep their order.
        order.sort_by_key(|rank| roles[*rank as usize].group);
        let mut peers = Peers { roles, order, ..Peers::default() };
        let mut group = None;
        for (place, rank) in peers.order.iter().enumerate() {
            let role = peers.roles[*rank as usize];
            if group != Some(role.group) {
                group = Some(role.group);
                peers.bounds.push(place);
                peers.stages.push(role.stage);
            }
        }
        peers.bounds.push(peers.order.len());
        for (rank, role) in peers.roles.iter().enumerate() {
            if let Some(host) = role.host {
                peers.hosts.entry(host).or_default().push(rank as u32);
            }
        }
        peers
    }

    /// `ranks` ranks with the same work.
    pub fn alike(ranks: usize) -> Peers {
        Peers::new(vec![Role::default(); ranks])
    }

    /// How many ranks there are.
    pub fn len(&self) -> usize {
        self.roles.len()
    }

    /// Whether there are no ranks.
    pub fn is_empty(&self) -> bool {
        self.roles.is_empty()
    }

    /// The role of a rank.
    pub fn role(&self, rank: u32) -> Role {
        self.roles.get(rank as usize).copied().unwrap_or_default()
    }

    /// The ranks of each group.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.bounds.windows(2).map(|bounds| &self.order[bounds[0]..bounds[1]])
    }

    /// The stage of each group.
    pub fn stages(&self) -> &[Option<u32>] {
        &self.stages
    }

    /// The number of ranks with the same work as this one, without itself.
    pub fn peers_of(&self, rank: u32) -> usize {
        let group = self.role(rank).group;
        // Few groups are large, and this is called only for findings.
        self.roles.iter().filter(|role| role.group == group).count().saturating_sub(1)
    }

    /// The ranks of a host; empty if it is unknown.
    pub fn on_host(&self, host: u32) -> &[u32] {
        self.hosts.get(&host).map_or(&[], Vec::as_slice)
    }

    /// The number of known hosts.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }
}
