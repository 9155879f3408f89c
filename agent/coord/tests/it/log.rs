//! The log of the built-in store: cut at every byte, damaged, foreign.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use mainstay_coord::etcd::etcdserverpb as pb;
use mainstay_coord::server::log::{FILE, Log, MAGIC, parse};
use mainstay_coord::server::store::{Limits, Store};
use proptest::prelude::*;

fn open(directory: &Path) -> (Log, Store) {
    Log::open(directory, 7, Limits::default(), 0).unwrap()
}

fn put(store: &mut Store, n: u8, lease: i64) {
    let value = vec![n; usize::from(n)];
    store.put(pb::PutRequest { key: format!("k{}", n % 5).into(), value, lease, prev_kv: false }).unwrap();
}

/// The content of the store at a length of the log.
type Steps = Vec<(usize, Store)>;

/// A log, and its length and the content of the store after each acknowledged step.
fn written(directory: &Path) -> (Vec<u8>, Steps) {
    let (mut log, mut store) = open(directory);
    let mut steps = vec![(fs::read(directory.join(FILE)).unwrap().len(), store.clone())];
    let lease = store.grant(&pb::LeaseGrantRequest { ttl: 60, id: 0 }, 0).unwrap().id;
    for n in 1..25 {
        match n {
            9 => {
                store
                    .delete_range(&pb::DeleteRangeRequest { key: b"k1".to_vec(), ..Default::default() })
                    .unwrap();
            }
            15 => {
                store.compact(&pb::CompactionRequest { revision: 8, physical: false }).unwrap();
            }
            20 => {
                store.revoke(&pb::LeaseRevokeRequest { id: lease }).unwrap();
            }
            n => put(&mut store, n, if n % 3 == 0 && n < 20 { lease } else { 0 }),
        }
        log.append(&store.take_records()).unwrap();
        steps.push((fs::read(directory.join(FILE)).unwrap().len(), store.clone()));
    }
    (fs::read(directory.join(FILE)).unwrap(), steps)
}

#[test]
fn a_log_cut_at_any_byte_has_all_acknowledged_records_and_nothing_torn() {
    let folder = testing::tempdir().unwrap();
    let (bytes, steps) = written(folder.path());
    let cut = testing::tempdir().unwrap();
    for length in 0..=bytes.len() {
        fs::write(cut.path().join(FILE), &bytes[..length]).unwrap();
        let (log, store) = open(cut.path());
        let acknowledged = steps.iter().rev().find(|(end, _)| *end <= length);
        match acknowledged {
            Some((end, wanted)) => {
                let held = store.revision() >= wanted.revision();
                assert!(held, "cut at {length}: revision {} of {}", store.revision(), wanted.revision());
                if *end == length {
                    assert_eq!(store.snapshot(), wanted.snapshot(), "cut at {length}");
                }
            }
            None => assert_eq!(store.revision(), 1, "cut at {length}"),
        }
        // The result is always the state of the store after a step.
        let known = steps.iter().any(|(_, step)| step.revision() == store.revision());
        assert!(known, "cut at {length}: revision {}", store.revision());
        drop(log);
    }
}

#[test]
fn the_log_continues_after_a_cut() {
    let folder = testing::tempdir().unwrap();
    let (bytes, _) = written(folder.path());
    fs::write(folder.path().join(FILE), &bytes[..bytes.len() - 3]).unwrap();
    let (mut log, mut store) = open(folder.path());
    put(&mut store, 77, 0);
    log.append(&store.take_records()).unwrap();
    drop(log);
    let (_log, again) = open(folder.path());
    assert_eq!(again.snapshot(), store.snapshot());
}

#[test]
fn a_kill_while_the_snapshot_is_written_leaves_the_old_log() {
    let folder = testing::tempdir().unwrap();
    let (bytes, steps) = written(folder.path());
    fs::write(folder.path().join(FILE), &bytes).unwrap();
    fs::write(folder.path().join(format!("{FILE}.new")), &bytes[..40]).unwrap();
    let (_log, store) = open(folder.path());
    assert_eq!(store.snapshot(), steps.last().unwrap().1.snapshot());
}

#[test]
fn a_grown_log_is_rewritten_from_a_snapshot() {
    let folder = testing::tempdir().unwrap();
    let (mut log, mut store) = open(folder.path());
    let value = vec![1; 1 << 20];
    let mut rewritten = 0;
    for _ in 0..60 {
        store
            .put(pb::PutRequest { key: b"k".to_vec(), value: value.clone(), lease: 0, prev_kv: false })
            .unwrap();
        log.append(&store.take_records()).unwrap();
        if log.is_grown() {
            log.rewrite(&store).unwrap();
            rewritten += 1;
        }
    }
    assert!(rewritten > 0);
    drop(log);
    let (_log, again) = open(folder.path());
    assert_eq!(again.snapshot(), store.snapshot());
}

#[test]
fn a_foreign_file_is_not_used_as_a_log() {
    let folder = testing::tempdir().unwrap();
    fs::write(folder.path().join(FILE), "something else entirely").unwrap();
    let error = Log::open(folder.path(), 7, Limits::default(), 0).unwrap_err().to_string();
    testing::snapshot!(
        "errors",
        "a foreign file",
        error.replace(&folder.path().display().to_string(), "DATA")
    );
    assert_eq!(fs::read(folder.path().join(FILE)).unwrap(), b"something else entirely");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_damage_is_detected(at in any::<proptest::sample::Index>(), bit in 0_u8..8) {
        static WRITTEN: LazyLock<(Vec<u8>, Steps)> =
            LazyLock::new(|| written(testing::tempdir().unwrap().path()));
        let (mut bytes, steps) = WRITTEN.clone();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let parsed = parse(&bytes);
        prop_assert!(parsed.whole <= at, "the damage at {at} is within the bytes that were read, {}", parsed.whole);
        // The records before the damage are read as they were written.
        let mut records = parsed.records.into_iter();
        if let Some(first) = records.next() {
            let mut store = Store::restore(first, Limits::default(), 0).unwrap();
            for record in records {
                store.replay(record, 0).unwrap();
            }
            prop_assert!(steps.iter().any(|(_, step)| step.revision() == store.revision()));
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let with_magic = [MAGIC.as_slice(), &bytes].concat();
        for bytes in [&bytes, &with_magic] {
            prop_assert!(parse(bytes).whole <= bytes.len());
        }
    }
}
