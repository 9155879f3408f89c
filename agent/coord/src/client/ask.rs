//! One request over all endpoints within one deadline.

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use super::connect::describe;
use super::{Client, Settings, refusal};
use crate::error::CoordError;

/// The pause after a pass over all endpoints without an answer; it doubles up to the second value.
const PASS_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(400));
/// The minimum share of the deadline for one endpoint: with less, a slow host would look like a failed store.
const MIN_ENDPOINT_TIMEOUT: Duration = Duration::from_millis(500);

/// What to do if the answer to a request was lost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// The request is idempotent.
    Freely,
    /// A repetition could have another result because of the first request: repeat only if it was never received.
    OnlyIfUnsent,
}

/// The failure of one attempt.
pub(crate) enum Failure {
    /// The request never reached the endpoint.
    Unsent(String),
    /// The request may have reached the endpoint; there is no answer.
    Unanswered(String),
    /// The token for user and password is no longer valid.
    TokenExpired(String),
    /// The endpoint does not serve this client.
    Refused(String),
    /// An answer that another attempt would not change.
    Final(Status),
}

/// The failures at the endpoints so far.
#[derive(Default)]
struct Tried {
    answers: Vec<(String, String)>,
    refused: Option<(String, String)>,
}

impl Tried {
    fn at(&mut self, endpoint: String, why: String) {
        match self.answers.iter_mut().find(|(name, _)| *name == endpoint) {
            Some((_, last)) => *last = why,
            None => self.answers.push((endpoint, why)),
        }
    }

    fn error(self, operation: &'static str) -> CoordError {
        if let Some((endpoint, why)) = self.refused {
            return CoordError::Refused { operation, endpoint, why };
        }
        let answers: Vec<String> = self.answers.iter().map(|(name, why)| format!("{name}: {why}")).collect();
        let tried = if answers.is_empty() { "no time was left".to_owned() } else { answers.join("; ") };
        CoordError::Unreachable { operation, tried }
    }
}

impl Client {
    /// Returns the answer and the endpoint that gave it.
    pub(crate) async fn ask<Q, A, F>(
        &self,
        operation: &'static str,
        repeat: Repeat,
        question: Q,
        call: impl Fn(Channel, Request<Q>) -> F,
    ) -> Result<(A, String), CoordError>
    where
        Q: Clone,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let connections = &self.connections;
        let deadline = Instant::now() + connections.settings.timeout;
        let mut tried = Tried::default();
        let mut pause = PASS_BACKOFF.0;
        let mut renewed = false;
        loop {
            let mut order: Vec<usize> = connections.order().collect();
            // Taken from the back, so that an endpoint whose token expired can be asked again at once.
            order.reverse();
            while let Some(index) = order.pop() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(tried.error(operation));
                }
                let share = if order.is_empty() { left } else { share(left, order.len() + 1) };
                let failure = match self.attempt(index, share, question.clone(), &call).await {
                    Ok(answer) => {
                        connections.prefer(index);
                        return Ok((answer, connections.name(index)));
                    }
                    Err(failure) => failure,
                };
                let endpoint = connections.name(index);
                match failure {
                    Failure::Unsent(why) => tried.at(endpoint, why),
                    Failure::Unanswered(why) if repeat == Repeat::OnlyIfUnsent => {
                        return Err(CoordError::Unsure { operation, endpoint, why });
                    }
                    Failure::Unanswered(why) => tried.at(endpoint, why),
                    Failure::TokenExpired(_) if !renewed => {
                        renewed = true;
                        connections.forget_user_token().await;
                        order.push(index);
                    }
                    Failure::TokenExpired(why) | Failure::Refused(why) => {
                        tried.refused.get_or_insert((endpoint, why));
                    }
                    Failure::Final(status) => {
                        let (code, why) = (name(status.code()), status.message().to_owned());
                        return Err(CoordError::Store { operation, endpoint, code, why });
                    }
                }
            }
            // Every endpoint was asked, and one of them refused: more attempts change nothing.
            if tried.refused.is_some() {
                return Err(tried.error(operation));
            }
            sleep(pause.min(deadline.saturating_duration_since(Instant::now()))).await;
            pause = (pause * 2).min(PASS_BACKOFF.1);
        }
    }

    async fn attempt<Q, A, F>(
        &self,
        index: usize,
        share: Duration,
        question: Q,
        call: &impl Fn(Channel, Request<Q>) -> F,
    ) -> Result<A, Failure>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let connections = &self.connections;
        let until = Instant::now() + share;
        let channel = connections.channel(index, share).await.map_err(unconnected)?;
        let signed = timeout(share, connections.signed(&channel, question)).await;
        let request = match signed {
            Ok(Ok(request)) => request,
            Ok(Err(status)) => {
                return Err(match self.classified(index, status).await {
                    // The request itself was not sent yet.
                    Failure::Unanswered(why) => Failure::Unsent(why),
                    other => other,
                });
            }
            Err(_) => {
                connections.forget(index);
                return Err(Failure::Unsent("no answer in time".to_owned()));
            }
        };
        match tokio::time::timeout_at(until, call(channel, request)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.classified(index, status).await),
            Err(_) => {
                // The connection may be half open.
                connections.forget(index);
                Err(Failure::Unanswered("no answer in time".to_owned()))
            }
        }
    }

    /// Classifies an error status; drops a connection that failed.
    pub(crate) async fn classified(&self, index: usize, status: Status) -> Failure {
        let failure = classified(status);
        if !matches!(failure, Failure::Unsent(_) | Failure::Unanswered(_)) {
            return failure;
        }
        let connections = &self.connections;
        connections.forget(index);
        let Settings { endpoints, tls, .. } = &connections.settings;
        if !endpoints[index].tls {
            return failure;
        }
        refusal::of_certificate(&endpoints[index], tls.as_ref()).await.map_or(failure, Failure::Refused)
    }
}

