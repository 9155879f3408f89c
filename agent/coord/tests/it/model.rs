//! The built-in store compared with a model that keeps a full copy of every revision.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_coord::etcd::etcdserverpb as pb;
use mainstay_coord::etcd::mvccpb::event::EventType;
use mainstay_coord::etcd::mvccpb::{Event, KeyValue};
use mainstay_coord::server::store::{Limits, Range, Store};
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::request_op::Request;
use proptest::collection::vec;
use proptest::prelude::*;

const KEYS: [&str; 5] = ["a", "a/1", "a/2", "b", "b/1"];

#[derive(Clone, Debug)]
enum Op {
    Put { key: usize, value: u8, lease: usize },
    Delete { key: usize, prefix: bool },
    Txn { if_there: usize, wanted: bool, puts: BTreeSet<usize>, delete: usize },
    Grant { ttl: i64 },
    Revoke { lease: usize },
    KeepAlive { lease: usize },
    Advance { milliseconds: u64 },
    Compact { back: i64 },
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let key = 0..KEYS.len();
    prop_oneof![
        5 => (key.clone(), any::<u8>(), 0_usize..4).prop_map(|(key, value, lease)| Op::Put { key, value, lease }),
        2 => (key.clone(), any::<bool>()).prop_map(|(key, prefix)| Op::Delete { key, prefix }),
        3 => (key.clone(), any::<bool>(), proptest::collection::btree_set(key.clone(), 0..3), key)
            .prop_map(|(if_there, wanted, puts, delete)| Op::Txn { if_there, wanted, puts, delete }),
        2 => (1_i64..5).prop_map(|ttl| Op::Grant { ttl }),
        1 => (0_usize..4).prop_map(|lease| Op::Revoke { lease }),
        1 => (0_usize..4).prop_map(|lease| Op::KeepAlive { lease }),
        2 => (1_u64..3000).prop_map(|milliseconds| Op::Advance { milliseconds }),
        1 => (0_i64..6).prop_map(|back| Op::Compact { back }),
        1 => Just(Op::Restart),
    ]
}

type Keys = BTreeMap<String, KeyValue>;

/// All revisions from the first on, and leases with their end.
struct Model {
    revisions: Vec<Keys>,
    compacted: i64,
    leases: BTreeMap<i64, (i64, u64)>,
    now: u64,
}

impl Model {
    fn revision(&self) -> i64 {
        i64::try_from(self.revisions.len()).unwrap()
    }

    fn at(&self, revision: i64) -> &Keys {
        &self.revisions[usize::try_from(revision - 1).unwrap()]
    }

    fn today(&self) -> &Keys {
        self.revisions.last().unwrap()
    }

    /// Adds a revision if the change changes anything.
    fn change(&mut self, removed: &[String], written: &[(String, Vec<u8>, i64)]) {
        let revision = self.revision() + 1;
        let mut keys = self.today().clone();
        let mut changed = !written.is_empty();
        for key in removed {
            changed |= keys.remove(key).is_some();
        }
        for (key, value, lease) in written {
            let before = keys.get(key);
            let item = KeyValue {
                key: key.clone().into_bytes(),
                create_revision: before.map_or(revision, |item| item.create_revision),
                mod_revision: revision,
                version: before.map_or(1, |item| item.version + 1),
                value: value.clone(),
                lease: *lease,
            };
            keys.insert(key.clone(), item);
        }
        if changed {
            self.revisions.push(keys);
        }
    }

    fn end_lease(&mut self, id: i64) {
        self.leases.remove(&id);
        let gone: Vec<String> =
            self.today().iter().filter(|(_, item)| item.lease == id).map(|(key, _)| key.clone()).collect();
        self.change(&gone, &[]);
    }

    /// The events that a watch from a revision on has to see, by comparing adjacent revisions.
    fn events(&self, from: i64) -> Vec<(i64, bool, String)> {
        let mut events = Vec::new();
        for revision in from.max(2)..=self.revision() {
            let (before, now) = (self.at(revision - 1), self.at(revision));
            let mut of_this = Vec::new();
            for (key, item) in now {
                if item.mod_revision == revision {
                    of_this.push((revision, true, key.clone()));
                }
            }
            for key in before.keys().filter(|key| !now.contains_key(*key)) {
                of_this.push((revision, false, key.clone()));
            }
            of_this.sort();
            events.extend(of_this);
        }
        events
    }
}

fn everything(revision: i64) -> pb::RangeRequest {
    pb::RangeRequest { key: vec![1], range_end: vec![0], revision, ..Default::default() }
}

fn put(key: &str, value: u8, lease: i64) -> pb::PutRequest {
    pb::PutRequest { key: key.into(), value: vec![value], lease, prev_kv: false }
}

