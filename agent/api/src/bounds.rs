//! Bounds what callers make this process hold: calls that are open, bytes of answers that are not read, messages of
//! launchers that have not arrived whole or are not processed yet. All are limited for each source and in all.
//!
//! An answer counts from before it is built until its bytes are in the socket: a service takes a share for the message
//! (`Bounds::unread`), and the share passes to the encoded bytes here.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Body as HttpBody, Bytes, Frame};
use hyper::http::{Request, Response};
use mainstay_sys::memory;
use tonic::Status;
use tonic::body::Body;

use super::connection_limits::{ConnectionLimits, ConnectionPermit};
use super::refusal::Reason;
use super::shares::{Share, Shares, Source};

/// Open calls of one source and of all sources of a listener.
const MAX_OPEN_CALLS: (usize, usize) = (512, 2048);

/// Bytes of answers that one source, and all sources, have not read yet.
const UNREAD: (usize, usize) = (32 << 20, 128 << 20);

/// Bytes of launchers' messages that are not processed yet.
const REPORTS: (usize, usize) = (8 << 20, 32 << 20);

/// Readers of the journal's files at the same time.
const MAX_JOURNAL_READERS: (usize, usize) = (1, 4);

/// Readers of the whole journal at the same time.
const WHOLE_READS: (usize, usize) = (1, 2);

/// Bytes of answers or messages after which freed memory is returned to the system.
const MUCH: usize = 8 << 20;

/// How long after the last of them.
const GIVE_BACK_AFTER: Duration = Duration::from_secs(5);

/// How long a call waits until its source has read other answers.
const SHARE_TIMEOUT: Duration = Duration::from_secs(10);

/// The method whose messages are counted.
const ATTACH: &str = "/mainstay.v1.LauncherService/Attach";

/// The bounds of one listener. Clones are the same bounds.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    /// Bytes of answers.
    pub(super) unread: Shares,
    /// Turns at the journal.
    pub(super) reads: Shares,
    pub(super) whole_reads: Shares,
    reports: Shares,
    calls: Arc<Mutex<ConnectionLimits<Source>>>,
}

impl Default for Bounds {
    fn default() -> Bounds {
        let shares = |(each, all)| Shares::new(each, all);
        Bounds {
            unread: shares(UNREAD),
            reads: shares(MAX_JOURNAL_READERS),
            whole_reads: shares(WHOLE_READS),
            reports: shares(REPORTS),
            calls: Arc::new(Mutex::new(ConnectionLimits::new(MAX_OPEN_CALLS.0, MAX_OPEN_CALLS.1))),
        }
    }
}

/// The share of an answer, in the extensions of its response.
#[derive(Clone)]
pub(super) struct Held {
    _share: Arc<Share>,
}

impl Bounds {
    /// A share for an answer of at most this many bytes.
    pub(super) async fn answer(&self, source: Source, bytes: usize) -> Result<Share, Status> {
        let share = tokio::time::timeout(SHARE_TIMEOUT, self.unread.take(source, bytes)).await;
        share.map_err(|_| {
            Reason::TOO_MANY_UNREAD_ANSWERS.refuse(format!(
                "{source} has the most answers that may wait to be read: read or cancel them"
            ))
        })
    }
}

impl Bounds {
    /// Returns memory to the system when a flood of answers or messages is over: the allocator keeps what it freed.
    /// Runs for as long as the listener.
    pub(super) async fn give_back_memory(self) {
        loop {
            tokio::select! {
                () = self.unread.is_drained(MUCH) => {}
                () = self.reports.is_drained(MUCH) => {}
            }
            // What follows at once needs the same memory.
            tokio::time::sleep(GIVE_BACK_AFTER).await;
            let _ = tokio::task::spawn_blocking(memory::give_back).await;
        }
    }
}

/// An answer that holds its share until it is in the socket.
pub(super) fn holding<T>(answer: T, mut share: Share, bytes: usize) -> tonic::Response<T> {
    share.shrink(bytes);
    let mut response = tonic::Response::new(answer);
    response.extensions_mut().insert(Held { _share: Arc::new(share) });
    response
}

impl<S> tower::Layer<S> for Bounds {
    type Service = Bounded<S>;

