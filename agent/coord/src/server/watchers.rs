//! The watches and their progress. A slow reader reads from the history later and needs no memory of its own.

use std::collections::BTreeMap;

use tokio::sync::mpsc::Sender;
use tonic::Status;

use super::store::{Compacted, Range, Store};
use crate::etcd::etcdserverpb as pb;

/// Queued answers per reader.
pub(super) const MAX_QUEUED_RESPONSES: usize = 64;
/// Events in one answer, unless one revision has more.
const MAX_EVENTS_PER_RESPONSE: usize = 256;

pub(super) type Answers = Sender<Result<pb::WatchResponse, Status>>;

/// All watch streams.
#[derive(Default)]
pub(super) struct Watchers {
    streams: BTreeMap<u64, Stream>,
    next_stream: u64,
}

struct Stream {
    answers: Answers,
    watches: BTreeMap<i64, Watching>,
    next_watch: i64,
}

struct Watching {
    range: Range,
    /// The first unsent revision.
    next: i64,
    with_before: bool,
}

impl Watchers {
    /// The number of watches and streams.
    pub(super) fn count(&self) -> usize {
        self.streams.values().map(|stream| stream.watches.len() + 1).sum()
    }

    /// Opens a stream; returns its number.
    pub(super) fn open(&mut self, answers: Answers) -> u64 {
        self.next_stream += 1;
        let stream = Stream { answers, watches: BTreeMap::new(), next_watch: 0 };
        self.streams.insert(self.next_stream, stream);
        self.next_stream
    }

    pub(super) fn close(&mut self, stream: u64) {
        self.streams.remove(&stream);
    }

    pub(super) fn close_all(&mut self) {
        self.streams.clear();
    }

    /// Adds a watch to a stream and confirms it.
    pub(super) fn create(
        &mut self,
        stream: u64,
        question: &pb::WatchCreateRequest,
        store: &Store,
        full: bool,
    ) {
        let Some(open) = self.streams.get_mut(&stream) else { return };
        let id = if question.watch_id == 0 { open.next_watch } else { question.watch_id };
        let why_not = if full {
            "etcdserver: too many watches"
        } else if open.watches.contains_key(&id) {
            "etcdserver: mvcc: duplicate watch ID provided on the WatchStream"
        } else {
            ""
        };
        open.next_watch = open.next_watch.max(id.saturating_add(1));
        let mut answer = answer(store, id);
        answer.created = true;
        answer.canceled = !why_not.is_empty();
        answer.cancel_reason = why_not.to_owned();
        let refused = answer.canceled;
        if open.answers.try_send(Ok(answer)).is_err() {
            // A client that does not read the answers to its own requests is disconnected.
            self.streams.remove(&stream);
            return;
        }
        if refused {
            return;
        }
        let next = if question.start_revision > 0 { question.start_revision } else { store.revision() + 1 };
        let range = Range::new(&question.key, &question.range_end);
        open.watches.insert(id, Watching { range, next, with_before: question.prev_kv });
        self.deliver(store);
    }

    /// Removes a watch and confirms it.
    pub(super) fn cancel(&mut self, stream: u64, id: i64, store: &Store) {
        let Some(open) = self.streams.get_mut(&stream) else { return };
        if open.watches.remove(&id).is_some() {
            let mut answer = answer(store, id);
            answer.canceled = true;
            if open.answers.try_send(Ok(answer)).is_err() {
                self.streams.remove(&stream);
            }
        }
    }

    /// Reports the revision of the stream if all its watches are up to date. Otherwise the next events report it.
    pub(super) fn progress(&mut self, stream: u64, store: &Store) {
        let Some(open) = self.streams.get_mut(&stream) else { return };
        if open.watches.values().all(|watching| watching.next > store.revision()) {
            // A full queue is itself a sign of life.
            let _ = open.answers.try_send(Ok(answer(store, -1)));
        }
    }

    /// Sends every watch its unseen events, as far as its reader accepts them. Returns whether some have to wait.
    pub(super) fn deliver(&mut self, store: &Store) -> bool {
        let mut waiting = false;
        self.streams.retain(|_, stream| {
            let Stream { answers, watches, .. } = stream;
            watches.retain(|id, watching| watching.send(*id, answers, store, &mut waiting));
            !answers.is_closed()
        });
        waiting
    }
}

impl Watching {
    /// Sends the available events; false if the watch has ended.
    fn send(&mut self, id: i64, answers: &Answers, store: &Store, waiting: &mut bool) -> bool {
        while self.next <= store.revision() {
            let Ok(place) = answers.try_reserve() else {
                *waiting = true;
                return true;
            };
            match store.events(&self.range, self.next, MAX_EVENTS_PER_RESPONSE) {
                Ok((mut events, next)) => {
                    self.next = next;
                    if events.is_empty() {
                        continue;
                    }
                    if !self.with_before {
                        events.iter_mut().for_each(|event| event.prev_kv = None);
                    }
                    place.send(Ok(pb::WatchResponse { events, ..answer(store, id) }));
                }
                Err(Compacted(revision)) => {
                    let mut ended = answer(store, id);
                    (ended.canceled, ended.compact_revision) = (true, revision);
                    place.send(Ok(ended));
                    return false;
                }
            }
        }
        true
    }
}

fn answer(store: &Store, watch_id: i64) -> pb::WatchResponse {
    pb::WatchResponse { header: Some(store.header()), watch_id, ..Default::default() }
}
