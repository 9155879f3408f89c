//! The streams between the launchers of one job: one connection from each follower to the leader.
//!
//! A connection starts with TLS, unless the user disables it, and a proof on both sides that they know the job's
//! token. After that, each message is its length as four bytes, most significant first, and JSON.
//! `mainstay_group::wire` defines the messages; the launcher decides which host is lost.

pub mod api;
pub mod connect;
mod encrypted;
pub mod listen;
pub(crate) mod measure;
pub mod probe;

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

pub use encrypted::Ends;

use mainstay_group::wire::{LONGEST_MESSAGE, Message};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::{Builder, Handle};
use tokio::sync::mpsc;

/// A follower sends a message at least this often.
pub const BEAT_EVERY: Duration = Duration::from_millis(500);

/// A connection that received nothing for this long is closed.
pub const SILENT_FOR: Duration = Duration::from_secs(5);

/// The runtime of the streams: a separate thread, so that beats are sent regularly while the launcher's loop starts
/// ranks or waits for a disk.
pub(crate) fn streams() -> Handle {
    static STREAMS: OnceLock<Handle> = OnceLock::new();
    let start = || {
        let runtime = Builder::new_current_thread().enable_all().build().ok()?;
        let handle = runtime.handle().clone();
        let run = move || runtime.block_on(std::future::pending::<()>());
        std::thread::Builder::new().name("mainstay-hosts".to_owned()).spawn(run).ok()?;
        Some(handle)
    };
    // Without a thread they run on the launcher's runtime.
    STREAMS.get_or_init(|| start().unwrap_or_else(Handle::current)).clone()
}

/// Queued messages are written together, about this many bytes at a time.
const WRITE_BATCH_BYTES: usize = 64 << 10;

/// How long the proofs may take.
const PROVEN_WITHIN: Duration = Duration::from_secs(5);

/// The first bytes of the leader. The number is the version of the proof, not of the messages.
const MAGIC: &[u8; 8] = b"MSTHOST1";

/// What both sides must know, and how they encrypt.
#[derive(Clone)]
pub struct Token {
    key: [u8; 32],
    ends: Option<Ends>,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// The token of a job: derived from the secret that the user gave, else from the run id, which separates jobs
    /// but does not keep out intruders.
    pub fn new(run_id: &str, secret: Option<&str>) -> Token {
        let mut text = secret.unwrap_or_default().to_owned();
        text.push('\0');
        text.push_str(run_id);
        Token {
            key: blake3::derive_key("mainstay 2026-11 launchers of one job", text.as_bytes()),
            ends: None,
        }
    }

    /// The same over TLS with these configurations; none for plain connections.
    #[must_use]
    pub fn over(self, ends: Option<Ends>) -> Token {
        Token { ends, ..self }
    }

    fn proof(&self, side: &[u8], nonces: &[u8; 64]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(side).update(nonces);
        hasher.finalize()
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The network failed.
    #[error("{0}")]
    Io(io::Error),
    /// The other side has closed the connection.
    #[error("the connection was closed by the other side")]
    Closed,
    /// Another program answers.
    #[error("another program answers there, not a launcher of Mainstay")]
    NoLauncher,
    /// The other side does not know the token.
    #[error(
        "the launcher there does not have the same secret of the job: use the same --rdzv-id and MAINSTAY_RDZV_TOKEN on all hosts"
    )]
    Token,
    /// One side encrypts, and the other does not.
    #[error(
        "one side encrypts the connection and the other one does not: use --rdzv-conf encrypt=off on all hosts or on none"
    )]
    NotEncrypted,
    /// A message is too long or not the expected one.
    #[error("a message could not be read: {0}")]
    Message(String),
    /// It took too long.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
}

impl From<io::Error> for StreamError {
    fn from(error: io::Error) -> StreamError {
        match error.kind() {
            // A killed process closes no connection properly, neither with TLS nor without.
            io::ErrorKind::UnexpectedEof => StreamError::Closed,
            _ => StreamError::Io(error),
        }
    }
}

async fn receive<T: Message>(from: &mut (impl AsyncRead + Unpin)) -> Result<T, StreamError> {
    let length = from.read_u32().await? as usize;
    if length > LONGEST_MESSAGE {
        return Err(StreamError::Message(format!("it has {length} bytes")));
    }
    // Memory is allocated as bytes arrive, not for the announced length.
    let mut bytes = Vec::new();
    from.take(length as u64).read_to_end(&mut bytes).await?;
    if bytes.len() < length {
        return Err(StreamError::Closed);
    }
    T::read(&bytes).map_err(|error| StreamError::Message(error.to_string()))
}