fn share(left: Duration, endpoints: usize) -> Duration {
    let part = left / u32::try_from(endpoints).unwrap_or(u32::MAX);
    part.max(MIN_ENDPOINT_TIMEOUT).min(left)
}

/// Classifies a failure to connect: another attempt does not fix a refused certificate.
pub(crate) fn unconnected(why: String) -> Failure {
    if is_about_certificates(&why) { Failure::Refused(why) } else { Failure::Unsent(why) }
}

pub(super) fn is_about_certificates(why: &str) -> bool {
    why.contains("invalid peer certificate") || why.contains("received fatal alert")
}

fn classified(status: Status) -> Failure {
    let message = status.message().to_owned();
    let answers = || match status.source() {
        Some(cause) if message.is_empty() => describe(cause),
        Some(cause) => format!("{message}: {}", describe(cause)),
        None => message.clone(),
    };
    match status.code() {
        Code::Unauthenticated => Failure::TokenExpired(message),
        Code::InvalidArgument if message.contains("revision of auth store is old") => {
            Failure::TokenExpired(message)
        }
        Code::InvalidArgument
            if message.contains("user name is empty") || message.contains("authentication failed") =>
        {
            Failure::Refused(message)
        }
        Code::PermissionDenied => Failure::Refused(message),
        Code::ResourceExhausted if message.contains("too many requests") => Failure::Unsent(message),
        // etcd without a leader accepts no request.
        Code::Unavailable if message.contains("no leader") => Failure::Unsent(message),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal => {
            let answer = answers();
            if is_about_certificates(&answer) {
                Failure::Refused(answer)
            } else if never_connected(&status) {
                Failure::Unsent(answer)
            } else {
                Failure::Unanswered(answer)
            }
        }
        _ => Failure::Final(status),
    }
}

/// Whether the request failed because the connection could not be reopened.
fn never_connected(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

fn name(code: Code) -> &'static str {
    match code {
        Code::InvalidArgument => "invalid argument",
        Code::NotFound => "not found",
        Code::AlreadyExists => "already exists",
        Code::ResourceExhausted => "resource exhausted",
        Code::FailedPrecondition => "failed precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out of range",
        Code::Unimplemented => "unimplemented (is this port another program's?)",
        Code::DataLoss => "data loss",
        _ => "error",
    }
}
