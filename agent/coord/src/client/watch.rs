//! Watches that continue: after a broken stream from the next revision, and after a compaction or with another store
//! from a new listing, which is reported.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::Client;
use super::ask::{Failure, unconnected};
use super::keep::failure_text;
use super::kv::{KeyValue, Listing, prefix_end};
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;
use crate::etcd::mvccpb;
use pb::watch_request::RequestUnion;

/// Events that are queued for a slow reader; then the store has to wait.
const MAX_QUEUED_EVENTS: usize = 256;
/// The interval of probes on a silent stream.
const PROBE: Duration = Duration::from_secs(1);
/// A stream that is silent for this time is broken, whatever the kernel reports.
const SILENCE: Duration = Duration::from_secs(4);
/// The pause after a stream that failed; it doubles up to the second value.
const STREAM_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// The largest answer that is read, in bytes.
const MAX_RESPONSE_BYTES: usize = 32 << 20;

/// An event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// A key was written.
    Put {
        /// The current key.
        now: KeyValue,
        /// The key before; None if it is new or its history is compacted.
        before: Option<KeyValue>,
    },
    /// A key was removed, or its lease ended.
    Deleted {
        /// The key.
        key: String,
        /// The revision.
        revision: i64,
        /// The key before; None if its history is compacted.
        before: Option<KeyValue>,
    },
    /// Events were missed: these are all current keys. Events continue from here.
    Listed {
        /// The revision of the listing.
        revision: i64,
        /// All keys with the prefix.
        items: Vec<KeyValue>,
        /// Why.
        why: Relisted,
    },
}

/// Why a watch had to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relisted {
    /// The first listing, which was requested.
    First,
    /// The history that it needs is compacted.
    Compacted,
    /// The store is another one or went back in time: it was wiped or restored.
    StoreReplaced,
}

/// A watch on all keys with a prefix. A task maintains it until this is dropped.
#[derive(Debug)]
pub struct Watch {
    events: mpsc::Receiver<Result<WatchEvent, CoordError>>,
    task: JoinHandle<()>,
}

impl Client {
    /// Watches all keys with the prefix from a revision on, or from now on. Must be called within a runtime.
    #[must_use]
    pub fn watch(&self, prefix: &str, from: Option<i64>) -> Watch {
        self.watch_of(prefix, from, 0, false)
    }

    /// Lists all keys with the prefix, which is the first event, and continues from there.
    #[must_use]
    pub fn watch_listed(&self, prefix: &str) -> Watch {
        self.watch_of(prefix, None, 0, true)
    }

    /// Continues from a listing: no event after it is missed, and a replaced store is noticed.
    #[must_use]
    pub fn watch_after(&self, prefix: &str, listing: &Listing) -> Watch {
        self.watch_of(prefix, Some(listing.revision + 1), listing.cluster, false)
    }

    fn watch_of(&self, prefix: &str, from: Option<i64>, cluster: u64, list: bool) -> Watch {
        let (events, received) = mpsc::channel(MAX_QUEUED_EVENTS);
        let watcher = Watcher {
            client: self.clone(),
            prefix: prefix.to_owned(),
            next: from,
            cluster,
            turn: 0,
            owed: list.then_some(Relisted::First),
            events,
        };
        Watch { events: received, task: tokio::spawn(watcher.run()) }
    }
}

