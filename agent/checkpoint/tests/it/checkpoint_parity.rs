//! Pieces instead of replicas: when they make a step whole, where they go, and that different shards never mix.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};

use mainstay_checkpoint::choice::{RestoreRequest, choose};
use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey, StepState, steps};
use mainstay_checkpoint::parity::{Parity, Piece};
use mainstay_checkpoint::placement::{Host, Rules};
use mainstay_checkpoint::plan::plan;
use mainstay_checkpoint::retention::{Retention, deletable, repairs};
use mainstay_checkpoint::tiers::{Tier, newest_by_tier};
use proptest::prelude::*;

const OF: Parity = Parity { data: 3, parity: 2 };

fn key(step: u64, attempt: u64) -> StepKey {
    StepKey { step, job: "job.2".into(), run: "job@7".into(), attempt, world: 1 }
}

fn shard(key: &StepKey) -> Shard {
    let root = format!("{}-{}", key.step, key.attempt);
    Shard { key: key.clone(), rank: 0, root, bytes: 3_000, created: key.step.cast_signed(), piece: None }
}

fn whole(holder: &str, key: &StepKey) -> Copy {
    let shard = shard(key);
    Copy { holder: holder.into(), medium: Medium::Memory, own: true, verified: true, shard }
}

fn piece(holder: &str, key: &StepKey, way: Parity, index: u32) -> Copy {
    let shard = shard(key);
    let which = Piece { root: shard.root.clone(), bytes: shard.bytes, parity: way, index };
    let root = format!("{}.{way}.{index}", shard.root);
    let shard = Shard { root, bytes: 1_024, piece: Some(which), ..shard };
    Copy { holder: holder.into(), medium: Medium::Memory, own: false, verified: true, shard }
}

fn newest_whole(copies: &[Copy], run: &str) -> Option<StepState> {
    choose(copies, RestoreRequest { run: Some(run), ..RestoreRequest::default() }).step.map(StepState::owned)
}

fn host(index: usize) -> Host {
    Host { name: format!("h{index}"), domain: format!("d{index}"), usable: true, excluded: false }
}

fn rules() -> Rules {
    Rules { copies: 1, parity: Some(OF), ..Rules::default() }
}

#[test]
fn parity_is_parsed_as_it_is_printed_and_anything_else_is_refused() {
    assert_eq!("3+2".parse(), Ok(OF));
    assert_eq!(OF.to_string(), "3+2");
    for wrong in ["", "3", "3+", "+2", "1+1", "17+1", "4+0", "4+5", "04+1", " 4+1", "4+1+1", "4-1"] {
        assert!(wrong.parse::<Parity>().is_err(), "{wrong}");
    }
}

#[test]
fn versions_without_pieces_read_them_as_shards_of_another_run() {
    let sent = piece("a", &key(10, 0), OF, 4).shard;
    let text = serde_json::to_string(&sent).unwrap();
    assert_eq!(serde_json::from_str::<Shard>(&text).unwrap(), sent);
    let plain: serde_json::Value = serde_json::from_str(&text).unwrap();
    let run = plain["of"]["run"].as_str().unwrap();
    assert_eq!(run, "parity/4/3+2/3000/10-0/job@7");
    assert!(plain.get("piece").is_none());
    // A name that only resembles that of a piece is the name of a run.
    for run in [
        "parity",
        "parity/",
        "parity/4/3+2/3000/10-0",
        "parity/5/3+2/1/r/x",
        "parity/4/3+9/1/r/x",
        "parity/+4/3+2/1/r/x",
    ] {
        let step_key = StepKey { run: run.into(), ..key(10, 0) };
        assert!(Shard { key: step_key, ..shard(&key(10, 0)) }.understood().piece.is_none(), "{run}");
    }
    let slashes = Piece { root: "r".to_owned(), bytes: 1, parity: OF, index: 0 };
    assert_eq!(Piece::read(&slashes.name("a/b@c/d")), Some((slashes.clone(), "a/b@c/d")));
}

#[test]
fn a_step_is_whole_with_enough_pieces_of_one_kind() {
    let step_key = key(10, 0);
    let mut copies = vec![piece("h1", &step_key, OF, 0), piece("h2", &step_key, OF, 4)];
    // None of these is a third piece: a second copy, another parity, another attempt, an unverified piece.
    copies.push(piece("h3", &step_key, OF, 4));
    copies.push(piece("h4", &step_key, Parity { data: 3, parity: 1 }, 1));
    copies.push(piece("h5", &key(10, 1), OF, 1));
    copies.push(Copy { verified: false, ..piece("h6", &step_key, OF, 1) });
    assert!(newest_whole(&copies, "job").is_none());
    let found = steps(&copies, Some("job"));
    assert!(newest_by_tier(&copies).is_empty());
    let short = found.iter().find(|state| state.key == step_key).unwrap();
    assert_eq!((short.short_of_pieces(), short.missing(9)), (vec![(0, 2, 3)], vec![0]));
    copies.push(piece("h7", &step_key, OF, 2));
    let state = newest_whole(&copies, "job").unwrap();
    assert_eq!((state.least_copies(), state.bytes(), state.short_of_pieces()), (1, 3_000, vec![]));
    assert_eq!(state.roots().collect::<Vec<_>>(), ["10-0"]);
    assert_eq!(
        newest_by_tier(&copies).iter().map(|step_key| step_key.tier).collect::<Vec<_>>(),
        [Tier::Peer]
    );
    let plan = plan(&state, &BTreeMap::from([(0, vec!["h9".to_owned()])]));
    assert!(plan.missing.is_empty() && plan.transfers[0].sources.is_empty());
    // Data pieces come before parity pieces.
    let order = plan.transfers[0].pieces.iter().map(|copy| copy.shard.piece.as_ref().unwrap().index);
    assert_eq!(order.collect::<Vec<_>>()[..2], [0, 1]);
    assert_eq!(plan.bytes(), 3_000);
}

