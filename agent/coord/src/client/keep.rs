//! Leases that survive a broken connection: any endpoint that answers keeps them alive, and they are lost only when
//! the store reports so or when their time has passed without an answer.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::ask::{Failure, Repeat, unconnected};
use super::{Client, LeaseId};
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;
use pb::lease_client::LeaseClient;

/// The pause after a failed keep-alive; it doubles up to the second value.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// An endpoint that answers within this time is never considered silent.
const MIN_SILENCE: Duration = Duration::from_millis(500);

/// The state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// The last keep-alive was answered.
    Kept,
    /// A keep-alive has no answer; the lease still has time left.
    Unanswered {
        /// When the first unanswered keep-alive was sent.
        since: Instant,
    },
    /// The lease has ended, and its keys are removed.
    Lost,
}

/// A lease that a task keeps alive until this is dropped. Dropping does not revoke it; the lease then expires.
#[derive(Debug)]
pub struct Lease {
    client: Client,
    id: LeaseId,
    ttl: Duration,
    state: watch::Receiver<LeaseState>,
    task: JoinHandle<()>,
}

impl Client {
    /// Gets a lease and keeps it alive. The store may give it more time than requested; etcd gives at least two
    /// seconds.
    ///
    /// # Errors
    /// No endpoint answered, this client is refused, or the store has too many leases.
    pub async fn lease(&self, ttl: Duration) -> Result<Lease, CoordError> {
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX).max(1);
        // Its time counts from before the request was sent: the store cannot end it earlier than expected here.
        let sent = Instant::now();
        let question = pb::LeaseGrantRequest { ttl: seconds, id: 0 };
        // A lease that was granted twice expires.
        let call = self.ask("lease grant", Repeat::Freely, question, |channel, question| async move {
            LeaseClient::new(channel).lease_grant(question).await
        });
        let (answer, endpoint) = call.await?;
        let operation = "lease grant";
        if answer.id == 0 || answer.ttl <= 0 {
            let why = format!("no lease was granted: {}", answer.error);
            return Err(CoordError::Store { operation, endpoint, code: "error", why });
        }
        let ttl = Duration::from_secs(answer.ttl.unsigned_abs());
        let (state_sender, state) = watch::channel(LeaseState::Kept);
        let keeper = Keeper { client: self.clone(), id: answer.id, ttl, ends: sent + ttl, state_sender };
        let task = tokio::spawn(keeper.run());
        Ok(Lease { client: self.clone(), id: LeaseId(answer.id), ttl, state, task })
    }

    /// The time that a lease has left according to the store; None if there is no such lease.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn lease_time_left(&self, lease: LeaseId) -> Result<Option<Duration>, CoordError> {
        let question = pb::LeaseTimeToLiveRequest { id: lease.0, keys: false };
        let call = self.ask("lease time to live", Repeat::Freely, question, |channel, question| async move {
            LeaseClient::new(channel).lease_time_to_live(question).await
        });
        let left = call.await?.0.ttl;
        Ok((left >= 0).then(|| Duration::from_secs(left.unsigned_abs())))
    }

    /// Ends a lease now, and removes its keys. One that has ended is no error.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn revoke(&self, lease: LeaseId) -> Result<(), CoordError> {
        let question = pb::LeaseRevokeRequest { id: lease.0 };
        let call = self.ask("lease revoke", Repeat::Freely, question, |channel, question| async move {
            LeaseClient::new(channel).lease_revoke(question).await
        });
        match call.await {
            Ok(_) | Err(CoordError::Store { code: "not found", .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Lease {
    /// The id that keys are attached to.
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// The time for which the store keeps the lease without a keep-alive.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// The current state and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<LeaseState> {
        self.state.clone()
    }

    /// Returns when the lease is lost.
    pub async fn lost(&self) {
        let mut state = self.state.clone();
        // The sender is dropped only after it reported the loss.
        let _ = state.wait_for(|state| *state == LeaseState::Lost).await;
    }

    /// Ends the lease now, and removes its keys.
    ///
    /// # Errors
    /// No endpoint answered; the lease then expires.
    pub async fn revoke(self) -> Result<(), CoordError> {
        self.task.abort();
        self.client.revoke(self.id).await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Keeper {
    client: Client,
    id: i64,
    ttl: Duration,
    /// When the lease ends if no keep-alive is answered.
    ends: Instant,
    state_sender: watch::Sender<LeaseState>,
}

/// An open stream of keep-alives with one endpoint.
struct Stream {
    index: usize,
    questions: mpsc::Sender<pb::LeaseKeepAliveRequest>,
    answers: Streaming<pb::LeaseKeepAliveResponse>,
}

impl Keeper {
    async fn run(mut self) {
        let mut stream: Option<Stream> = None;
        let mut pause = RETRY_BACKOFF.0;
        sleep(self.ttl / 3).await;
        while Instant::now() < self.ends {
            let sent = Instant::now();
            match self.beat(&mut stream).await {
                Ok(ttl) if ttl <= 0 => break,
                Ok(ttl) => {
                    self.ttl = Duration::from_secs(ttl.unsigned_abs());
                    self.ends = sent + self.ttl;
                    pause = RETRY_BACKOFF.0;
                    self.report(LeaseState::Kept);
                    sleep_until(sent + self.ttl / 3).await;
                }
                Err(why) => {
                    tracing::debug!(lease = self.id, why, "a keep-alive was not answered");
                    stream = None;
                    sleep(pause.min(self.ends.saturating_duration_since(Instant::now()))).await;
                    pause = (pause * 2).min(RETRY_BACKOFF.1);
                }
            }
        }
        self.report(LeaseState::Lost);
    }

    fn report(&self, now: LeaseState) {
        self.state_sender.send_if_modified(|state| {
            let changed = *state != now;
            *state = now;
            changed
        });
    }

    /// Notes that the keep-alive sent at `since` has no answer yet.
    fn doubt(&self, since: Instant) {
        self.state_sender.send_if_modified(|state| {
            let first = *state == LeaseState::Kept;
            if first {
                *state = LeaseState::Unanswered { since };
            }
            first
        });
    }

    /// The time limit for one endpoint: a silent one must leave time to ask each endpoint twice, and a slow one is
    /// not silent.
    fn patience(&self) -> Duration {
        let endpoints = u32::try_from(self.client.settings().endpoints.len()).unwrap_or(u32::MAX);
        let part = self.ttl / endpoints.saturating_mul(2).max(6);
        part.clamp(MIN_SILENCE, self.client.settings().timeout.max(MIN_SILENCE))
    }

    /// Sends one keep-alive. Returns the seconds that the lease has from now on, 0 if there is no such lease.
    async fn beat(&self, stream: &mut Option<Stream>) -> Result<i64, String> {
        let (sent, patience) = (Instant::now(), self.patience());
        if let Some(open) = stream {
            let answered = timeout_at(self.ends, timeout(patience, open.ask(self.id))).await;
            match answered {
                Ok(Ok(Ok(ttl))) => return Ok(ttl),
                _ => {
                    self.client.connections.forget(open.index);
                    *stream = None;
                    self.doubt(sent);
                }
            }
        }
        let mut last = "no time was left".to_owned();
        for index in self.client.connections.order().collect::<Vec<_>>() {
            let opened = timeout_at(self.ends, timeout(patience, self.open(index))).await;
            match opened {
                Ok(Ok(Ok((open, ttl)))) => {
                    self.client.connections.prefer(index);
                    *stream = Some(open);
                    return Ok(ttl);
                }
                Ok(Ok(Err(why))) => {
                    self.doubt(sent);
                    last = why;
                }
                Ok(Err(_)) => {
                    self.doubt(sent);
                    self.client.connections.forget(index);
                    last = "no answer in time".to_owned();
                }
                Err(_) => return Err("the lease has no time left".to_owned()),
            }
        }
        Err(last)
    }

    /// Opens a stream with its first keep-alive: etcd sends no answer before it.
    async fn open(&self, index: usize) -> Result<(Stream, i64), String> {
        let connections = &self.client.connections;
        let patience = self.client.settings().timeout;
        let channel =
            connections.channel(index, patience).await.map_err(|why| failure_text(unconnected(why)))?;
        let (questions, question_stream) = mpsc::channel(1);
        let first = pb::LeaseKeepAliveRequest { id: self.id };
        questions.try_send(first).map_err(|_| "the stream ended".to_owned())?;
        let mut request = match connections.signed(&channel, ReceiverStream::new(question_stream)).await {
            Ok(request) => request,
            Err(status) => return Err(failure_text(self.client.classified(index, status).await)),
        };
        request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        let answers = match LeaseClient::new(channel).lease_keep_alive(request).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => {
                let failure = self.client.classified(index, status).await;
                if matches!(failure, Failure::TokenExpired(_)) {
                    connections.forget_user_token().await;
                }
                return Err(failure_text(failure));
            }
        };
        let mut open = Stream { index, questions, answers };
        let ttl = match open.answer(self.id).await {
            Ok(ttl) => ttl,
            Err(why) => {
                connections.forget(index);
                return Err(why);
            }
        };
        Ok((open, ttl))
    }
}

impl Stream {
    async fn ask(&mut self, id: i64) -> Result<i64, String> {
        let sent = self.questions.send(pb::LeaseKeepAliveRequest { id }).await;
        sent.map_err(|_| "the stream ended".to_owned())?;
        self.answer(id).await
    }

    async fn answer(&mut self, id: i64) -> Result<i64, String> {
        loop {
            match self.answers.message().await {
                Ok(Some(answer)) if answer.id == id => return Ok(answer.ttl),
                Ok(Some(_)) => {}
                Ok(None) => return Err("the stream ended".to_owned()),
                Err(status) => return Err(status.message().to_owned()),
            }
        }
    }
}

pub(crate) fn failure_text(failure: Failure) -> String {
    match failure {
        Failure::Unsent(why)
        | Failure::Unanswered(why)
        | Failure::TokenExpired(why)
        | Failure::Refused(why) => why,
        Failure::Final(status) => status.message().to_owned(),
    }
}
