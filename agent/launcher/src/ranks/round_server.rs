//! The socket on which the launcher agrees on rounds with ranks that can stay in their processes: one for the job, next to
//! the heartbeat pages. The kernel identifies the sender (`SO_PEERCRED`); `recovery::in_process` defines the messages.
//!
//! A rank's message can at most end its own connection, and a rank that does not read blocks no other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use mainstay_model::id::Pid;
use mainstay_recovery::in_process::{Call, MAX_LINE_BYTES, RankMessage};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet, spawn_local};

pub const SOCKET: &str = "rounds.sock";

/// The name of the socket for drills, on which messages go only to the ranks.
pub const DRILL_SOCKET: &str = "drill.sock";

/// Connections at a time: far more than a host has ranks.
const MAX_CONNECTIONS: usize = 1024;

type Writers = Rc<RefCell<BTreeMap<Pid, mpsc::UnboundedSender<String>>>>;

/// The socket with its connections; dropping it closes all of them.
#[derive(Debug)]
pub struct RoundServer {
    path: PathBuf,
    messages: mpsc::UnboundedReceiver<(Pid, RankMessage)>,
    /// By process: the sender of its newest connection.
    writers: Writers,
    task: JoinHandle<()>,
}

impl RoundServer {
    /// Creates the socket in `directory`, or the one for drills, from which nothing is ever received.
    ///
    /// # Errors
    /// It cannot be created: its path has more than 107 bytes, or the directory cannot be written.
    pub fn open(directory: &Path, for_drills: bool) -> io::Result<RoundServer> {
        let path = directory.join(if for_drills { DRILL_SOCKET } else { SOCKET });
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        let (sender, mut messages) = mpsc::unbounded_channel();
        if for_drills {
            messages.close();
        }
        let writers = Writers::default();
        let task = spawn_local(accept(listener, sender, writers.clone()));
        Ok(RoundServer { path, messages, writers, task })
    }

    /// The next message, and the process that sent it.
    pub async fn next(&mut self) -> (Pid, RankMessage) {
        match self.messages.recv().await {
            Some(response) => response,
            None => std::future::pending().await,
        }
    }

    pub fn is_connected(&self, pid: Pid) -> bool {
        self.writers.borrow().get(&pid).is_some_and(|mouth| !mouth.is_closed())
    }

    /// Sends a call to a process, if it is connected.
    pub fn send(&self, pid: Pid, call: &Call) {
        if let Some(mouth) = self.writers.borrow().get(&pid) {
            // The process sees that a connection has ended.
            let _ = mouth.send(call.line());
        }
    }

    /// Forgets a process that is gone: another one may get its number.
    pub fn forget(&self, pid: Pid) {
        self.writers.borrow_mut().remove(&pid);
    }
}

impl Drop for RoundServer {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn accept(
    listener: UnixListener,
    messages: mpsc::UnboundedSender<(Pid, RankMessage)>,
    writers: Writers,
) {
    // Dropped, and so ended, with this task.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    connections.spawn_local(serve(stream, messages.clone(), writers.clone()));
                }
                Err(error) => {
                    tracing::debug!(%error, "a rank's connection for rounds failed");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(stream: UnixStream, messages: mpsc::UnboundedSender<(Pid, RankMessage)>, writers: Writers) {
    let Some(pid) = stream.peer_cred().ok().and_then(|peer| peer.pid()).map(Pid) else { return };
    let (mouth, mut calls) = mpsc::unbounded_channel::<String>();
    writers.borrow_mut().insert(pid, mouth);
    let (mut ear, mut out) = stream.into_split();
    let mut received = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        tokio::select! {
            call = calls.recv() => match call {
                Some(line) if out.write_all(line.as_bytes()).await.is_ok() => {}
                Some(_) | None => return,
            },
            read = ear.read(&mut chunk) => match read {
                Ok(length @ 1..) => {
                    received.extend_from_slice(&chunk[..length]);
                    if !pass_on(pid, &mut received, &messages) {
                        return;
                    }
                }
                Ok(_) | Err(_) => return,
            },
        }
    }
}

/// Passes on all complete lines. Returns whether to keep the connection.
fn pass_on(pid: Pid, received: &mut Vec<u8>, messages: &mpsc::UnboundedSender<(Pid, RankMessage)>) -> bool {
    while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
        let line: Vec<u8> = received.drain(..=end).collect();
        match RankMessage::read(&line) {
            Ok(message) => {
                let _ = messages.send((pid, message));
            }
            Err(error) => {
                tracing::warn!(pid = pid.0, %error, "what a rank says of its round is not understood");
                return false;
            }
        }
    }
    received.len() <= MAX_LINE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs on a single thread, as the launcher does.
    fn local<F: Future<Output = ()>>(test: F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, test);
    }

    #[test]
    fn words_come_with_the_process_that_sent_them_and_calls_reach_it() {
        local(async {
            let root = testing::tempdir().expect("a directory");
            let mut round_server = RoundServer::open(root.path(), false).expect("a socket");
            let mut rank = UnixStream::connect(root.path().join(SOCKET)).await.expect("connected");
            rank.write_all(b"{\"say\":\"hello\",\"epoch\":2}\n{\"say\":").await.expect("said");
            let us = Pid(i32::try_from(std::process::id()).expect("a pid"));
            assert_eq!(round_server.next().await, (us, RankMessage::Hello { epoch: 2 }));
            rank.write_all(b"\"ready\",\"epoch\":2}\n").await.expect("said");
            assert_eq!(round_server.next().await, (us, RankMessage::Ready { epoch: 2 }));
            round_server.send(Pid(1), &Call::Finished { epoch: 1 });
            round_server.send(us, &Call::Leave { epoch: 2 });
            let mut received = [0; 64];
            let length = rank.read(&mut received).await.expect("read");
            assert_eq!(&received[..length], Call::Leave { epoch: 2 }.line().as_bytes());
        });
    }

    #[test]
    fn nonsense_ends_its_connection_and_the_process_may_reconnect() {
        local(async {
            let root = testing::tempdir().expect("a directory");
            let mut round_server = RoundServer::open(root.path(), false).expect("a socket");
            let path = root.path().join(SOCKET);
            let mut bad = UnixStream::connect(&path).await.expect("connected");
            bad.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("said");
            assert_eq!(bad.read(&mut [0; 8]).await.expect("closed"), 0);
            // Only now: of several connections of one process the newest counts.
            let mut good = UnixStream::connect(&path).await.expect("connected");
            good.write_all(b"{\"say\":\"done\",\"epoch\":0}\n").await.expect("said");
            assert_eq!(round_server.next().await.1, RankMessage::Done { epoch: 0 });
        });
    }
}
