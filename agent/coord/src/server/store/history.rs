//! History: reads at earlier revisions, events for watches, and the compaction that bounds both.

use super::{COMPACTED, FUTURE, Range, Refusal, Store};
use crate::etcd::etcdserverpb as pb;
use crate::etcd::log::{Record, record};
use crate::etcd::mvccpb::{Event, KeyValue};
use std::collections::BTreeMap;

/// The requested revision is compacted; this is the first available one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compacted(pub i64);

impl Store {
    /// The keys of a range at a revision: the current ones with every later change undone.
    pub(super) fn at(&self, revision: i64, range: &Range) -> Result<Vec<KeyValue>, Refusal> {
        if revision > self.revision {
            return Err(FUTURE);
        }
        if revision < self.compacted {
            return Err(COMPACTED);
        }
        let mut keys: BTreeMap<&[u8], &KeyValue> =
            self.within(range).map(|item| (item.key.as_slice(), item)).collect();
        for event in self.history.iter().rev().take_while(|event| revision_of(event) > revision) {
            let Some(now) = &event.kv else { continue };
            if !range.holds(&now.key) {
                continue;
            }
            match &event.prev_kv {
                Some(before) => keys.insert(&before.key, before),
                None => keys.remove(now.key.as_slice()),
            };
        }
        Ok(keys.into_values().cloned().collect())
    }

    /// Events of a range from a revision on, oldest first. Only complete revisions are returned, and no further one
    /// after `most` events. The second value is the first revision that was not read.
    ///
    /// # Errors
    /// The revision is compacted.
    pub fn events(&self, range: &Range, from: i64, most: usize) -> Result<(Vec<Event>, i64), Compacted> {
        if from < self.compacted {
            return Err(Compacted(self.compacted));
        }
        let begin = self.history.partition_point(|event| revision_of(event) < from);
        let mut found: Vec<Event> = Vec::new();
        let mut seen = 0;
        for event in self.history.range(begin..) {
            let revision = revision_of(event);
            if found.len() >= most && revision != seen {
                return Ok((found, revision));
            }
            seen = revision;
            if event.kv.as_ref().is_some_and(|now| range.holds(&now.key)) {
                found.push(event.clone());
            }
        }
        Ok((found, from.max(self.revision + 1)))
    }

    /// Removes the history before a revision.
    ///
    /// # Errors
    /// It is already removed, or the revision does not exist.
    pub fn compact(&mut self, question: &pb::CompactionRequest) -> Result<pb::CompactionResponse, Refusal> {
        if question.revision > self.revision {
            return Err(FUTURE);
        }
        if question.revision <= self.compacted {
            return Err(COMPACTED);
        }
        self.forget_before(question.revision);
        self.records.push(Record { kind: Some(record::Kind::Compacted(self.compacted)) });
        Ok(pb::CompactionResponse { header: Some(self.header()) })
    }

    /// Adds the events of a new revision, and removes the oldest revisions if there are too many.
    pub(super) fn remember(&mut self, events: Vec<Event>) {
        for event in events {
            self.history_bytes += size(&event);
            self.history.push_back(event);
        }
        let too_much = |store: &Store| {
            store.history.len() > store.limits.history || store.history_bytes > store.limits.history_bytes
        };
        while too_much(self) {
            let Some(oldest) = self.history.front().map(revision_of) else { break };
            if oldest >= self.revision {
                // One revision alone exceeds the bound: watches need it once.
                break;
            }
            self.forget_before(oldest + 1);
        }
    }

    pub(super) fn forget_before(&mut self, revision: i64) {
        self.compacted = self.compacted.max(revision);
        while self.history.front().is_some_and(|event| revision_of(event) < self.compacted) {
            if let Some(event) = self.history.pop_front() {
                self.history_bytes -= size(&event);
            }
        }
    }
}

pub(super) fn revision_of(event: &Event) -> i64 {
    event.kv.as_ref().map_or(0, |now| now.mod_revision)
}

fn size(event: &Event) -> usize {
    let bytes = |item: &Option<KeyValue>| item.as_ref().map_or(0, |item| item.key.len() + item.value.len());
    // 128 bytes for the structures.
    bytes(&event.kv) + bytes(&event.prev_kv) + 128
}
