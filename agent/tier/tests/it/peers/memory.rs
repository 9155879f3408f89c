//! Replicas in memory whose pages have held another step before.

use std::fs;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mainstay_tier::peer::SealedShard;
use mainstay_tier::peer::store::{IncomingShard, Offer, Store};

use super::support::{Proxy, address, bytes, hosts_named, identity, in_memory, manifest, until};

fn offered(store: &Store, step: u64, content: &[u8]) -> Arc<IncomingShard> {
    let sealed = SealedShard::of(manifest(&identity(0, step, 0, 1), content).encode()).unwrap();
    match store.offer(sealed, &[], None).unwrap() {
        Offer::Missing(upload) => upload,
        Offer::Here => panic!("it is not here yet"),
    }
}

/// Sends all chunks. Returns how many of them went directly into memory.
fn bring(upload: &IncomingShard, content: &[u8]) -> usize {
    let mut into_memory = 0;
    for index in upload.missing() {
        let (offset, length, _) = upload.sealed.chunk(index).unwrap();
        let piece = &content[offset as usize..][..length as usize];
        let claim = upload.claim(index).unwrap();
        match claim.memory(offset, length) {
            Some(mut memory) => {
                memory.bytes().copy_from_slice(piece);
                into_memory += 1;
            }
            None => claim.write(offset, piece).unwrap(),
        }
        claim.done();
    }
    into_memory
}

fn kept(store: &Store, upload: &IncomingShard) -> Vec<u8> {
    let (_, mut file, _) = store.open_replica(&upload.sealed.shard.root).unwrap();
    let mut found = Vec::new();
    file.read_to_end(&mut found).unwrap();
    found
}

#[test]
fn a_replica_reuses_the_memory_of_an_older_one_and_has_none_of_its_bytes() {
    let home = in_memory();
    let store = Store::open(home.path(), 1 << 30).unwrap();
    // Slightly and much longer and shorter.
    let lengths = [299_990, 299_990, 300_000, 299_980, 100_000, 400_000, 400_000];
    let mut into_memory = Vec::new();
    for (step, length) in (1..).zip(lengths) {
        let content: Vec<u8> = bytes(step, 0).into_iter().cycle().take(length).collect();
        let upload = offered(&store, step, &content);
        into_memory.push(bring(&upload, &content));
        store.commit(&upload).unwrap();
        assert!(kept(&store, &upload) == content, "step {step}");
        assert!(store.remove(&upload.sealed.shard.root));
    }
    // Unused pages are not mapped, and a last chunk that grows beyond the mapped part is written.
    assert_eq!(into_memory, [0, 5, 4, 5, 2, 7, 7]);
}

#[test]
fn the_memory_of_an_abandoned_shard_is_used_again_once_no_connection_holds_it() {
    let home = in_memory();
    let store = Store::open(home.path(), 1 << 30).unwrap();
    let (old, new) = (bytes(1, 0), bytes(2, 0));
    let late = offered(&store, 1, &old);
    let (offset, length, _) = late.sealed.chunk(0).unwrap();
    let claim = late.claim(0).unwrap();
    store.abandon(&late);
    // A connection still sends a chunk of the old shard: the new one is in another file.
    let upload = offered(&store, 2, &new);
    assert_eq!(bring(&upload, &new), 0, "it has new pages");
    claim.write(offset, &old[..length as usize]).unwrap();
    claim.done();
    assert!(store.commit(&late).is_err());
    store.commit(&upload).unwrap();
    assert!(kept(&store, &upload) == new);
    drop(late);
    let upload = offered(&store, 3, &new);
    assert!(bring(&upload, &new) > 0, "its pages are there");
    store.commit(&upload).unwrap();
    assert!(kept(&store, &upload) == new);
    assert_eq!(fs::read_dir(home.path().join("spare")).unwrap().count(), 0);
}

#[test]
fn a_chunk_that_one_connection_sends_is_not_written_by_another() {
    let home = in_memory();
    let store = Store::open(home.path(), 1 << 30).unwrap();
    let content = bytes(1, 0);
    for step in 1..=2 {
        let upload = offered(&store, step, &content);
        bring(&upload, &content);
        store.commit(&upload).unwrap();
        store.remove(&upload.sealed.shard.root);
    }
    let upload = offered(&store, 3, &content);
    let (offset, length, _) = upload.sealed.chunk(0).unwrap();
    let claim = upload.claim(0).unwrap();
    let mut memory = claim.memory(offset, length).unwrap();
    memory.bytes().fill(0);
    assert!(upload.claim(0).is_none() && claim.memory(offset, length).is_none());
    // The connection breaks: what it sent does not count.
    drop(memory);
    drop(claim);
    assert!(upload.missing().contains(&0) && store.commit(&upload).is_err());
    bring(&upload, &content);
    store.commit(&upload).unwrap();
    assert!(kept(&store, &upload) == content);
}

#[test]
fn bits_that_flip_in_transit_into_reused_memory_are_detected() {
    let (front, back, owner) = (address(), address(), address());
    let pieces = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&pieces);
    let proxy = Proxy::start(&front, &back, move |_, piece| {
        // Pieces of this length are of chunks. One in ten is corrupted; a chunk may be corrupted twice but not three times.
        if piece.len() > 20_000 && count.fetch_add(1, Ordering::SeqCst) % 10 == 9 {
            piece[10_000] ^= 4;
        }
        true
    });
    let hosts = hosts_named(&[owner, front], |index, settings| {
        (settings.streams, settings.keep) = (1, 1);
        if index == 1 {
            settings.listen = back.parse().unwrap();
        }
    });
    for step in 1..=6 {
        hosts[0].save(0, step, &[0], 1);
        hosts[0].wait_for_copies(step, 2);
        let of_step = |path: &std::path::PathBuf| path.display().to_string().contains(&format!("{step:012}"));
        let replica = hosts[1].replicas().into_iter().find(of_step).unwrap();
        assert!(fs::read(replica).unwrap() == bytes(step, 0), "step {step}");
        until("older replicas to go", || hosts[1].replicas().iter().all(of_step));
    }
    assert!(pieces.load(Ordering::SeqCst) > 10, "something was spoilt");
    drop(proxy);
}