async fn send(to: &mut (impl AsyncWrite + Unpin), message: &impl Message) -> Result<(), StreamError> {
    let mut bytes = Vec::new();
    encode(message, &mut bytes)?;
    to.write_all(&bytes).await?;
    Ok(to.flush().await?)
}

/// Writes a message and those queued behind it at once.
async fn send_waiting<T: Message>(
    to: &mut (impl AsyncWrite + Unpin),
    first: &T,
    waiting: &mut mpsc::Receiver<T>,
) -> Result<(), StreamError> {
    let mut bytes = Vec::new();
    encode(first, &mut bytes)?;
    while bytes.len() < WRITE_BATCH_BYTES
        && let Ok(next) = waiting.try_recv()
    {
        encode(&next, &mut bytes)?;
    }
    to.write_all(&bytes).await?;
    Ok(to.flush().await?)
}

/// Appends a message with its length.
fn encode(message: &impl Message, into: &mut Vec<u8>) -> Result<(), StreamError> {
    let begin = into.len();
    into.extend([0; 4]);
    message.write(into).map_err(|error| StreamError::Message(error.to_string()))?;
    let bytes = into.len() - begin - 4;
    let length = u32::try_from(bytes).ok().filter(|_| bytes <= LONGEST_MESSAGE);
    let length = length.ok_or_else(|| StreamError::Message(format!("it has {bytes} bytes")))?;
    into[begin..begin + 4].copy_from_slice(&length.to_be_bytes());
    Ok(())
}

async fn prove_as_leader<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    token: &Token,
) -> Result<(), StreamError> {
    let mut nonces = [0; 64];
    nonces[..32].copy_from_slice(&random()?);
    stream.write_all(MAGIC).await?;
    stream.write_all(&nonces[..32]).await?;
    stream.flush().await?;
    stream.read_exact(&mut nonces[32..]).await?;
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).await?;
    // `blake3::Hash` compares in constant time.
    if blake3::Hash::from_bytes(proof) != token.proof(b"follower", &nonces) {
        return Err(StreamError::Token);
    }
    stream.write_all(token.proof(b"leader", &nonces).as_bytes()).await?;
    Ok(stream.flush().await?)
}

async fn prove_as_follower<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    token: &Token,
) -> Result<(), StreamError> {
    let mut magic = [0; 8];
    stream.read_exact(&mut magic).await?;
    if &magic != MAGIC {
        return Err(StreamError::NoLauncher);
    }
    let mut nonces = [0; 64];
    stream.read_exact(&mut nonces[..32]).await?;
    nonces[32..].copy_from_slice(&random()?);
    stream.write_all(&nonces[32..]).await?;
    stream.write_all(token.proof(b"follower", &nonces).as_bytes()).await?;
    stream.flush().await?;
    let mut proof = [0; 32];
    // A leader with another token closes the connection without an answer.
    stream.read_exact(&mut proof).await.map_err(|_| StreamError::Token)?;
    if blake3::Hash::from_bytes(proof) != token.proof(b"leader", &nonces) {
        return Err(StreamError::Token);
    }
    Ok(())
}

fn random() -> io::Result<[u8; 32]> {
    use std::io::Read;
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn both(leader: Token, follower: Token) -> (Result<(), StreamError>, Result<(), StreamError>) {
        let (mut a, mut b) = tokio::io::duplex(1024);
        let lead = async move { prove_as_leader(&mut a, &leader).await };
        let follow = async move { prove_as_follower(&mut b, &follower).await };
        tokio::join!(lead, follow)
    }

    #[tokio::test]
    async fn only_launchers_with_the_same_token_connect() {
        let token = || Token::new("run", Some("secret"));
        let (leader, follower) = both(token(), token()).await;
        leader.expect("the same token");
        follower.expect("the same token");
        for other in
            [Token::new("run", Some("guess")), Token::new("other", Some("secret")), Token::new("run", None)]
        {
            let (leader, follower) = both(token(), other).await;
            assert!(matches!(leader, Err(StreamError::Token)), "{leader:?}");
            assert!(matches!(follower, Err(StreamError::Token)), "{follower:?}");
        }
    }

    #[tokio::test]
    async fn another_program_is_reported_as_such() {
        let (mut a, mut b) = tokio::io::duplex(1024);
        a.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("written");
        let error = prove_as_follower(&mut b, &Token::new("run", None)).await.expect_err("no launcher");
        assert!(matches!(error, StreamError::NoLauncher), "{error}");
    }

    #[tokio::test]
    async fn a_message_with_an_excessive_length_is_not_read() {
        let (mut a, mut b) = tokio::io::duplex(1024);
        a.write_u32(u32::MAX).await.expect("written");
        let error = receive::<mainstay_group::wire::Up>(&mut b).await.expect_err("too long");
        assert!(matches!(error, StreamError::Message(_)), "{error}");
    }
}
