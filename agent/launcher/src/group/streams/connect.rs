//! A follower's side: one connection to the leader, re-established whenever it breaks.

use std::io::ErrorKind;
use std::time::Duration;

use mainstay_group::wire::{Down, Join, Up};
use mainstay_model::time::Mono;
use mainstay_sys::clock;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::group::streams::listen::MAX_QUEUED_MESSAGES;
use crate::group::streams::{
    BEAT_EVERY, PROVEN_WITHIN, SILENT_FOR, StreamError, Token, encrypted, prove_as_follower, receive, send,
    send_waiting,
};

/// How long connecting may take.
const CONNECTED_WITHIN: Duration = Duration::from_secs(3);

/// Time between two attempts: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Events from the leader.
#[derive(Debug)]
pub enum FromLeader {
    /// The connection is established; the join was sent.
    Connected {
        /// The way there; the connection ends when it is dropped.
        to: mpsc::Sender<Up>,
    },
    /// A message.
    Received {
        /// When it was received.
        at: Mono,
        /// What.
        down: Down,
    },
    /// There is no connection, or it was lost.
    Lost {
        /// Why.
        why: String,
        /// Whether the host answered that no process listens there.
        refused: bool,
    },
}

/// Keeps a connection to the leader at one of its addresses, as long as the receiver of the events exists. `join`
/// is sent first on each connection.
pub async fn keep(
    addresses: Vec<String>,
    token: Token,
    join: watch::Receiver<Join>,
    events: mpsc::Sender<FromLeader>,
) {
    let mut pause = RETRY.0;
    for address in addresses.iter().cycle() {
        if events.is_closed() {
            return;
        }
        let ended = one(address, &token, &join, &events).await;
        let (connected, error) = match ended {
            Ok(()) => return,
            Err(ended) => ended,
        };
        let refused = matches!(&error, StreamError::Io(io) if io.kind() == ErrorKind::ConnectionRefused);
        if events.send(FromLeader::Lost { why: error.to_string(), refused }).await.is_err() {
            return;
        }
        pause = if connected { RETRY.0 } else { (pause * 2).min(RETRY.1) };
        tokio::time::sleep(pause).await;
    }
}

/// A connection on which both sides have proven that they know the token.
pub(super) async fn prove(address: &str, token: &Token) -> Result<encrypted::Stream, StreamError> {
    let connecting = timeout(CONNECTED_WITHIN, TcpStream::connect(address));
    let stream = connecting.await.map_err(|_| StreamError::Silent(CONNECTED_WITHIN))??;
    stream.set_nodelay(true)?;
    let proven = timeout(PROVEN_WITHIN, async {
        let mut stream = encrypted::as_follower(stream, token).await?;
        prove_as_follower(&mut stream, token).await.map(|()| stream)
    });
    // A leader that encrypts waits for the first bytes of this side.
    proven.await.map_err(|_| match token.ends {
        Some(_) => StreamError::Silent(PROVEN_WITHIN),
        None => StreamError::NotEncrypted,
    })?
}

/// One connection, from its first attempt to its end. Returns whether it was established, and why it ended.
async fn one(
    address: &str,
    token: &Token,
    join: &watch::Receiver<Join>,
    events: &mpsc::Sender<FromLeader>,
) -> Result<(), (bool, StreamError)> {
    let unmade = |error: StreamError| (false, error);
    let mut stream = prove(address, token).await.map_err(unmade)?;
    let first = Up::Join(join.borrow().clone());
    send(&mut stream, &first).await.map_err(unmade)?;
    let (to, mut messages) = mpsc::channel::<Up>(MAX_QUEUED_MESSAGES);
    if events.send(FromLeader::Connected { to }).await.is_err() {
        return Ok(());
    }
    let (mut from, mut into) = tokio::io::split(stream);
    let (answered, mut is_answered) = watch::channel(false);
    let write = async {
        // Until then this may be a leader of another version, which reads nothing but the join.
        let _ = timeout(BEAT_EVERY, is_answered.wait_for(|is_answered| *is_answered)).await;
        let mut beats = tokio::time::interval(BEAT_EVERY);
        loop {
            let message = tokio::select! {
                message = messages.recv() => message,
                _ = beats.tick() => Some(Up::Beat { sent: clock::mono() }),
            };
            let Some(message) = message else {
                return Err::<bool, _>(StreamError::Message("it is reconnected".to_owned()));
            };
            send_waiting(&mut into, &message, &mut messages).await?;
        }
    };
    let read = async {
        loop {
            let down = timeout(SILENT_FOR, receive::<Down>(&mut from)).await;
            let down = down.map_err(|_| StreamError::Silent(SILENT_FOR))??;
            answered.send_replace(true);
            let notice = FromLeader::Received { at: clock::mono(), down };
            if events.send(notice).await.is_err() {
                return Ok::<bool, StreamError>(true);
            }
        }
    };
    let ended = tokio::select! { ended = write => ended, ended = read => ended };
    ended.map(drop).map_err(|error| (true, error))
}
