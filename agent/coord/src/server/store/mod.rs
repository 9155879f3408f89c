//! The built-in store as a state machine: requests in, answers and records out. It has no clock, file or network:
//! time is passed in as milliseconds, so that simulations can drive it.

mod history;
mod lease;
mod replay;
mod txn;

use std::collections::{BTreeMap, VecDeque};

use tonic::{Code, Status};

use crate::etcd::etcdserverpb as pb;
use crate::etcd::log::{Change, Record, record};
use crate::etcd::mvccpb::event::EventType;
use crate::etcd::mvccpb::{Event, KeyValue};
use lease::LeaseEntry;

pub use history::Compacted;
pub use replay::Unfit;

/// The limits of the store. A job of 10,000 hosts needs some tens of megabytes.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The largest request, in bytes; etcd's limit.
    pub request: usize,
    /// The maximum number of keys.
    pub keys: usize,
    /// The maximum size of all keys and values, in bytes.
    pub bytes: usize,
    /// The maximum number of leases.
    pub leases: usize,
    /// The maximum number of watches and streams together, and of keep-alive streams.
    pub watches: usize,
    /// The maximum number of operations of a transaction; etcd's limit.
    pub operations: usize,
    /// The maximum number of changes that are kept for watches; older ones are compacted.
    pub history: usize,
    /// The maximum size of these changes, in bytes.
    pub history_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            request: 1536 * 1024,
            keys: 131_072,
            bytes: 128 << 20,
            leases: 32_768,
            watches: 32_768,
            operations: 128,
            history: 16_384,
            history_bytes: 16 << 20,
        }
    }
}

/// A refused request: etcd's code and etcd's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The code.
    pub code: Code,
    /// The message.
    pub message: &'static str,
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        Status::new(refusal.code, refusal.message)
    }
}

const fn refusal(code: Code, message: &'static str) -> Refusal {
    Refusal { code, message }
}

