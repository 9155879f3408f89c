//! The leader's side: accepts followers. The worst that received bytes can do is end their connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mainstay_group::wire::{Down, Join, PROTOCOL, Up};
use mainstay_model::time::Mono;
use mainstay_sys::clock;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::group::streams::api::HostCaller;
use crate::group::streams::measure;
use crate::group::streams::{
    PROVEN_WITHIN, SILENT_FOR, StreamError, Token, encrypted, prove_as_leader, receive, send_waiting, streams,
};

/// Maximum number of connections: those of the largest job, and of launchers that check this one.
const MAX_CONNECTIONS: usize = 32_768;

/// Messages that may queue for one connection; a follower that does not read loses its connection.
pub const MAX_QUEUED_MESSAGES: usize = 8192;

/// Events from followers.
#[derive(Debug)]
pub enum FromHost {
    /// A launcher has proven that it knows the token, and wants to join.
    Joined {
        /// Its connection.
        connection: u64,
        /// Who it is.
        join: Join,
        /// The address it comes from.
        peer: IpAddr,
        /// The way back; the connection ends when it is dropped.
        to: mpsc::Sender<Down>,
    },
    /// A message.
    Received {
        /// Of which connection.
        connection: u64,
        /// When it arrived.
        at: Mono,
        /// What.
        up: Up,
    },
    /// A connection has ended.
    Gone {
        /// Which.
        connection: u64,
        /// Why.
        why: String,
    },
}

/// The listening socket with its connections; all are closed when this is dropped.
#[derive(Debug)]
pub struct Listener {
    /// The events.
    pub events: mpsc::Receiver<FromHost>,
    task: JoinHandle<()>,
}

/// A connection is closed if its proof is not complete within this time. The connecting side times out earlier: it
/// can report the reason, a closed connection cannot.
const JOINS_WITHIN: Duration = PROVEN_WITHIN.saturating_add(Duration::from_secs(2));

/// A bound port that does not accept connections yet.
#[derive(Debug)]
pub struct Bound(TcpListener);

impl Bound {
    /// Binds a free port on all addresses.
    ///
    /// # Errors
    /// There is none.
    pub async fn new() -> io::Result<Bound> {
        // Both address families if there is IPv6.
        let bind = async {
            match TcpListener::bind("[::]:0").await {
                Ok(listener) => Ok(Bound(listener)),
                Err(_) => TcpListener::bind("0.0.0.0:0").await.map(Bound),
            }
        };
        streams().spawn(bind).await.map_err(io::Error::other)?
    }

    /// The port.
    ///
    /// # Errors
    /// The kernel does not return it.
    pub fn port(&self) -> io::Result<u16> {
        self.0.local_addr().map(|address| address.port())
    }

    /// Serves launchers that know the token. Those that read the API of this one become `callers`.
    pub fn listen(self, token: Token, callers: Option<mpsc::Sender<HostCaller>>) -> Listener {
        let (sender, events) = mpsc::channel(1024);
        Listener { events, task: streams().spawn(accept(self.0, token, (sender, callers))) }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The ways to the group and to the API.
type Receivers = (mpsc::Sender<FromHost>, Option<mpsc::Sender<HostCaller>>);

async fn accept(listener: TcpListener, token: Token, to: Receivers) {
    let open = Arc::new(AtomicUsize::new(0));
    let mut connections = tokio::task::JoinSet::new();
    for connection in 1.. {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of another launcher");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if open.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
            continue;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (token, to, open) = (token.clone(), to.clone(), open.clone());
        connections.spawn(async move {
            if let Err(error) = serve(stream, peer, connection, &token, to).await {
                tracing::debug!(%peer, %error, "a connection of another launcher ended");
            }
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    connection: u64,
    token: &Token,
    (events, callers): Receivers,
) -> Result<(), StreamError> {
    stream.set_nodelay(true)?;
    let join = timeout(JOINS_WITHIN, async {
        let mut stream = encrypted::as_leader(stream, token).await?;
        prove_as_leader(&mut stream, token).await?;
        let first: Up = receive(&mut stream).await?;
        Ok::<_, StreamError>((stream, first))
    });
    let (stream, join) = match (join.await.map_err(|_| StreamError::Silent(JOINS_WITHIN))??, callers) {
        ((stream, Up::Join(join)), _) => (stream, join),
        ((stream, Up::Api), Some(callers)) => {
            // Without an API the connection ends here.
            let _ = callers.send(HostCaller::new(stream, peer)).await;
            return Ok(());
        }
        ((stream, Up::Measure), _) => return measure::answer(stream).await,
        _ => return Err(StreamError::Message("the first message is not a join".to_owned())),
    };
    let (mut from, mut into) = tokio::io::split(stream);
    let (to, mut messages) = mpsc::channel::<Down>(MAX_QUEUED_MESSAGES);
    let answers = to.downgrade();
    let is_understood = join.protocol == PROTOCOL;
    let joined = FromHost::Joined { connection, join, peer: peer.ip().to_canonical(), to };
    if events.send(joined).await.is_err() {
        return Ok(());
    }
    let write = async {
        while let Some(message) = messages.recv().await {
            send_waiting(&mut into, &message, &mut messages).await?;
        }
        Err::<(), StreamError>(StreamError::Message("the leader ended it".to_owned()))
    };
    let read = async {
        if !is_understood {
            // It reads only why it is refused, and nothing else that it sends can be read.
            tokio::time::sleep(SILENT_FOR).await;
            return Err(StreamError::Silent(SILENT_FOR));
        }
        loop {
            let up = timeout(SILENT_FOR, receive(&mut from)).await;
            let up = up.map_err(|_| StreamError::Silent(SILENT_FOR))??;
            let at = clock::mono();
            if let Up::Beat { sent } = up {
                let Some(to) = answers.upgrade() else {
                    // The leader ends it. Its last message, such as why it refuses a launcher, is still being sent.
                    tokio::time::sleep(SILENT_FOR).await;
                    return Err(StreamError::Silent(SILENT_FOR));
                };
                // At once, so that the round trip is short.
                if to.try_send(Down::Beat { sent, at }).is_err() {
                    return Err::<(), _>(StreamError::Message("its messages are not read".to_owned()));
                }
            }
            if events.send(FromHost::Received { connection, at, up }).await.is_err() {
                return Ok(());
            }
        }
    };
    let ended = tokio::select! { ended = write => ended, ended = read => ended };
    let why = ended.as_ref().err().map(ToString::to_string).unwrap_or_default();
    // The receiver is dropped only with the launcher.
    let _ = events.send(FromHost::Gone { connection, why }).await;
    ended
}
