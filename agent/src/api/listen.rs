//! Sockets to listen on: a Unix socket with the right mode from its first instant, and TCP.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::authority::PlainAuthority;

/// How long accepting rests after a failure, such as too many open files, that would repeat at once.
const REST: Duration = Duration::from_millis(200);

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process answers there.
    #[error("{} is served by another process already; stop it or choose another socket", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something that is not a socket is in the way.
    #[error("{} is in the way and is not a socket; remove it or choose another path", path.display())]
    NotASocket {
        /// What is in the way.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{operation} {}: {source}", path.display())]
    Unix {
        /// What was being done.
        operation: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The operating system refused.
    #[error("listening on {address}: {source}")]
    Tcp {
        /// As configured.
        address: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Binds a TCP address such as `127.0.0.1:9464`, `[::]:9464` or `localhost:9464`.
pub async fn tcp(address: &str) -> Result<TcpListener, ListenError> {
    let failed = |source| ListenError::Tcp { address: address.to_owned(), source };
    TcpListener::bind(address).await.map_err(failed)
}

/// A Unix socket that is listened on. The file is removed when this is dropped.
#[derive(Debug)]
pub struct UnixSocket {
    path: PathBuf,
    listener: std::os::unix::net::UnixListener,
    inode: u64,
    /// Held for its lock: of two processes that start at once, one gets the socket.
    _lock: File,
}

impl UnixSocket {
    /// Listens at `path` with this mode (0660 for agents, 0600 for launchers).
    ///
    /// The parent directory must exist. A socket file that a dead process left is replaced; one that answers
    /// is an error, as is anything that is not a socket. The new socket appears under its name only once it
    /// has its mode and accepts callers.
    pub fn bind(path: &Path, mode: u32) -> Result<UnixSocket, ListenError> {
        let failed = |operation| {
            move |source: io::Error| ListenError::Unix { operation, path: path.to_owned(), source }
        };
        let parent = path.parent().unwrap_or(Path::new("/"));
        if let Err(source) = std::fs::metadata(parent) {
            let operation = "looking for the socket's directory";
            return Err(ListenError::Unix { operation, path: parent.to_owned(), source });
        }
        let lock = lock(path)?;
        refuse_unless_dead(path)?;

        let new = with_suffix(path, ".new");
        let _ = std::fs::remove_file(&new);
        let listening = listening_at(&new, mode).map_err(failed("creating the socket"))?;
        std::fs::rename(&new, path).map_err(failed("moving the new socket to"))?;
        let inode = std::fs::symlink_metadata(path).map_err(failed("reading"))?.ino();
        Ok(UnixSocket { path: path.to_owned(), listener: listening, inode, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its callers, until the stop. Must be called within a tokio runtime.
    pub(super) fn incoming(
        &self,
        stop: CancellationToken,
    ) -> ReceiverStream<io::Result<PlainAuthority<UnixStream>>> {
        let (sender, receiver) = mpsc::channel(1);
        match self.listener.try_clone().and_then(UnixListener::from_std) {
            Ok(listener) => {
                tokio::spawn(accept(stop, sender, async move || {
                    Ok(PlainAuthority::new(listener.accept().await?.0))
                }));
            }
            Err(error) => {
                let _ = sender.try_send(Err(error));
            }
        }
        ReceiverStream::new(receiver)
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        // Someone may have put another file in its place, which is not ours to remove. The lock's file stays:
        // to remove it would let two processes hold locks on two files of the same name.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The callers of a TCP listener, until the stop.
pub(super) fn incoming(
    listener: TcpListener,
    stop: CancellationToken,
) -> ReceiverStream<io::Result<TcpStream>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(accept(stop, sender, async move || {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }));
    ReceiverStream::new(receiver)
}

/// Accepts for ever. A failure costs a moment, not the listener and not a processor.
async fn accept<IO>(
    stop: CancellationToken,
    sender: mpsc::Sender<io::Result<IO>>,
    next: impl AsyncFn() -> io::Result<IO>,
) {
    let accepting = async {
        loop {
            match next().await {
                Ok(stream) => {
                    if sender.send(Ok(stream)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a caller of the API could not be accepted");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    };
    tokio::select! {
        () = accepting => {}
        () = stop.cancelled() => {}
        () = sender.closed() => {}
    }
}

fn lock(path: &Path) -> Result<File, ListenError> {
    let name = with_suffix(path, ".lock");
    let failed = |source| ListenError::Unix { operation: "locking", path: name.clone(), source };
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(ListenError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

fn refuse_unless_dead(path: &Path) -> Result<(), ListenError> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(ListenError::Unix { operation: "reading", path: path.to_owned(), source });
        }
        Ok(file) if !file.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match StdUnixStream::connect(path) {
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => Ok(()),
        Ok(_) | Err(_) => Err(ListenError::InUse { path: path.to_owned() }),
    }
}

/// Between bind and listen nobody can connect: that is when the mode is set.
fn listening_at(path: &Path, mode: u32) -> io::Result<std::os::unix::net::UnixListener> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    listen(&fd, Backlog::new(128)?)?;
    Ok(fd.into())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