const EMPTY_KEY: Refusal = refusal(Code::InvalidArgument, "etcdserver: key is not provided");
const TOO_LARGE: Refusal = refusal(Code::InvalidArgument, "etcdserver: request is too large");
const NO_SPACE: Refusal = refusal(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
const COMPACTED: Refusal =
    refusal(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted");
const FUTURE: Refusal = refusal(Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision");
const NO_LEASE: Refusal = refusal(Code::NotFound, "etcdserver: requested lease not found");
const LEASE_EXISTS: Refusal = refusal(Code::FailedPrecondition, "etcdserver: lease already exists");
const TTL_TOO_LARGE: Refusal = refusal(Code::OutOfRange, "etcdserver: too large lease TTL");
const TOO_MANY_LEASES: Refusal = refusal(Code::ResourceExhausted, "etcdserver: too many leases");
const TOO_MANY_OPERATIONS: Refusal =
    refusal(Code::InvalidArgument, "etcdserver: too many operations in txn request");
const DUPLICATE_KEY: Refusal =
    refusal(Code::InvalidArgument, "etcdserver: duplicate key given in txn request");
const NOT_SERVED: Refusal =
    refusal(Code::Unimplemented, "the built-in store does not serve this operation of a transaction");

/// Keys, leases and history.
#[derive(Clone, Debug)]
pub struct Store {
    limits: Limits,
    cluster: u64,
    revision: i64,
    /// Earlier revisions are compacted.
    compacted: i64,
    keys: BTreeMap<Vec<u8>, KeyValue>,
    /// Bytes of all keys and values.
    bytes: usize,
    leases: BTreeMap<i64, LeaseEntry>,
    /// The number of the next lease, unless it is taken.
    next_lease: i64,
    /// All events from `compacted` on, oldest first, each with the previous value.
    history: VecDeque<Event>,
    history_bytes: usize,
    /// Records since the last call of `take_records`, for the log.
    records: Vec<Record>,
    /// Events of the open revision.
    open: Vec<Event>,
}

impl Store {
    /// An empty store. `cluster` distinguishes it from others: choose it at random.
    #[must_use]
    pub fn new(cluster: u64, limits: Limits) -> Store {
        Store {
            limits,
            cluster,
            // As in etcd, the empty store is at revision 1.
            revision: 1,
            compacted: 0,
            keys: BTreeMap::new(),
            bytes: 0,
            leases: BTreeMap::new(),
            next_lease: 1,
            history: VecDeque::new(),
            history_bytes: 0,
            records: Vec::new(),
            open: Vec::new(),
        }
    }

    /// What bounds it.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The newest revision.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The first available revision.
    #[must_use]
    pub fn compacted(&self) -> i64 {
        self.compacted
    }

    /// Bytes of all keys and values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The header of an answer: the cluster and the revision.
    #[must_use]
    pub fn header(&self) -> pb::ResponseHeader {
        pb::ResponseHeader {
            cluster_id: self.cluster,
            member_id: self.cluster,
            revision: self.revision,
            raft_term: 1,
        }
    }

    /// The records since the last call. They must be on disk before an answer is sent.
    pub fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }

    /// Reads keys, now or at a revision.
    ///
    /// # Errors
    /// The key is empty, or the revision is compacted or does not exist.
    pub fn range(&self, question: &pb::RangeRequest) -> Result<pb::RangeResponse, Refusal> {
        if question.key.is_empty() {
            return Err(EMPTY_KEY);
        }
        let range = Range::new(&question.key, &question.range_end);
        let found: Vec<KeyValue> = if question.revision > 0 && question.revision != self.revision {
            self.at(question.revision, &range)?
        } else {
            self.within(&range).cloned().collect()
        };
        let count = i64::try_from(found.len()).unwrap_or(i64::MAX);
        let mut answer =
            pb::RangeResponse { header: Some(self.header()), kvs: Vec::new(), more: false, count };
        if question.count_only {
            return Ok(answer);
        }
        let limit = usize::try_from(question.limit).unwrap_or(0);
        answer.more = limit > 0 && found.len() > limit;
        answer.kvs = found.into_iter().take(if limit == 0 { usize::MAX } else { limit }).collect();
        if question.keys_only {
            answer.kvs.iter_mut().for_each(|item| item.value.clear());
        }
        Ok(answer)
    }

    /// Writes a key.
    ///
    /// # Errors
    /// The key is empty, the request too large, the store full, or there is no such lease.
    pub fn put(&mut self, question: pb::PutRequest) -> Result<pb::PutResponse, Refusal> {
        self.check_put(&question)?;
        self.check_space(question.key.len() + question.value.len(), 1)?;
        let before = self.do_put(question);
        self.commit();
        Ok(pb::PutResponse { header: Some(self.header()), prev_kv: before })
    }

    /// Removes keys.
    ///
    /// # Errors
    /// The key is empty.
    pub fn delete_range(
        &mut self,
        question: &pb::DeleteRangeRequest,
    ) -> Result<pb::DeleteRangeResponse, Refusal> {
        if question.key.is_empty() {
            return Err(EMPTY_KEY);
        }
        let mut answer = self.do_delete(question);
        self.commit();
        answer.header = Some(self.header());
        Ok(answer)
    }

    fn check_put(&self, put: &pb::PutRequest) -> Result<(), Refusal> {
        if put.key.is_empty() {
            return Err(EMPTY_KEY);
        }
        if put.key.len() + put.value.len() > self.limits.request {
            return Err(TOO_LARGE);
        }
        if put.lease != 0 && !self.leases.contains_key(&put.lease) {
            return Err(NO_LEASE);
        }
        Ok(())
    }

    fn check_space(&self, bytes: usize, keys: usize) -> Result<(), Refusal> {
        let fits = self.bytes + bytes <= self.limits.bytes && self.keys.len() + keys <= self.limits.keys;
        if fits { Ok(()) } else { Err(NO_SPACE) }
    }

    /// Writes within the open revision; returns the previous value if requested.
    fn do_put(&mut self, put: pb::PutRequest) -> Option<KeyValue> {
        let revision = self.revision + 1;
        let before = self.keys.get(&put.key).cloned();
        let now = KeyValue {
            create_revision: before.as_ref().map_or(revision, |before| before.create_revision),
            mod_revision: revision,
            version: before.as_ref().map_or(1, |before| before.version.saturating_add(1)),
            key: put.key,
            value: put.value,
            lease: put.lease,
        };
        self.set(now, EventType::Put);
        before.filter(|_| put.prev_kv)
    }

    /// Removes within the open revision; the answer has no header yet.
    fn do_delete(&mut self, delete: &pb::DeleteRangeRequest) -> pb::DeleteRangeResponse {
        let range = Range::new(&delete.key, &delete.range_end);
        let gone: Vec<KeyValue> = self.within(&range).cloned().collect();
        for item in &gone {
            let key = item.key.clone();
            self.set(
                KeyValue { key, mod_revision: self.revision + 1, ..KeyValue::default() },
                EventType::Delete,
            );
        }
        pb::DeleteRangeResponse {
            header: None,
            deleted: i64::try_from(gone.len()).unwrap_or(i64::MAX),
            prev_kvs: if delete.prev_kv { gone } else { Vec::new() },
        }
    }

    /// Changes one key and adds the event to the open revision.
    fn set(&mut self, now: KeyValue, kind: EventType) {
        let before = match kind {
            EventType::Put => self.keys.insert(now.key.clone(), now.clone()),
            EventType::Delete => self.keys.remove(&now.key),
        };
        if let Some(before) = &before {
            self.bytes -= before.key.len() + before.value.len();
            self.detach(before.lease, &before.key);
        }
        if kind == EventType::Put {
            self.bytes += now.key.len() + now.value.len();
            self.attach(now.lease, &now.key);
        }
        self.open.push(Event { r#type: kind.into(), kv: Some(now), prev_kv: before });
    }

    /// Closes the open revision: increments the revision, adds its events to the history, and writes a record for the
    /// log. Does nothing if there are no events.
    fn commit(&mut self) {
        if self.open.is_empty() {
            return;
        }
        self.revision += 1;
        let events = std::mem::take(&mut self.open);
        let lean = |event: &Event| Event { prev_kv: None, ..event.clone() };
        let change = Change { revision: self.revision, events: events.iter().map(lean).collect() };
        self.records.push(Record { kind: Some(record::Kind::Change(change)) });
        self.remember(events);
    }

    fn within<'a>(&'a self, range: &Range) -> impl Iterator<Item = &'a KeyValue> + use<'a> {
        self.keys.range(range.bounds()).map(|(_, item)| item)
    }
}

/// The keys of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    key: Vec<u8>,
    end: End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// Only the key.
    Single,
    /// All keys from this one on.
    Open,
    /// Up to this key, exclusive.
    Before(Vec<u8>),
}

impl Range {
    /// The range of `key` and `range_end`, in etcd's sense.
    #[must_use]
    pub fn new(key: &[u8], range_end: &[u8]) -> Range {
        let end = match range_end {
            [] => End::Single,
            [0] => End::Open,
            // An end before its start: the range is empty.
            end => End::Before(end.max(key).to_vec()),
        };
        Range { key: key.to_vec(), end }
    }

    /// Whether the range contains a key.
    #[must_use]
    pub fn holds(&self, key: &[u8]) -> bool {
        match &self.end {
            End::Single => key == self.key,
            End::Open => key >= self.key.as_slice(),
            End::Before(end) => key >= self.key.as_slice() && key < end.as_slice(),
        }
    }

    fn bounds(&self) -> (std::ops::Bound<Vec<u8>>, std::ops::Bound<Vec<u8>>) {
        use std::ops::Bound::{Excluded, Included, Unbounded};
        let end = match &self.end {
            End::Single => Included(self.key.clone()),
            End::Open => Unbounded,
            End::Before(end) => Excluded(end.clone()),
        };
        (Included(self.key.clone()), end)
    }
}
