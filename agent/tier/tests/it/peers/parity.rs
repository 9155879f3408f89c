//! Hosts that store pieces for each other instead of replicas: hosts are lost, pieces are damaged, and one is replaced by false bytes.

use std::fs;
use std::path::PathBuf;

use mainstay_checkpoint::parity::Parity;
use mainstay_checkpoint_format::{Chunks, MANIFEST_NAME, Manifest, chunk_sum};
use twox_hash::XxHash3_128;

use super::flip;
use super::support::{CHUNK, Host, bytes, hosts};

const OF: Parity = Parity { data: 3, parity: 2 };

/// Equivalent number of copies: the owner's, and pieces of which two may be lost.
const ALL: usize = 4;

/// `count` hosts. The first has saved a step, and all its pieces are sent.
fn saved(count: usize, ranks: &[u32]) -> Vec<Host> {
    let hosts = hosts(count, |_, settings| settings.parity = Some(OF));
    // Before all have answered, there are too few domains, and replicas would be made.
    hosts[0].wait_for_peers(count - 1);
    hosts[0].save(0, 10, ranks, u32::try_from(ranks.len()).unwrap());
    hosts[0].wait_for_copies(10, ALL);
    hosts
}

fn living(hosts: &[Host]) -> impl Iterator<Item = (usize, &Host)> {
    hosts.iter().enumerate().filter(|(_, host)| host.service.is_some())
}

/// The host that has this piece of the first rank's shard of a step, and its file.
fn holder_of(hosts: &[Host], step: u64, piece: u32) -> (usize, PathBuf) {
    let place = format!("rank-00000.{piece}/shard");
    let is_of_step = |path: &PathBuf| {
        let manifest = fs::read(path.with_file_name(MANIFEST_NAME)).unwrap();
        Manifest::decode(&manifest).unwrap().identity.step == step
    };
    let found = living(hosts).find_map(|(index, host)| {
        let file = host.replicas().into_iter().find(|path| path.ends_with(&place) && is_of_step(path))?;
        Some((index, file))
    });
    found.unwrap()
}

#[test]
fn a_step_survives_the_loss_of_its_host_and_of_as_many_others_as_there_is_parity() {
    let mut hosts = saved(6, &[0, 1]);
    let kept: u64 = hosts.iter().flat_map(Host::replicas).map(|path| fs::metadata(path).unwrap().len()).sum();
    let sealed = 2 * bytes(10, 0).len() as u64;
    assert!(kept < sealed * 2, "{kept} bytes for {sealed}: a third more than the shard for each of parity");
    assert!(hosts[0].replicas().is_empty());
    assert!(hosts[1..].iter().all(|host| host.replicas().len() == 2), "a piece of each shard on each host");
    // Its host, one with a piece of data, and one with parity.
    hosts[0].lose();
    for piece in [1, 3] {
        let (index, _) = holder_of(&hosts, 10, piece);
        hosts[index].lose();
    }
    hosts[0].start();
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!((step, reported), (Some(10), vec![]));
    hosts[0].has(10, &[0, 1]);
    // The second time everything is here.
    let again = hosts[0].service().restore(&hosts[0].place(), None, &|_| {}).unwrap();
    assert_eq!((again.fetched, again.here), (0, 2));
}

#[test]
fn when_one_more_is_lost_it_is_reported_and_nothing_is_restored() {
    let mut hosts = saved(6, &[0]);
    hosts[0].lose();
    for piece in [0, 2, 4] {
        let (index, _) = holder_of(&hosts, 10, piece);
        hosts[index].lose();
    }
    hosts[0].start();
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, None);
    testing::snapshot!(
        "messages",
        "parity: when one more is lost it is reported and nothing is restored",
        reported.join("\n")
    );
    assert!(fs::read_dir(hosts[0].directory.path()).unwrap().next().is_none());
}

#[test]
fn a_damaged_piece_is_skipped() {
    let mut hosts = saved(6, &[0]);
    let (holder, file) = holder_of(&hosts, 10, 0);
    flip(&file, 1000);
    hosts[0].lose();
    hosts[0].start();
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(10));
    let name = &hosts[holder].name;
    assert!(reported.iter().any(|line| line.contains(name)), "{reported:?}");
    hosts[0].has(10, &[0]);
}

