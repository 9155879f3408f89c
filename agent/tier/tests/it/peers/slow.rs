//! A rate limit that is lower than anybody would set: a chunk takes longer than a peer waits for the next bytes, and a step longer than
//! its owner keeps it.

use std::fs;
use std::time::Duration;

use super::support::{CHUNK, hosts, identity, seal, until};

#[test]
fn a_chunk_that_takes_longer_than_the_other_side_waits_arrives_all_the_same() {
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
fn a_step_that_its_owner_has_no_more_is_not_sent_back_while_a_newer_one_comes() {
    let hosts = hosts(2, |index, settings| {
        // Of the other one nothing holds back what it would send.
        settings.rate = if index == 0 { 2 * CHUNK } else { 0 };
    });
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    hosts[0].save(0, 2, &[0], 1);
    let incoming = hosts[1].store.path().join("incoming");
    until("the beginning of step 2", || {
        hosts[0].service().nudge();
        fs::read_dir(&incoming).unwrap().next().is_some()
    });
    fs::remove_dir_all(hosts[0].directory.path().join("step-000000000001")).unwrap();
    // Each look is one at which it could go back.
    let mut looks = 0;
    until("step 2 on the other host", || {
        hosts[1].service().refresh();
        let copies = hosts[1].service().copies();
        let is_gone = !copies.iter().any(|copy| copy.shard.of.step == 1 && copy.own);
        let comes = fs::read_dir(&incoming).unwrap().next().is_some();
        looks += usize::from(is_gone && comes);
        hosts[1].replicas().len() == 2
    });
    assert!(looks > 0, "{looks}");
    hosts[0].wait_for_copies(2, 2);
    assert_eq!(hosts[1].service().counts().shards_sent, 0);
}

#[test]
fn a_step_that_is_begun_is_finished_before_a_newer_one() {
    let hosts = hosts(2, |_, settings| (settings.rate, settings.streams) = (2 * CHUNK, 1));
    hosts[0].wait_for_peers(1);
    hosts[0].save(0, 1, &[0, 1], 2);
    let incoming = hosts[1].store.path().join("incoming");
    until("its beginning", || {
        hosts[0].service().nudge();
        fs::read_dir(&incoming).unwrap().next().is_some()
    });
    hosts[0].save(0, 2, &[0, 1], 2);
    until("two shards", || hosts[1].replicas().len() >= 2);
    let of_first = |path: &std::path::PathBuf| path.to_string_lossy().contains("step-000000000001");
    assert_eq!(
        hosts[1].replicas().iter().filter(|path| of_first(path)).count(),
        2,
        "{:?}",
        hosts[1].replicas()
    );
    hosts[0].wait_for_copies(2, 2);
}
