//! An unrealistically low rate limit: a chunk takes longer than a peer waits for the next bytes, and a step longer than
//! its owner keeps it.

use std::fs;
use std::time::Duration;

use super::support::{CHUNK, Host, hosts, identity, seal, until};

#[test]
fn a_chunk_that_takes_longer_than_the_other_side_waits_still_arrives() {
    let hosts = hosts(2, |_, settings| {
        (settings.rate, settings.streams) = (CHUNK / 2, 1);
        settings.patience.stall = Duration::from_secs(1);
    });
    let content = &super::support::bytes(1, 0)[..CHUNK as usize + 100];
    seal(hosts[0].directory.path(), &identity(0, 1, 0, 1), content);
    hosts[0].service().watch(hosts[0].place());
    hosts[0].wait_for_copies(1, 2);
    assert_eq!(fs::read(&hosts[1].replicas()[0]).unwrap(), content);
}

#[test]
fn a_step_that_its_owner_no_longer_has_is_not_sent_back_while_a_newer_one_arrives() {
    let hosts = hosts(2, |index, settings| {
        // The other host has no limit for what it would send.
        settings.rate = if index == 0 { 2 * CHUNK } else { 0 };
    });
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    let root = hosts[0].service().copies()[0].shard.root.clone();
    hosts[0].save(0, 2, &[0], 1);
    let incoming = hosts[1].store.path().join("incoming");
    until("the beginning of step 2", || {
        hosts[0].service().nudge();
        fs::read_dir(&incoming).unwrap().next().is_some()
    });
    fs::remove_dir_all(hosts[0].directory.path().join("step-000000000001")).unwrap();
    hosts[0].service().doubt(&root);
    // At each check it could be sent back.
    let mut looks = 0;
    until("step 2 on the other host", || {
        hosts[1].service().refresh();
        let copies = hosts[1].service().copies();
        let is_gone = !copies.iter().any(|copy| copy.shard.key.step == 1 && copy.own);
        let comes = fs::read_dir(&incoming).unwrap().next().is_some();
        looks += usize::from(is_gone && comes);
        hosts[1].replicas().len() == 2
    });
    assert!(looks > 0, "{looks}");
    hosts[0].wait_for_copies(2, 2);
    assert_eq!(hosts[1].service().counts().shards_sent, 0);
}

#[test]
fn a_partly_sent_step_is_finished_before_a_newer_one() {
    let hosts = where_a_step_is_begun(1);
    hosts[0].save(0, 2, &[0, 1], 2);
    until("two shards", || hosts[1].replicas().len() >= 2);
    let first = hosts[1].replicas().iter().filter(|path| is_of(path, 1)).count();
    assert_eq!(first, 2, "{:?}", hosts[1].replicas());
    hosts[0].wait_for_copies(2, 2);
}

#[test]
fn a_step_that_its_owner_deletes_while_it_is_sent_is_finished() {
    let hosts = where_a_step_is_begun(1);
    fs::remove_dir_all(hosts[0].directory.path().join("step-000000000001")).unwrap();
    hosts[0].save(0, 2, &[0, 1], 2);
    hosts[0].wait_for_copies(2, 2);
    let first: Vec<_> = hosts[1].replicas().into_iter().filter(|path| is_of(path, 1)).collect();
    assert_eq!(first.len(), 2, "{:?}", hosts[1].replicas());
    for (rank, path) in (0..).zip(&first) {
        assert!(fs::read(path).unwrap() == super::support::bytes(1, rank));
    }
    // A step that has its copies is no longer kept.
    until("step 1 to go", || {
        hosts[0].service().nudge();
        !hosts[0].service().copies().iter().any(|copy| copy.own && copy.shard.key.step == 1)
    });
}

#[test]
fn a_step_of_an_earlier_attempt_is_not_kept_for_its_copies() {
    let hosts = where_a_step_is_begun(7);
    fs::remove_dir_all(hosts[0].directory.path().join("step-000000000007")).unwrap();
    hosts[0].save(1, 3, &[0, 1], 2);
    hosts[0].wait_for_copies(3, 2);
    let rank_1 = |path: &std::path::PathBuf| is_of(path, 7) && path.to_string_lossy().contains("rank-00001");
    assert!(!hosts[1].replicas().iter().any(rank_1), "{:?}", hosts[1].replicas());
}

/// Two hosts. The first has started to send a step of two ranks.
fn where_a_step_is_begun(step: u64) -> Vec<Host> {
    let hosts = hosts(2, |_, settings| (settings.rate, settings.streams) = (8 * CHUNK, 1));
    hosts[0].wait_for_peers(1);
    hosts[0].save(0, step, &[0, 1], 2);
    let incoming = hosts[1].store.path().join("incoming");
    until("its beginning", || {
        hosts[0].service().nudge();
        fs::read_dir(&incoming).unwrap().next().is_some()
    });
    hosts
}

fn is_of(path: &std::path::Path, step: u64) -> bool {
    path.to_string_lossy().contains(&format!("step-{step:012}"))
}
