//! Selects the steps that may be deleted and the shards that must be copied again.

use std::collections::BTreeSet;

use crate::inventory::{Copy, Shard, StepKey, StepState, holders, steps};
use crate::parity::{Parity, Pieces, by_way};
use crate::placement::{Host, Rules, as_choices, cut_for, excluded_hosts, place_beside, score};

/// The amount to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Minimum number of whole steps that are kept of each run.
    pub keep: usize,
    /// Number of hosts that must store each shard of a step before older steps may be deleted, including the owner.
    pub copies: usize,
}

/// The steps of one run that may be deleted, the least valuable first: incomplete steps, then whole ones, each from the
/// oldest. `steps` is sorted newest first; only this order decides which step is older.
///
/// A step may be deleted only if a newer one is whole with all its copies. The `keep` newest whole steps are always
/// kept, so a host that fails while a step is saved or replicated loses that step and no other. An older step that is
/// incomplete and for which `may_be_whole` is true is kept like a whole one, in addition: hosts that were restarted have
/// not verified their copies yet, or do not answer.
pub fn deletable(
    steps: &[StepState],
    may_be_whole: impl Fn(&StepKey) -> bool,
    retention: Retention,
) -> Vec<StepKey> {
    let safe = |step: &&StepState| step.is_whole() && step.least_copies() >= retention.copies.max(1);
    let Some(anchor) = steps.iter().position(|step| safe(&step)) else { return Vec::new() };
    let keep = retention.keep.max(1);
    let whole = steps.iter().filter(|step| step.is_whole()).take(keep);
    let counts =
        |(at, step): &(usize, &StepState)| step.is_whole() || (*at > anchor && may_be_whole(&step.key));
    let perhaps_whole = steps.iter().enumerate().filter(counts).take(keep).map(|(_, step)| step);
    let kept: BTreeSet<&StepKey> = whole.chain(perhaps_whole).map(|step| &step.key).collect();
    let older = steps.iter().skip(anchor + 1).rev();
    let mut gone: Vec<&StepState> = older.filter(|step| !kept.contains(&step.key)).collect();
    gone.sort_by_key(|step| step.is_whole());
    gone.into_iter().map(|step| step.key.clone()).collect()
}

/// The `copies` that count for `me` in deciding what may be deleted, and the number of hosts that must store each shard
/// then. Excluded hosts do not delay deletion: their copies do not count, and no copies on them are required.
pub fn counting(me: &str, mut copies: Vec<Copy>, hosts: &[Host], copies_wanted: usize) -> (Vec<Copy>, usize) {
    let out = excluded_hosts(me, hosts);
    copies.retain(|copy| !out.contains(copy.holder.as_str()));
    let most = if out.is_empty() { copies_wanted } else { hosts.len() - out.len() };
    (copies, copies_wanted.min(most))
}

/// A copy to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The shard to copy.
    pub shard: Shard,
    /// The host to copy it to.
    pub to: String,
    /// The piece to send instead of the whole shard: how the shard is cut, and the index.
    pub piece: Option<(Parity, u32)>,
}

/// The copies that `me` must send so that all shards have their copies: of its own shards, and of shards whose owner is
/// gone if it is their first holder. For each run the newest steps first, down to the newest that is whole with all
/// copies.
pub fn repairs(me: &str, copies: &[Copy], hosts: &[Host], rules: &Rules) -> Vec<Repair> {
    let hosts = &as_choices(me, hosts);
    let usable = |name: &str| name == me || hosts.iter().any(|host| host.name == name && host.usable);
    let living: Vec<Copy> = copies.iter().filter(|copy| usable(&copy.holder)).cloned().collect();
    let runs: BTreeSet<&str> = living.iter().map(|copy| copy.shard.key.run_id()).collect();
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
    // Existing pieces count as the number of replicas that tolerates the loss of as many hosts.
    let missing = (rules.copies + 1).saturating_sub(state.hosts_to_lose(rank));
    let chosen = place_beside(me, hosts, rules, &have).hosts.into_iter().take(missing);
    chosen.map(|to| Repair { shard: shard.clone(), to, piece: None }).collect()
}

/// The missing pieces of a shard, each for a host that has neither the shard nor another of its pieces.
fn pieces_of(
    me: &str,
    shard: &Shard,
    (whole, pieces): (&BTreeSet<&str>, &[Copy]),
    hosts: &[Host],
    (rules, parity): (&Rules, Parity),
) -> Vec<Repair> {
    let ways = by_way(pieces);
    let there = ways.iter().find(|way| way.parity == parity);
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
