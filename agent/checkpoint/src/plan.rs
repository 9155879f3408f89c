//! Plans the transfers that restore a step: each shard once to each host that needs it, from the nearest copy, balanced
//! over the holders.

use std::collections::BTreeMap;

use crate::inventory::{Copy, Medium, StepState};

/// The transfer of one shard to one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank whose shard it is.
    pub rank: u32,
    /// The host that needs it.
    pub to: String,
    /// All copies, the preferred one first; the others are used if it fails.
    pub sources: Vec<Copy>,
    /// Its pieces, from which it is restored if no copy can be used.
    pub pieces: Vec<Copy>,
}

impl Transfer {
    /// Whether the host already has it.
    pub fn is_local(&self) -> bool {
        self.sources.first().is_some_and(|first| first.holder == self.to)
    }

    /// Size of the shard, bytes.
    fn size(&self) -> u64 {
        self.sources.first().or(self.pieces.first()).map_or(0, |copy| copy.shard.whole_bytes())
    }
}

/// The transfers that bring a step to the hosts where its ranks will run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The transfers in the order in which to start them: the largest first.
    pub transfers: Vec<Transfer>,
    /// Ranks whose shards are not available. If there is any, the step cannot be restored.
    pub missing: Vec<u32>,
}

impl Plan {
    /// Bytes to send over the network.
    pub fn bytes(&self) -> u64 {
        let moved = self.transfers.iter().filter(|transfer| !transfer.is_local());
        moved.map(Transfer::size).sum()
    }
}

/// The distance of a copy: own memory, own disk, a peer's memory, a peer's disk, durable storage.
fn distance(copy: &Copy, to: &str) -> u8 {
    match (copy.holder == to, copy.medium) {
        (_, Medium::Durable) => 4,
        (true, Medium::Memory) => 0,
        (true, Medium::Disk) => 1,
        (false, Medium::Memory) => 2,
        (false, Medium::Disk) => 3,
    }
}

/// The plan for `step` if the shard of rank r is needed on the hosts `wanted[r]`.
///
/// Shards with the fewest copies are assigned first, then the largest, so that shards with more choices balance the
/// load.
pub fn plan(step: &StepState, wanted: &BTreeMap<u32, Vec<String>>) -> Plan {
    let mut plan = Plan::default();
    let mut load: BTreeMap<&str, u64> = BTreeMap::new();
    let mut open: Vec<(u32, &str, &[Copy])> = Vec::new();
    for (rank, hosts) in wanted {
        if step.has(*rank) {
            let copies = step.ranks.get(rank).map_or(&[][..], Vec::as_slice);
            open.extend(hosts.iter().map(|to| (*rank, to.as_str(), copies)));
        } else {
            plan.missing.push(*rank);
        }
    }
    open.sort_by_key(|(rank, to, copies)| {
        (copies.len(), std::cmp::Reverse(copies.first().map_or(0, |copy| copy.shard.bytes)), *rank, *to)
    });
    for (rank, to, copies) in open {
        let mut sources: Vec<&Copy> = copies.iter().collect();
        sources.sort_by_key(|copy| {
            (distance(copy, to), load.get(copy.holder.as_str()).copied().unwrap_or(0), &copy.holder)
        });
        if let Some(first) = sources.first().filter(|first| first.holder != to) {
            *load.entry(first.holder.as_str()).or_default() += first.shard.bytes;
        }
        let sources = sources.into_iter().cloned().collect();
        let mut pieces = step.pieces.get(&rank).cloned().unwrap_or_default();
        // Data pieces first: if all are available, nothing is computed.
        pieces.sort_by_key(|copy| {
            let index = copy.shard.piece.as_ref().map_or(0, |piece| piece.index);
            let is_parity = copy.shard.piece.as_ref().is_some_and(|piece| index >= piece.parity.data);
            (is_parity, distance(copy, to), index, copy.holder.clone())
        });
        plan.transfers.push(Transfer { rank, to: to.to_owned(), sources, pieces });
    }
    plan.transfers.sort_by_key(|transfer| (std::cmp::Reverse(transfer.size()), transfer.rank));
    plan
}
