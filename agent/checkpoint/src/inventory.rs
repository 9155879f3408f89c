//! The inventory: copies of shards as reported by their holders, and the steps that are whole according to them.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

pub use crate::copies::{Copy, Medium, Shard, StepKey};
use crate::parity::by_way;

/// The state of one step over all holders. It owns its copies, or borrows them from a list that is too long to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepState<C = Copy> {
    /// The step.
    pub key: StepKey,
    /// When the newest shard was sealed, seconds since 1970.
    pub created: i64,
    /// The verified copies of each rank's shard, all with the same root; ranks without any are absent.
    pub ranks: BTreeMap<u32, Vec<C>>,
    /// The verified pieces of the same shard, or of the newest if none is available; ranks without any are absent.
    pub pieces: BTreeMap<u32, Vec<C>>,
}

impl<C: Borrow<Copy>> StepState<C> {
    /// Whether every rank's shard has a verified copy, or can be restored from pieces.
    pub fn is_whole(&self) -> bool {
        let of_pieces = self.pieces.iter().filter(|(rank, pieces)| {
            !self.ranks.contains_key(rank) && by_way(pieces).iter().any(super::parity::Pieces::are_enough)
        });
        self.key.world > 0 && self.ranks.len() + of_pieces.count() == self.key.world as usize
    }

    /// Whether a rank's shard is available.
    pub fn has(&self, rank: u32) -> bool {
        self.hosts_to_lose(rank) > 0 || self.ranks.contains_key(&rank)
    }

    /// The ranks that have no verified copy and too few pieces; at most `limit` of them.
    pub fn missing(&self, limit: usize) -> Vec<u32> {
        (0..self.key.world).filter(|rank| !self.has(*rank)).take(limit).collect()
    }

    /// The minimum number of hosts whose loss loses a rank's shard: all that have a copy, and enough of those with
    /// pieces that too few pieces are left.
    pub fn hosts_to_lose(&self, rank: u32) -> usize {
        let whole = self.ranks.get(&rank).map_or(0, |copies| holders(copies).len());
        let pieces = self.pieces.get(&rank).map_or(&[][..], Vec::as_slice);
        whole + by_way(pieces).iter().map(super::parity::Pieces::hosts_to_lose).max().unwrap_or(0)
    }

    /// The lowest [`hosts_to_lose`](Self::hosts_to_lose) of all ranks; 0 if a shard is missing.
    pub fn least_copies(&self) -> usize {
        if !self.is_whole() {
            return 0;
        }
        (0..self.key.world).map(|rank| self.hosts_to_lose(rank)).min().unwrap_or(0)
    }

    /// Each rank's shard, from one of its copies or pieces.
    fn shards_by_rank(&self) -> impl Iterator<Item = &Shard> {
        let beside = self.pieces.iter().filter(|(rank, _)| !self.ranks.contains_key(rank));
        let firsts =
            self.ranks.values().chain(beside.map(|(_, pieces)| pieces)).filter_map(|copies| copies.first());
        firsts.map(|copy| &copy.borrow().shard)
    }

    /// Size of the step, bytes; each shard is counted once.
    pub fn bytes(&self) -> u64 {
        self.shards_by_rank().map(Shard::whole_bytes).sum()
    }

    /// The sizes of its shards, bytes.
    pub fn sizes(&self) -> Vec<u64> {
        self.shards_by_rank().map(Shard::whole_bytes).collect()
    }

    /// The roots of its shards.
    pub fn roots(&self) -> impl Iterator<Item = &str> {
        self.shards_by_rank().map(Shard::whole)
    }

    /// Shards that lost too many pieces: rank, number of pieces left, number of pieces needed.
    pub fn short_of_pieces(&self) -> Vec<(u32, usize, u32)> {
        let lost = self.pieces.iter().filter(|(rank, _)| !self.has(**rank));
        lost.filter_map(|(rank, pieces)| {
            let most = by_way(pieces).into_iter().max_by_key(|way| way.copies.len())?;
            Some((*rank, most.copies.len(), most.parity.data))
        })
        .collect()
    }
}

impl StepState<&Copy> {
    /// Clones the borrowed copies.
    pub fn owned(self) -> StepState {
        // No spare capacity in the vectors: a large job has 100,000 ranks.
        let own = |copies: BTreeMap<u32, Vec<&Copy>>| {
            copies.into_iter().map(|(rank, copies)| (rank, copies.into_iter().cloned().collect())).collect()
        };
        StepState { key: self.key, created: self.created, ranks: own(self.ranks), pieces: own(self.pieces) }
    }
}

