//! Bytes that are already on both hosts are not sent; bytes that only seem to be are.

use std::fs;

use super::flip;
use super::support::{Host, bytes, hosts, identity, seal, shard};

const CHUNK: usize = 64 << 10;

/// What ranks with the same parameters save: equal except for the first part, which identifies the rank.
fn replicated(step: u64, rank: u32) -> Vec<u8> {
    let mut content = bytes(step, 7);
    content[..8].copy_from_slice(&u64::from(rank).to_le_bytes());
    content
}

fn save(host: &Host, step: u64, rank: u32, content: &[u8]) {
    seal(host.directory.path(), &identity(0, step, rank, 2), content);
    host.service().watch(host.place());
    // It has listed its shards before it is offered anything.
    host.service().copies();
}

fn kept(host: &Host, step: u64, rank: u32) -> Vec<u8> {
    let place = format!("step-{step:012}.0/rank-{rank:05}/shard");
    let found = host.replicas().into_iter().find(|path| path.ends_with(&place));
    fs::read(found.unwrap()).unwrap()
}

/// Two hosts. The second has already saved; only the first sends.
fn pair() -> Vec<Host> {
    hosts(2, |index, settings| settings.copies = usize::from(index == 0))
}

/// Asserts that exactly this number of bytes has left a host: the holder is done a moment before the sender has counted it.
fn assert_sent(host: &Host, bytes: usize) {
    let sent = || host.service().counts().bytes_sent;
    super::until("what was sent to be counted", || sent() >= bytes as u64);
    assert_eq!(sent(), bytes as u64);
}

/// Waits until a shard of the first host is on the second.
fn wait(hosts: &[Host], step: u64, rank: u32) {
    super::until("the replica", || {
        hosts[0].service().nudge();
        let place = format!("step-{step:012}.0/rank-{rank:05}/manifest.json");
        hosts[1].replicas().iter().any(|path| path.with_file_name("manifest.json").ends_with(&place))
    });
}

#[test]
fn chunks_that_the_holders_own_rank_has_sealed_are_not_sent() {
    let hosts = pair();
    save(&hosts[1], 4, 1, &replicated(4, 1));
    save(&hosts[0], 4, 0, &replicated(4, 0));
    wait(&hosts, 4, 0);
    assert!(kept(&hosts[1], 4, 0) == replicated(4, 0));
    // The first chunk, which differs.
    assert_sent(&hosts[0], CHUNK);
}

#[test]
fn chunks_that_changed_on_the_holder_since_their_seal_are_sent() {
    let hosts = pair();
    save(&hosts[1], 4, 1, &replicated(4, 1));
    flip(&shard(hosts[1].directory.path(), 4, 1).join("state.safetensors"), 3 * CHUNK as u64 + 5);
    save(&hosts[0], 4, 0, &replicated(4, 0));
    wait(&hosts, 4, 0);
    assert!(kept(&hosts[1], 4, 0) == replicated(4, 0), "what was damaged there did not get into the replica");
    assert_sent(&hosts[0], 2 * CHUNK);
}

#[test]
fn chunks_unchanged_since_an_older_step_are_sent_once() {
    let hosts = pair();
    let older = bytes(1, 0);
    let mut newer = older.clone();
    newer[CHUNK + 9] ^= 1;
    save(&hosts[0], 1, 0, &older);
    wait(&hosts, 1, 0);
    assert_sent(&hosts[0], older.len());
    save(&hosts[0], 2, 0, &newer);
    wait(&hosts, 2, 0);
    assert!(kept(&hosts[1], 2, 0) == newer);
    assert_sent(&hosts[0], older.len() + CHUNK);
}

#[test]
fn shards_that_have_nothing_in_common_are_sent_whole() {
    let hosts = pair();
    save(&hosts[1], 4, 1, &bytes(4, 1));
    save(&hosts[0], 4, 0, &bytes(4, 0));
    wait(&hosts, 4, 0);
    assert!(kept(&hosts[1], 4, 0) == bytes(4, 0));
    assert_sent(&hosts[0], bytes(4, 0).len());
}
