//! Streams that go on until the caller leaves or the server stops.

use std::future::Future;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// What a streaming method returns.
pub(super) type Answers<T> = ReceiverStream<Result<T, Status>>;

/// The caller's end of a stream.
pub(super) struct Caller<T>(mpsc::Sender<Result<T, Status>>);

/// The caller is not there any more.
pub(super) struct Left;

impl<T> Caller<T> {
    /// Waits until the caller can take one more, so that a slow caller never makes messages pile up here.
    pub(super) async fn send(&self, message: T) -> Result<(), Left> {
        self.0.send(Ok(message)).await.map_err(|_| Left)
    }
}

/// How a stream ends: because the caller left, or with a status for the caller.
pub(super) enum End {
    Left,
    Failed(Status),
}

impl End {
    /// The task that owns the board has ended: nothing will ever change again.
    pub(super) fn board_gone() -> End {
        End::Failed(Status::unavailable("the task that watches this node has ended; see the server's log"))
    }
}

impl From<Left> for End {
    fn from(_: Left) -> End {
        End::Left
    }
}

impl From<Status> for End {
    fn from(status: Status) -> End {
        End::Failed(status)
    }
}

/// What a caller learns when the server stops.
pub(super) fn stopping() -> Status {
    Status::unavailable("the server is stopping; ask again from where you are")
}

/// Runs `tell` until it ends, the caller leaves, or `stop` comes true. A stream that has to tell all there is before
/// it stops looks at the stop itself, and gives one that never comes here.
pub(super) fn answer<T, F>(
    stop: impl Future<Output = ()> + Send + 'static,
    tell: impl FnOnce(Caller<T>) -> F,
) -> Answers<T>
where
    T: Send + 'static,
    F: Future<Output = End> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(1);
    let telling = tell(Caller(sender.clone()));
    tokio::spawn(async move {
        let last = tokio::select! {
            end = telling => end,
            () = sender.closed() => End::Left,
            () = stop => End::Failed(stopping()),
        };
        if let End::Failed(status) = last {
            // A caller that does not read its stream learns from the end of the connection.
            let _ = sender.try_send(Err(status));
        }
    });
    ReceiverStream::new(receiver)
}