fn delete(key: &str, prefix: bool) -> pb::DeleteRangeRequest {
    let mut end = key.as_bytes().to_vec();
    *end.last_mut().unwrap() += 1;
    pb::DeleteRangeRequest { key: key.into(), range_end: if prefix { end } else { vec![] }, prev_kv: false }
}

fn seen(events: &[Event]) -> Vec<(i64, bool, String)> {
    let read = |event: &Event| {
        let now = event.kv.as_ref().unwrap();
        (now.mod_revision, event.r#type() == EventType::Put, String::from_utf8(now.key.clone()).unwrap())
    };
    let mut seen: Vec<_> = events.iter().map(read).collect();
    assert!(seen.is_sorted_by_key(|(revision, ..)| *revision), "{seen:?}");
    seen.sort();
    seen
}

fn compare_all(store: &Store, model: &Model) {
    assert_eq!(store.revision(), model.revision());
    for revision in 1..=model.revision() {
        let found = store.range(&everything(revision));
        if revision < model.compacted {
            assert!(found.is_err(), "revision {revision} is compacted");
        } else {
            let wanted: Vec<KeyValue> = model.at(revision).values().cloned().collect();
            assert_eq!(found.unwrap().kvs, wanted, "revision {revision}");
        }
        let all = Range::new(&[1], &[0]);
        match store.events(&all, revision, usize::MAX) {
            Ok((events, next)) => {
                assert_eq!(seen(&events), model.events(revision), "from {revision}");
                assert_eq!(next, model.revision() + 1);
            }
            Err(_) => assert!(revision < model.compacted),
        }
    }
    assert!(store.range(&everything(model.revision() + 1)).is_err());
}

fn txn(if_there: usize, wanted: bool, puts: &BTreeSet<usize>, removed: usize) -> pb::TxnRequest {
    let compare = pb::Compare {
        result: if wanted { CompareResult::Greater } else { CompareResult::Equal }.into(),
        target: CompareTarget::Create.into(),
        key: KEYS[if_there].into(),
        target_union: Some(TargetUnion::CreateRevision(0)),
    };
    let put = |key: &usize| pb::RequestOp { request: Some(Request::RequestPut(put(KEYS[*key], 7, 0))) };
    let mut success: Vec<pb::RequestOp> = puts.iter().map(put).collect();
    success.push(pb::RequestOp { request: Some(Request::RequestDeleteRange(delete(KEYS[removed], false))) });
    pb::TxnRequest { compare: vec![compare], success, failure: Vec::new() }
}

/// Runs an operation on both, and compares the answers.
fn step(store: &mut Store, model: &mut Model, granted: &mut Vec<i64>, records: &mut Vec<u8>, op: Op) {
    let lease_of = |index: usize, granted: &Vec<i64>| {
        if index == 0 { 0 } else { granted.get(index - 1).copied().unwrap_or(0) }
    };
    match op {
        Op::Put { key, value, lease } => {
            let lease = lease_of(lease, granted);
            let done = store.put(put(KEYS[key], value, lease));
            assert_eq!(done.is_ok(), lease == 0 || model.leases.contains_key(&lease));
            if done.is_ok() {
                model.change(&[], &[(KEYS[key].to_owned(), vec![value], lease)]);
            }
        }
        Op::Delete { key, prefix } => {
            let hit = |candidate: &&String| {
                if prefix { candidate.starts_with(KEYS[key]) } else { *candidate == KEYS[key] }
            };
            let gone: Vec<String> = model.today().keys().filter(hit).cloned().collect();
            let answer = store.delete_range(&delete(KEYS[key], prefix)).unwrap();
            assert_eq!(answer.deleted, i64::try_from(gone.len()).unwrap());
            model.change(&gone, &[]);
        }
        Op::Txn { if_there, wanted, puts, delete } => {
            let holds = model.today().contains_key(KEYS[if_there]) == wanted;
            let done = store.txn(txn(if_there, wanted, &puts, delete));
            if puts.contains(&delete) {
                assert!(done.unwrap_err().message.contains("duplicate key"));
            } else {
                assert_eq!(done.unwrap().succeeded, holds);
                if holds {
                    let written: Vec<_> =
                        puts.iter().map(|key| (KEYS[*key].to_owned(), vec![7], 0)).collect();
                    model.change(&[KEYS[delete].to_owned()], &written);
                }
            }
        }
        Op::Grant { ttl } => {
            let answer = store.grant(&pb::LeaseGrantRequest { ttl, id: 0 }, model.now).unwrap();
            assert!(!model.leases.contains_key(&answer.id) && !granted.contains(&answer.id));
            model.leases.insert(answer.id, (ttl, model.now + ttl.unsigned_abs() * 1000));
            granted.insert(0, answer.id);
        }
        Op::Revoke { lease } => {
            let lease = lease_of(lease, granted);
            let done = store.revoke(&pb::LeaseRevokeRequest { id: lease });
            assert_eq!(done.is_ok(), model.leases.contains_key(&lease));
            if done.is_ok() {
                model.end_lease(lease);
            }
        }
        Op::KeepAlive { lease } => {
            let lease = lease_of(lease, granted);
            let answer = store.keep_alive(lease, model.now);
            let now = model.now;
            let ttl = model.leases.get_mut(&lease).map_or(0, |(ttl, ends)| {
                *ends = now + ttl.unsigned_abs() * 1000;
                *ttl
            });
            assert_eq!(answer.ttl, ttl);
        }
        Op::Advance { milliseconds } => {
            model.now += milliseconds;
            store.expire(model.now);
            let over: Vec<i64> =
                model.leases.iter().filter(|(_, (_, ends))| *ends <= model.now).map(|(id, _)| *id).collect();
            over.into_iter().for_each(|id| model.end_lease(id));
        }
        Op::Compact { back } => {
            let revision = model.revision() - back;
            let done = store.compact(&pb::CompactionRequest { revision, physical: false });
            assert_eq!(done.is_ok(), revision > model.compacted);
            if done.is_ok() {
                model.compacted = revision;
            }
        }
        Op::Restart => {
            // From the log alone. Leases have their full time again.
            records.extend(store.take_records().iter().flat_map(mainstay_coord::server::log::encode));
            let mut read = mainstay_coord::server::log::parse(records).records.into_iter();
            let mut again = Store::restore(read.next().unwrap(), Limits::default(), model.now).unwrap();
            read.for_each(|record| again.replay(record, model.now).unwrap());
            assert_eq!(again.snapshot(), store.snapshot());
            *store = again;
            let now = model.now;
            model.leases.values_mut().for_each(|(ttl, ends)| *ends = now + ttl.unsigned_abs() * 1000);
        }
    }
    records.extend(store.take_records().iter().flat_map(mainstay_coord::server::log::encode));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_store_matches_a_model_of_all_revisions(ops in vec(op(), 1..60)) {
        let mut store = Store::new(7, Limits::default());
        let mut model = Model { revisions: vec![Keys::new()], compacted: 0, leases: BTreeMap::new(), now: 0 };
        let mut records = mainstay_coord::server::log::MAGIC.to_vec();
        records.extend(mainstay_coord::server::log::encode(&store.snapshot()));
        let mut granted = Vec::new();
        for op in ops {
            step(&mut store, &mut model, &mut granted, &mut records, op);
            compare_all(&store, &model);
        }
    }

    #[test]
    fn the_history_is_bounded_and_the_rest_is_correct(values in vec(any::<u8>(), 1..200)) {
        let limits = Limits { history: 16, ..Limits::default() };
        let mut store = Store::new(7, limits);
        for value in &values {
            store.put(put("a", *value, 0)).unwrap();
        }
        let from = store.compacted().max(2);
        let (events, _) = store.events(&Range::new(b"a", b""), from, usize::MAX).unwrap();
        prop_assert!(events.len() <= 16);
        prop_assert_eq!(events.len(), values.len().min(16));
        let newest: Vec<u8> = events.iter().map(|event| event.kv.as_ref().unwrap().value[0]).collect();
        prop_assert_eq!(&newest[..], &values[values.len() - newest.len()..]);
        if store.compacted() > 1 {
            prop_assert!(store.events(&Range::new(b"a", b""), store.compacted() - 1, 1).is_err());
        }
    }
}

#[test]
fn a_full_store_refuses_writes_and_keeps_serving() {
    let limits = Limits { keys: 3, bytes: 64, leases: 2, ..Limits::default() };
    let mut store = Store::new(7, limits);
    for key in ["a", "b", "c"] {
        store.put(put(key, 0, 0)).unwrap();
    }
    assert!(store.put(put("d", 0, 0)).unwrap_err().message.contains("space exceeded"));
    store.delete_range(&delete("a", false)).unwrap();
    store.put(put("d", 0, 0)).unwrap();
    let large = pb::PutRequest { key: b"d".to_vec(), value: vec![0; 64], lease: 0, prev_kv: false };
    assert!(store.put(large).unwrap_err().message.contains("space exceeded"));
    for _ in 0..2 {
        store.grant(&pb::LeaseGrantRequest { ttl: 1, id: 0 }, 0).unwrap();
    }
    assert!(store.grant(&pb::LeaseGrantRequest { ttl: 1, id: 0 }, 0).is_err());
    store.expire(1000);
    store.grant(&pb::LeaseGrantRequest { ttl: 1, id: 0 }, 0).unwrap();
}