impl Watch {
    /// The next event. May be dropped and called again: no event is lost.
    ///
    /// # Errors
    /// Only permanent ones: this client is refused. The watch has then ended.
    pub async fn next(&mut self) -> Result<WatchEvent, CoordError> {
        match self.events.recv().await {
            Some(event) => event,
            None => Err(CoordError::Store {
                operation: "watch",
                endpoint: "the client".to_owned(),
                code: "error",
                why: "the watch has ended".to_owned(),
            }),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Watcher {
    client: Client,
    prefix: String,
    /// The first unseen revision; None until the store has reported the current one.
    next: Option<i64>,
    /// The cluster of the revisions; 0 until it is known.
    cluster: u64,
    /// Rotates the endpoints, so that a broken one is not asked first again.
    turn: usize,
    /// A listing that is still to be made.
    owed: Option<Relisted>,
    events: mpsc::Sender<Result<WatchEvent, CoordError>>,
}

/// Why a stream ended.
enum StreamEnd {
    /// It broke or could not be opened: try the next endpoint.
    Broken(String),
    /// The history that it needs is gone: list again.
    List(Relisted),
    /// The listing is done.
    Listed,
    /// The reader is gone.
    Unread,
    /// The store refuses this client.
    Refused(CoordError),
}

struct Stream {
    index: usize,
    requests: mpsc::Sender<pb::WatchRequest>,
    answers: Streaming<pb::WatchResponse>,
}

impl Watcher {
    async fn run(mut self) {
        let mut pause = STREAM_BACKOFF.0;
        loop {
            let began = Instant::now();
            let ended = match self.owed {
                Some(why) => self.list(why).await,
                None => self.stream().await,
            };
            match ended {
                StreamEnd::Unread => return,
                StreamEnd::Refused(error) => {
                    let _ = self.events.send(Err(error)).await;
                    return;
                }
                StreamEnd::Listed => {
                    self.owed = None;
                    continue;
                }
                StreamEnd::List(why) => self.owed = Some(why),
                StreamEnd::Broken(why) => {
                    tracing::debug!(prefix = self.prefix, why, "a watch's stream broke");
                    self.turn += 1;
                }
            }
            if began.elapsed() > SILENCE {
                pause = STREAM_BACKOFF.0;
            }
            sleep(pause).await;
            pause = (pause * 2).min(STREAM_BACKOFF.1);
        }
    }

    /// Sends a listing of all current keys.
    async fn list(&mut self, why: Relisted) -> StreamEnd {
        let listing = match self.client.list(&self.prefix).await {
            Ok(listing) => listing,
            Err(error) if error.is_refused() => return StreamEnd::Refused(error),
            Err(error) => return StreamEnd::Broken(error.to_string()),
        };
        let lagged = why == Relisted::StoreReplaced
            && listing.cluster == self.cluster
            && self.next.is_some_and(|next| listing.revision + 1 >= next);
        if lagged {
            // The member is behind the others of its cluster: nothing was missed.
            self.turn += 1;
            return StreamEnd::Listed;
        }
        (self.next, self.cluster) = (Some(listing.revision + 1), listing.cluster);
        let event = WatchEvent::Listed { revision: listing.revision, items: listing.items, why };
        if self.events.send(Ok(event)).await.is_ok() { StreamEnd::Listed } else { StreamEnd::Unread }
    }

    /// Runs one stream from its opening to its end.
    async fn stream(&mut self) -> StreamEnd {
        let mut stream = match self.open().await {
            Ok(stream) => stream,
            Err(ended) => return ended,
        };
        let index = stream.index;
        let ended = self.read(&mut stream).await;
        if matches!(ended, StreamEnd::Broken(_)) {
            self.client.connections.forget(index);
        }
        ended
    }

    async fn open(&mut self) -> Result<Stream, StreamEnd> {
        let connections = &self.client.connections;
        let order: Vec<usize> = connections.order().collect();
        let index = order[self.turn % order.len()];
        let patience = self.client.settings().timeout;
        let judge = |failure: Failure| match failure {
            Failure::Refused(why) => StreamEnd::Refused(CoordError::Refused {
                operation: "watch",
                endpoint: connections.name(index),
                why,
            }),
            other => StreamEnd::Broken(failure_text(other)),
        };
        let channel = connections.channel(index, patience).await.map_err(|why| judge(unconnected(why)))?;
        let (requests, request_stream) = mpsc::channel(2);
        let create = pb::WatchCreateRequest {
            key: self.prefix.as_bytes().to_vec(),
            range_end: prefix_end(&self.prefix),
            start_revision: self.next.unwrap_or(0),
            prev_kv: true,
            watch_id: 0,
        };
        // Sent before the call: etcd does not answer until it has read a request.
        let _ =
            requests.try_send(pb::WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) });
        let opened = timeout(patience, async {
            let mut request = connections.signed(&channel, ReceiverStream::new(request_stream)).await?;
            // A member that lost its leader ends the stream instead of staying silent.
            request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
            pb::watch_client::WatchClient::new(channel)
                .max_decoding_message_size(MAX_RESPONSE_BYTES)
                .watch(request)
                .await
        });
        match opened.await {
            Ok(Ok(answers)) => Ok(Stream { index, requests, answers: answers.into_inner() }),
            Ok(Err(status)) => match self.client.classified(index, status).await {
                Failure::TokenExpired(why) if self.client.settings().user.is_some() => {
                    connections.forget_user_token().await;
                    Err(StreamEnd::Broken(why))
                }
                Failure::TokenExpired(why) => Err(judge(Failure::Refused(why))),
                failure => Err(judge(failure)),
            },
            Err(_) => {
                connections.forget(index);
                Err(StreamEnd::Broken("no answer in time".to_owned()))
            }
        }
    }

    async fn read(&mut self, stream: &mut Stream) -> StreamEnd {
        let mut received = Instant::now();
        loop {
            let answer = match timeout_at(Instant::now() + PROBE, stream.answers.message()).await {
                Ok(Ok(Some(answer))) => answer,
                Ok(Ok(None)) => return StreamEnd::Broken("the store ended the stream".to_owned()),
                Ok(Err(status)) => return self.broken(stream.index, status).await,
                Err(_) if received.elapsed() > SILENCE => return StreamEnd::Broken("silence".to_owned()),
                Err(_) => {
                    let probe = RequestUnion::ProgressRequest(pb::WatchProgressRequest {});
                    // A full queue already has a probe.
                    let _ = stream.requests.try_send(pb::WatchRequest { request_union: Some(probe) });
                    continue;
                }
            };
            received = Instant::now();
            if let Some(ended) = self.take(stream.index, answer).await {
                return ended;
            }
        }
    }

    async fn broken(&self, index: usize, status: tonic::Status) -> StreamEnd {
        match self.client.classified(index, status).await {
            Failure::TokenExpired(why) if self.client.settings().user.is_some() => {
                self.client.connections.forget_user_token().await;
                StreamEnd::Broken(why)
            }
            Failure::Refused(why) | Failure::TokenExpired(why) => StreamEnd::Refused(CoordError::Refused {
                operation: "watch",
                endpoint: self.client.connections.name(index),
                why,
            }),
            failure => StreamEnd::Broken(failure_text(failure)),
        }
    }

    /// Handles one answer; returns how the stream ended if it did.
    async fn take(&mut self, index: usize, answer: pb::WatchResponse) -> Option<StreamEnd> {
        let header = answer.header.unwrap_or_default();
        if self.is_another_store(&header, answer.created) {
            return Some(StreamEnd::List(Relisted::StoreReplaced));
        }
        if answer.compact_revision > 0 {
            return Some(StreamEnd::List(Relisted::Compacted));
        }
        if answer.canceled {
            let why = answer.cancel_reason;
            if why.contains("permission denied") {
                let endpoint = self.client.connections.name(index);
                return Some(StreamEnd::Refused(CoordError::Refused { operation: "watch", endpoint, why }));
            }
            if why.contains("auth token") {
                self.client.connections.forget_user_token().await;
            }
            return Some(StreamEnd::Broken(format!("the store canceled the watch: {why}")));
        }
        if answer.created {
            self.next.get_or_insert(header.revision + 1);
            return None;
        }
        let seen_before = self.next.unwrap_or(0);
        for event in answer.events {
            let Some(event) = event_of(event) else { continue };
            let revision = revision_of(&event);
            // A revision arrives complete, and possibly again after a reconnection.
            if revision < seen_before {
                continue;
            }
            self.next = Some(self.next.unwrap_or(0).max(revision + 1));
            if self.events.send(Ok(event)).await.is_err() {
                return Some(StreamEnd::Unread);
            }
        }
        None
    }

    /// Whether the revisions of this watch belong to a store that no longer exists: the cluster has another number,
    /// or it is at an earlier revision than one that was seen.
    fn is_another_store(&mut self, header: &pb::ResponseHeader, created: bool) -> bool {
        if self.cluster == 0 {
            self.cluster = header.cluster_id;
        }
        let another = header.cluster_id != 0 && header.cluster_id != self.cluster;
        // A member that is behind looks the same. The listing, which is that of the whole cluster, decides.
        let went_back = created && self.next.is_some_and(|next| header.revision + 1 < next);
        another || went_back
    }
}

fn event_of(event: mvccpb::Event) -> Option<WatchEvent> {
    let before = event.prev_kv.map(KeyValue::from);
    let now = KeyValue::from(event.kv?);
    match mvccpb::event::EventType::try_from(event.r#type).ok()? {
        mvccpb::event::EventType::Put => Some(WatchEvent::Put { now, before }),
        mvccpb::event::EventType::Delete => {
            Some(WatchEvent::Deleted { key: now.key, revision: now.mod_revision, before })
        }
    }
}

fn revision_of(event: &WatchEvent) -> i64 {
    match event {
        WatchEvent::Put { now, .. } => now.mod_revision,
        WatchEvent::Deleted { revision, .. } | WatchEvent::Listed { revision, .. } => *revision,
    }
}