#[test]
fn pieces_of_a_later_seal_replace_a_shard_only_when_there_are_enough() {
    let step_key = key(10, 0);
    let mut copies = vec![whole("h0", &step_key)];
    let again = |holder: &str, index| {
        let mut later = piece(holder, &step_key, OF, index);
        later.shard.created += 1;
        later.shard.piece.as_mut().unwrap().root = "later".to_owned();
        later
    };
    copies.extend([again("h1", 0), again("h2", 1)]);
    assert_eq!(newest_whole(&copies, "job").unwrap().roots().collect::<Vec<_>>(), ["10-0"]);
    copies.push(again("h3", 3));
    assert_eq!(newest_whole(&copies, "job").unwrap().roots().collect::<Vec<_>>(), ["later"]);
}

/// Makes the repairs of `h0` until none is left. Returns their number.
fn settle(copies: &mut Vec<Copy>, hosts: &[Host]) -> usize {
    let mut sent = 0;
    while let Some(next) = repairs("h0", copies, hosts, &rules()).into_iter().next() {
        assert!(sent < 50, "repairs do not end: {next:?}");
        copies.push(match next.piece {
            Some((way, index)) => piece(&next.to, &next.shard.key, way, index),
            None => Copy { own: false, ..whole(&next.to, &next.shard.key) },
        });
        sent += 1;
    }
    sent
}

#[test]
fn each_piece_goes_to_a_different_domain_and_a_lost_one_is_created_again() {
    let step_key = key(10, 0);
    let mut hosts: Vec<Host> = (0..8).map(host).collect();
    let mut copies = vec![whole("h0", &step_key)];
    assert_eq!(settle(&mut copies, &hosts), 5);
    let state = newest_whole(&copies, "job").unwrap();
    let holders: BTreeSet<&str> = copies.iter().map(|copy| copy.holder.as_str()).collect();
    assert_eq!((holders.len(), state.least_copies()), (6, 4));
    // The host of a piece fails.
    let lost = copies[3].holder.clone();
    hosts.iter_mut().filter(|host| host.name == lost).for_each(|host| host.usable = false);
    copies.retain(|copy| copy.holder != lost);
    assert_eq!(settle(&mut copies, &hosts), 1);
    assert_eq!(newest_whole(&copies, "job").unwrap().least_copies(), 4);
    // Without the owner's copy no piece can be created.
    copies.remove(0);
    assert!(repairs("h0", &copies, &hosts, &rules()).is_empty());
}

#[test]
fn with_too_few_domains_there_are_replicas_instead_of_pieces() {
    let step_key = key(10, 0);
    let mut hosts: Vec<Host> = (0..6).map(host).collect();
    // Two hosts in one rack: four other domains for five pieces.
    hosts[2].domain = "d1".to_owned();
    let mut copies = vec![whole("h0", &step_key)];
    assert_eq!(settle(&mut copies, &hosts), 1);
    assert!(copies[1].shard.piece.is_none());
    assert_eq!(newest_whole(&copies, "job").unwrap().least_copies(), 2);
}

#[test]
fn an_older_step_is_deleted_only_when_the_newer_one_has_enough_pieces() {
    let (old, new) = (key(10, 0), key(20, 0));
    let mut copies = vec![whole("h0", &old), whole("h0", &new)];
    for index in 0..5 {
        copies.push(piece(&format!("h{}", index + 1), &old, OF, index));
    }
    let retention = Retention { keep: 1, copies: 2 };
    let gone = |copies: &[Copy]| deletable(&steps(copies, Some("job")), |_| false, retention);
    copies.extend((0..2).map(|index| piece(&format!("h{}", index + 1), &new, OF, index)));
    assert!(gone(&copies).is_empty(), "two of three required pieces do not count");
    copies.push(piece("h3", &new, OF, 2));
    assert_eq!(gone(&copies), [old]);
}

proptest! {
    /// `least_copies` is right for every choice of lost hosts.
    #[test]
    fn losing_fewer_hosts_than_least_copies_keeps_the_step_whole(
        placed in prop::collection::vec(0..6_usize, 5),
        owner in any::<bool>(),
    ) {
        let step_key = key(10, 0);
        let mut copies: Vec<Copy> =
            (0_u32..).zip(&placed).map(|(index, host)| piece(&format!("h{host}"), &step_key, OF, index)).collect();
        if owner {
            copies.push(whole("h9", &step_key));
        }
        let least = newest_whole(&copies, "job").unwrap().least_copies();
        let hosts: Vec<String> = copies.iter().map(|copy| copy.holder.to_string()).collect::<BTreeSet<_>>().into_iter().collect();
        let mut ever_lost = false;
        for choice in 0_u32..1 << hosts.len() {
            let is_lost = |name: &String| hosts.iter().position(|host| host == name).is_some_and(|at| choice >> at & 1 == 1);
            let left: Vec<Copy> = copies.iter().filter(|copy| !is_lost(&copy.holder.to_string())).cloned().collect();
            let whole = newest_whole(&left, "job").is_some();
            prop_assert!(whole || choice.count_ones() as usize >= least);
            ever_lost |= !whole && choice.count_ones() as usize == least;
        }
        prop_assert!(ever_lost, "the number is not too low either");
    }
}
