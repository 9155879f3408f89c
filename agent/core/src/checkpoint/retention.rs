//! What may be deleted, and what must be copied again.

use std::collections::BTreeSet;

use crate::checkpoint::inventory::{Copy, Shard, StepKey, StepState, holders, steps};
use crate::checkpoint::parity::{Parity, Pieces, by_way};
use crate::checkpoint::placement::{Host, Rules, as_choices, cut_for, passed_over, place_beside, score};

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Whole steps that are kept at least, of each run.
    pub keep: usize,
    /// On how many hosts each shard of a step must lie before older steps may go: the owner's copy and the replicas.
    pub copies: usize,
}

/// The steps of one run that may be deleted, those of least worth first; `steps` are newest first, and in no other order are they old.
///
/// A step may go only when a newer one is whole with all its copies, and the `keep` newest whole ones stay in any case.
/// So a host that dies while a step is being saved or replicated takes that step along and no other.
pub fn deletable(steps: &[StepState], retention: Retention) -> Vec<StepKey> {
    let safe = |step: &&StepState| step.is_whole() && step.least_copies() >= retention.copies.max(1);
    let Some(anchor) = steps.iter().position(|step| safe(&step)) else { return Vec::new() };
    let whole = steps.iter().filter(|step| step.is_whole());
    let kept: BTreeSet<&StepKey> = whole.take(retention.keep.max(1)).map(|step| &step.key).collect();
    let older = steps.iter().skip(anchor + 1).rev();
    let mut gone: Vec<&StepState> = older.filter(|step| !kept.contains(&step.key)).collect();
    gone.sort_by_key(|step| step.is_whole());
    gone.into_iter().map(|step| step.key.clone()).collect()
}

/// What of `copies` counts for `me` when it is asked what may be deleted, and on how many hosts each shard must lie then: hosts that are
/// excluded hold nothing up, neither by what they have nor by what they may not have.
pub fn counting(me: &str, mut copies: Vec<Copy>, hosts: &[Host], wanted: usize) -> (Vec<Copy>, usize) {
    let out = passed_over(me, hosts);
    copies.retain(|copy| !out.contains(copy.holder.as_str()));
    let most = if out.is_empty() { wanted } else { hosts.len() - out.len() };
    (copies, wanted.min(most))
}

/// One copy to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Of what.
    pub shard: Shard,
    /// Where to.
    pub to: String,
    /// A piece of it only: how it is cut, and which.
    pub piece: Option<(Parity, u32)>,
}

/// What `me` is to send so that shards have their copies: its own, and of those whose owner is gone the ones of which it is
/// the first holder. The newest steps of each run come first, down to the newest that is whole with all its copies.
pub fn repairs(me: &str, copies: &[Copy], hosts: &[Host], rules: &Rules) -> Vec<Repair> {
    let hosts = &as_choices(me, hosts);
    let usable = |name: &str| name == me || hosts.iter().any(|host| host.name == name && host.usable);
    let living: Vec<Copy> = copies.iter().filter(|copy| usable(&copy.holder)).cloned().collect();
    let runs: BTreeSet<&str> = living.iter().map(|copy| copy.shard.of.run_id()).collect();
    let mut repairs = Vec::new();
    for run in runs {
        let states = steps(&living, Some(run));
        let is_safe = |state: &StepState| state.is_whole() && state.least_copies() > rules.copies;
        let newest = states.iter().position(is_safe);
        let wanted = newest.map_or(states.len(), |at| at + 1);
        for state in states.iter().take(wanted) {
            let of_rank = |rank: &u32| repairs_of(me, state, *rank, hosts, rules);
            repairs.extend(state.ranks.keys().flat_map(of_rank));
        }
    }
    repairs
}

fn repairs_of(me: &str, state: &StepState, rank: u32, hosts: &[Host], rules: &Rules) -> Vec<Repair> {
    let Some(copies) = state.ranks.get(&rank) else { return Vec::new() };
    let have = holders(copies);
    let owner = copies.iter().find(|copy| copy.own).map(|copy| copy.holder.as_str());
    let Some(shard) = copies.first().map(|copy| &copy.shard) else { return Vec::new() };
    let pusher = owner.or_else(|| have.iter().copied().max_by_key(|name| score(&shard.root, name)));
    if pusher != Some(me) {
        return Vec::new();
    }
    let pieces = state.pieces.get(&rank).map_or(&[][..], Vec::as_slice);
    if let Some(parity) = cut_for(me, hosts, rules) {
        return pieces_of(me, shard, (&have, pieces), hosts, (rules, parity));
    }
    // Pieces that are there count for as many replicas as hosts may be lost by them.
    let missing = (rules.copies + 1).saturating_sub(state.hosts_to_lose(rank));
    let chosen = place_beside(me, hosts, rules, &have).hosts.into_iter().take(missing);
    chosen.map(|to| Repair { shard: shard.clone(), to, piece: None }).collect()
}

/// The pieces of a shard that nobody has, each for a host that has neither it nor another one of them.
fn pieces_of(
    me: &str,
    shard: &Shard,
    (whole, pieces): (&BTreeSet<&str>, &[Copy]),
    hosts: &[Host],
    (rules, parity): (&Rules, Parity),
) -> Vec<Repair> {
    let ways = by_way(pieces);
    let there = ways.iter().find(|way| way.of == parity);
    let missing =
        (0..parity.pieces()).filter(|index| there.is_none_or(|way| !way.copies.contains_key(index)));
    let missing: Vec<u32> = missing.collect();
    let mut have: BTreeSet<&str> = there.into_iter().flat_map(holders_of_way).collect();
    have.extend(whole);
    let spread = Rules { copies: parity.pieces() as usize, ..rules.clone() };
    let chosen = place_beside(me, hosts, &spread, &have).hosts;
    let repair = |(index, to)| Repair { shard: shard.clone(), to, piece: Some((parity, index)) };
    missing.into_iter().zip(chosen).map(repair).collect()
}

fn holders_of_way<'a>(way: &Pieces<'a>) -> BTreeSet<&'a str> {
    way.copies.values().flatten().map(|copy| copy.holder.as_str()).collect()
}