/// Replaces a piece at its holder by other bytes with a matching manifest, so that the holder considers them verified. Returns the holder.
fn lie_about(hosts: &mut [Host], step: u64, piece: u32) -> String {
    let (liar, file) = holder_of(hosts, step, piece);
    hosts[liar].service = None;
    let mut content = fs::read(&file).unwrap();
    content[77] ^= 1;
    let beside = file.with_file_name(MANIFEST_NAME);
    let mut manifest = Manifest::decode(&fs::read(&beside).unwrap()).unwrap();
    manifest.file.xxh3_128 = XxHash3_128::oneshot(&content);
    let sums = content.chunks(CHUNK as usize).map(chunk_sum).collect();
    manifest.chunks = Some(Chunks { bytes: CHUNK, sums });
    fs::write(&file, &content).unwrap();
    fs::write(&beside, manifest.encode()).unwrap();
    hosts[liar].start();
    super::until("the liar to believe itself", || {
        let copies = hosts[liar].service().copies();
        copies
            .iter()
            .any(|copy| copy.holder == hosts[liar].name && copy.shard.key.step == step && copy.verified)
    });
    hosts[liar].name.clone()
}

#[test]
fn a_false_piece_is_detected_and_replaced_by_another() {
    let mut hosts = saved(6, &[0]);
    hosts[0].lose();
    let liar = lie_about(&mut hosts, 10, 1);
    hosts[0].start();
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(10));
    assert!(reported.iter().any(|line| line.contains(&liar)), "{reported:?}");
    hosts[0].has(10, &[0]);
}

#[test]
fn two_false_pieces_are_detected_if_enough_others_are_left() {
    let mut hosts = saved(6, &[0]);
    hosts[0].lose();
    let liars = [0, 2].map(|piece| lie_about(&mut hosts, 10, piece));
    hosts[0].start();
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(10), "{reported:?}");
    let names_both = |line: &String| liars.iter().all(|liar| line.contains(liar.as_str()));
    assert!(reported.iter().any(names_both), "{reported:?}");
    hosts[0].has(10, &[0]);
}

#[test]
fn with_more_false_pieces_than_parity_the_previous_step_is_restored() {
    let mut hosts = saved(6, &[0]);
    hosts[0].save(0, 20, &[0], 1);
    hosts[0].wait_for_copies(20, ALL);
    hosts[0].lose();
    for piece in [0, 2, 3] {
        lie_about(&mut hosts, 20, piece);
    }
    hosts[0].start();
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(10), "{reported:?}");
    assert!(reported.iter().any(|line| line.contains("step 20")), "{reported:?}");
    hosts[0].has(10, &[0]);
    let newer = fs::read_dir(hosts[0].directory.path().join("step-000000000020"));
    assert_eq!(newer.map_or(0, Iterator::count), 0, "nothing of the newer step lies there");
}

#[test]
fn a_piece_whose_host_is_lost_is_made_again_on_another() {
    let mut hosts = saved(7, &[0]);
    let (index, _) = holder_of(&hosts, 10, 4);
    hosts[index].lose();
    super::until("the piece on another host", || {
        hosts[0].service().nudge();
        living(&hosts)
            .any(|(_, host)| host.replicas().iter().any(|path| path.ends_with("rank-00000.4/shard")))
    });
    assert!(living(&hosts).all(|(_, host)| host.replicas().len() <= 1), "no host has two");
}

#[test]
fn with_too_few_hosts_there_is_a_replica_instead() {
    let hosts = hosts(4, |_, settings| settings.parity = Some(OF));
    hosts[0].wait_for_peers(3);
    hosts[0].save(0, 10, &[0], 1);
    hosts[0].wait_for_copies(10, 2);
    let kept: Vec<PathBuf> = hosts.iter().flat_map(Host::replicas).collect();
    assert_eq!(kept.len(), 1);
    assert!(kept[0].ends_with("rank-00000/shard"), "{kept:?}");
    assert!(fs::read(&kept[0]).unwrap() == bytes(10, 0));
}