/// The hosts that have `copies`, each once. Durable storage is not a host: it is far away and does not replace copies
/// on hosts.
pub fn holders<C: Borrow<Copy>>(copies: &[C]) -> BTreeSet<&str> {
    let on_hosts = copies.iter().map(C::borrow).filter(|copy| copy.medium != Medium::Durable);
    on_hosts.map(|copy| &*copy.holder).collect()
}

/// The copies that a restore can use: also replicas that their holder found at its start and has not verified yet, which
/// takes minutes for large ones. A restore verifies all bytes that it uses, and a step that is missing only because an
/// agent was restarted would send the job back to an older one. A rank's own shard that is not verified was found
/// damaged.
pub fn restorable(mut copies: Vec<Copy>) -> Vec<Copy> {
    copies.retain(|copy| copy.verified || !copy.own);
    copies.iter_mut().for_each(|copy| copy.verified = true);
    copies
}

/// All steps of `run` (of all runs if `None`) in `copies`, newest first.
///
/// Shards of different attempts, launches or world sizes never form one step. If a rank sealed the same step of an
/// attempt twice, the later shard counts.
pub fn steps<'a>(copies: impl IntoIterator<Item = &'a Copy>, run: Option<&str>) -> Vec<StepState> {
    steps_among(copies, run).into_iter().map(StepState::owned).collect()
}

/// Like [`steps`], but borrows the copies: a leader has those of all ranks.
pub fn steps_among<'a>(
    copies: impl IntoIterator<Item = &'a Copy>,
    run: Option<&str>,
) -> Vec<StepState<&'a Copy>> {
    let mut steps: BTreeMap<&StepKey, BTreeMap<u32, Vec<&Copy>>> = BTreeMap::new();
    let listed = copies.into_iter().filter(|copy| run.is_none_or(|run| copy.shard.key.run_id() == run));
    for copy in listed.filter(|copy| copy.verified && copy.shard.rank < copy.shard.key.world) {
        steps.entry(&copy.shard.key).or_default().entry(copy.shard.rank).or_default().push(copy);
    }
    let mut states: Vec<StepState<&Copy>> = steps.into_iter().map(|(key, ranks)| state(key, ranks)).collect();
    newest_first(&mut states);
    states
}

/// Among entries for the same step, the later attempt of a launch is newer, whatever its clock. Launches have no other
/// order than the time of their last seal.
fn newest_first(states: &mut [StepState<&Copy>]) {
    let launch = |key: &StepKey| (key.step, key.job.clone(), key.run.clone());
    let mut sealed: BTreeMap<(u64, SmolStr, SmolStr), i64> = BTreeMap::new();
    for state in states.iter() {
        let last = sealed.entry(launch(&state.key)).or_insert(i64::MIN);
        *last = state.created.max(*last);
    }
    states.sort_by_cached_key(|StepState { key, created, .. }| {
        let launch_key = launch(key);
        Reverse((key.step, sealed.get(&launch_key).copied(), launch_key, key.attempt, key.world, *created))
    });
}

fn state<'a>(key: &StepKey, ranks: BTreeMap<u32, Vec<&'a Copy>>) -> StepState<&'a Copy> {
    let mut state =
        StepState { key: key.clone(), created: i64::MIN, ranks: BTreeMap::new(), pieces: BTreeMap::new() };
    for (rank, mut copies) in ranks {
        let Some((sealed, root)) = newest_root(&copies) else { continue };
        state.created = state.created.max(sealed);
        copies.retain(|copy| copy.shard.whole() == root);
        let pieces: Vec<&Copy> = copies.extract_if(.., |copy| copy.shard.piece.is_some()).collect();
        if !copies.is_empty() {
            state.ranks.insert(rank, copies);
        }
        if !pieces.is_empty() {
            state.pieces.insert(rank, pieces);
        }
    }
    state
}

/// The shard that a rank sealed last, of those that are available: too few pieces of a newer one do not hide an older
/// whole one.
fn newest_root<'a>(copies: &[&'a Copy]) -> Option<(i64, &'a str)> {
    let sealed = |copy: &&'a Copy| (copy.shard.created, copy.shard.whole());
    let newest_whole = copies.iter().filter(|copy| copy.shard.piece.is_none()).map(sealed).max();
    let mut cut: BTreeMap<(i64, &str), Vec<&Copy>> = BTreeMap::new();
    for copy in copies.iter().filter(|copy| copy.shard.piece.is_some()) {
        cut.entry(sealed(copy)).or_default().push(copy);
    }
    let is_enough = |pieces: &[&Copy]| by_way(pieces).iter().any(super::parity::Pieces::are_enough);
    let newest_cut = cut.iter().filter(|(_, pieces)| is_enough(pieces)).map(|(root, _)| *root).max();
    newest_whole.max(newest_cut).or_else(|| cut.into_keys().max())
}