    fn layer(&self, inner: S) -> Bounded<S> {
        Bounded { inner, bounds: self.clone() }
    }
}

/// Whether this is a call of a gRPC method.
pub(super) fn is_grpc<B>(request: &Request<B>) -> bool {
    let kind = request.headers().get(hyper::http::header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// A service with bounds.
#[derive(Clone, Debug)]
pub(super) struct Bounded<S> {
    inner: S,
    bounds: Bounds,
}

impl<S> tower::Service<Request<Body>> for Bounded<S>
where
    S: tower::Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let source = Source::from_connection(request.extensions());
        let place = {
            let mut calls = self.bounds.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.take(source, source.is_free())
        };
        let Some(place) = place else {
            const TOO_MANY: &str = "this caller or all callers have the most calls that may be open";
            let refused = if is_grpc(&request) {
                Reason::TOO_MANY_CALLS.refuse(TOO_MANY).into_http()
            } else {
                // A probe reads the status alone.
                let mut refused = Response::new(Body::new(format!("{TOO_MANY}\n")));
                *refused.status_mut() = hyper::http::StatusCode::SERVICE_UNAVAILABLE;
                refused
            };
            return Box::pin(std::future::ready(Ok(refused)));
        };
        let reports = (request.uri().path() == ATTACH).then(|| self.bounds.reports.clone());
        let request = request.map(|body| match reports {
            Some(shares) => {
                Body::new(Reports { body, shares, source, head: Vec::new(), left: 0, share: None })
            }
            None => body,
        });
        let answering = self.inner.call(request);
        let unread = self.bounds.unread.clone();
        Box::pin(async move {
            let mut response = answering.await?;
            let held = response.extensions_mut().remove::<Held>();
            Ok(response.map(|body| Body::new(BoundedBody { body, unread, source, held, _place: place })))
        })
    }
}

/// The body of a response. Its bytes count until they are in the socket.
struct BoundedBody {
    body: Body,
    unread: Shares,
    source: Source,
    /// The share of the message, until it is encoded.
    held: Option<Held>,
    _place: ConnectionPermit<Source>,
}

impl HttpBody for BoundedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let counted = |bytes: Bytes| {
            let share = self.unread.add(self.source, bytes.len());
            Bytes::from_owner(CountedBytes { bytes, _share: share })
        };
        let frame = frame.map(|frame| frame.map(|frame| frame.map_data(counted)));
        self.held = None;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// Bytes with their share.
struct CountedBytes {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const GRPC_HEADER_BYTES: usize = 5;

/// The body of a launcher's stream. Each message takes a share of its length before it is received, and holds it until
/// the next message is asked for.
struct Reports {
    body: Body,
    shares: Shares,
    source: Source,
    /// What has arrived of the next message's head.
    head: Vec<u8>,
    /// Bytes of the current message that are yet to come.
    left: usize,
    share: Option<Share>,
}

impl Reports {
    /// Counts what has arrived. An error if the source has the most bytes that may wait.
    fn count(&mut self, mut bytes: &[u8]) -> Result<(), Status> {
        while !bytes.is_empty() {
            if self.left > 0 {
                let of_message = self.left.min(bytes.len());
                self.left -= of_message;
                bytes = &bytes[of_message..];
                continue;
            }
            let of_head = (GRPC_HEADER_BYTES - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..of_head]);
            bytes = &bytes[of_head..];
            if let [_, length @ ..] = self.head.as_slice()
                && let Ok(length) = <[u8; 4]>::try_from(length)
            {
                self.left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                self.head.clear();
                self.share = None;
                let share = self.shares.try_take(self.source, self.left);
                self.share = Some(share.ok_or_else(|| {
                    let source = self.source;
                    Reason::TOO_MANY_REPORTS.refuse(format!(
                        "the launchers of {source} have the most bytes that may wait for the agent: it processes 1 MiB/s"
                    ))
                })?);
            }
        }
        Ok(())
    }
}

impl HttpBody for Reports {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.left == 0 {
            // More is asked for: the last message has been processed.
            self.share = None;
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(bytes) = frame.data_ref()
            && let Err(refused) = self.count(&bytes.clone())
        {
            return Poll::Ready(Some(Err(refused)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
