//! Streams that continue until the caller leaves or the server stops.

use std::future::Future;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::refusal::Reason;

/// How long a caller may take to accept the final status of its stream.
const FINAL_STATUS_TIMEOUT: Duration = Duration::from_secs(1);

/// What a streaming method returns.
pub(super) type Answers<T> = ReceiverStream<Result<T, Status>>;

/// The sending side of a stream to a caller.
pub(super) struct Caller<T>(mpsc::Sender<Result<T, Status>>);

/// The caller has left.
pub(super) struct CallerGone;

impl<T> Caller<T> {
    /// Waits until the caller can accept one more message. What is built for a message only after this is not held for a
    /// caller that does not read.
    pub(super) async fn ready(&self) -> Result<(), CallerGone> {
        self.0.reserve().await.map(drop).map_err(|_| CallerGone)
    }

    /// Waits until the caller can accept one more message, so that messages do not pile up for a slow caller.
    pub(super) async fn send(&self, message: T) -> Result<(), CallerGone> {
        self.0.send(Ok(message)).await.map_err(|_| CallerGone)
    }
}

/// How a stream ends: because the caller left, or with a status for the caller.
pub(super) enum End {
    Left,
    Failed(Status),
}

impl End {
    /// The server was asked to stop.
    pub(super) fn stopping() -> End {
        End::Failed(Reason::SERVER_STOPPING.refuse("the server is stopping"))
    }

    /// The task that publishes snapshots has ended: nothing will change any more.
    pub(super) fn snapshots_gone() -> End {
        End::Failed(Reason::SERVER_STOPPING.refuse(
            "no further events are recorded here: the job is over, or the server's log says what happened",
        ))
    }
}

impl From<CallerGone> for End {
    fn from(_: CallerGone) -> End {
        End::Left
    }
}

impl From<Status> for End {
    fn from(status: Status) -> End {
        End::Failed(status)
    }
}

/// Runs `report` until it ends, the caller leaves, or the server stops.
pub(super) fn answer<T, F>(stop: CancellationToken, report: impl FnOnce(Caller<T>) -> F) -> Answers<T>
where
    T: Send + 'static,
    F: Future<Output = End> + Send + 'static,
{
    answer_to_the_end(|caller| {
        let telling = report(caller);
        async move {
            tokio::select! {
                end = telling => end,
                () = stop.cancelled() => End::stopping(),
            }
        }
    })
}

/// Runs `report` until it ends or the caller leaves. `report` must handle the stop of the server itself.
pub(super) fn answer_to_the_end<T, F>(report: impl FnOnce(Caller<T>) -> F) -> Answers<T>
where
    T: Send + 'static,
    F: Future<Output = End> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    let telling = report(Caller(sender.clone()));
    tokio::spawn(async move {
        let last = tokio::select! {
            end = telling => end,
            () = sender.closed() => End::Left,
        };
        if let End::Failed(status) = last {
            // A caller that does not read its stream notices the end of the connection.
            let _ = tokio::time::timeout(FINAL_STATUS_TIMEOUT, sender.send(Err(status))).await;
        }
    });
    ReceiverStream::new(receiver)
}
