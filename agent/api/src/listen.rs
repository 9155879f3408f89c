//! Listening sockets: a Unix socket that has the right mode from the start, and TCP.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mainstay_tier::peer::{User, Users};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::authority::PlainAuthority;
use super::connection_limits::{ConnectionLimits, ConnectionPermit, Placed};
use super::encrypted::{Encrypting, TcpCaller};
use super::tcp_connections::TcpConnections;
use mainstay_sys::peer_groups::peer_groups;

/// How long accepting pauses after a failure that would repeat at once, such as too many open files.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Bytes of a socket's path: `sun_path` without its final zero (unix(7)).
const LONGEST_PATH: usize = 107;

/// Why a socket cannot be opened for listening.
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
        /// What was attempted.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The error from the system.
        source: io::Error,
    },
    /// The operating system refused.
    #[error("listening on {address}: {source}")]
    Tcp {
        /// As configured.
        address: String,
        /// The error from the system.
        source: io::Error,
    },
}

/// Binds a TCP address such as `127.0.0.1:9464`, `[::]:9464` or `localhost:9464`.
pub async fn tcp(address: &str) -> Result<TcpListener, ListenError> {
    let failed = |source| ListenError::Tcp { address: address.to_owned(), source };
    TcpListener::bind(address).await.map_err(failed)
}

/// A listening Unix socket. The file is removed when this is dropped.
#[derive(Debug)]
pub struct UnixSocket {
    path: PathBuf,
    listener: std::os::unix::net::UnixListener,
    inode: u64,
    /// Where the groups of callers are recorded.
    users: Arc<Users>,
    /// Held for its lock: of two processes that start at once, one gets the socket.
    _lock: File,
}

impl UnixSocket {
    /// Listens at `path` with this mode (0666 for agents, 0600 for launchers).
    ///
    /// The parent directory must exist. A socket file that a dead process left is replaced; one that answers
    /// is an error, as is anything that is not a socket. The new socket appears under its name only once it
    /// has its mode and accepts callers.
    pub fn bind(path: &Path, mode: u32) -> Result<UnixSocket, ListenError> {
        UnixSocket::bind_for(path, mode, None)
    }

    /// The same for a group, if one is given: mode 0660 admits its members.
    pub fn bind_for(path: &Path, mode: u32, group: Option<u32>) -> Result<UnixSocket, ListenError> {
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
        let length = new.as_os_str().len();
        if length > LONGEST_PATH {
            let source = io::Error::other(format!(
                "its path is too long: {length} bytes with the suffix .new, at most {LONGEST_PATH} are possible; use a \
                 shorter directory (of a job: --runtime-dir or MAINSTAY_RUNTIME_DIR)"
            ));
            return Err(failed("creating the socket")(source));
        }
        let _ = std::fs::remove_file(&new);
        let listening = listening_at(&new, mode, group).map_err(failed("creating the socket"))?;
        std::fs::rename(&new, path).map_err(failed("moving the new socket to"))?;
        let inode = std::fs::symlink_metadata(path).map_err(failed("reading"))?.ino();
        Ok(UnixSocket {
            path: path.to_owned(),
            listener: listening,
            inode,
            users: Arc::default(),
            _lock: lock,
        })
    }

    /// Records the groups of callers there.
    #[must_use]
    pub fn of_users(mut self, users: &Arc<Users>) -> UnixSocket {
        self.users = Arc::clone(users);
        self
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same socket for a thread that blocks on accept. The file stays as long as `self` lives.
    pub(super) fn blocking(&self) -> io::Result<std::os::unix::net::UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(false)?;
        Ok(listener)
    }

    /// Its connections, until the stop. Must be called within a tokio runtime.
    pub(super) fn incoming(
        &self,
        stop: CancellationToken,
    ) -> ReceiverStream<io::Result<Placed<PlainAuthority<UnixStream>, ConnectionPermit<u32>>>> {
        let (sender, receiver) = mpsc::channel(1);
        match self.listener.try_clone().and_then(UnixListener::from_std) {
            Ok(listener) => {
                let users = Arc::clone(&self.users);
                let places = Mutex::new(ConnectionLimits::of_a_listener());
                tokio::spawn(accept(stop, sender, async move || {
                    loop {
                        let (stream, _) = listener.accept().await?;
                        let credentials = stream.peer_cred()?;
                        let (uid, gid) = (credentials.uid(), credentials.gid());
                        let is_free = uid == 0 || uid == nix::unistd::geteuid().as_raw();
                        let place = places.lock().unwrap_or_else(PoisonError::into_inner).take(uid, is_free);
                        // Without a place the connection is closed at once.
                        let Some(place) = place else { continue };
                        if let Ok(groups) = peer_groups(&stream) {
                            users.learn_groups(User { uid, gid }, &groups);
                        }
                        return Ok(Placed::new(PlainAuthority::new(stream), place));
                    }
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
        // Another process may have replaced the file; that file must not be removed. The lock file stays: removing
        // it would let two processes hold locks on two files of the same name.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The connections of a TCP listener, until the stop.
pub(super) fn incoming(
    listener: TcpListener,
    tls: Option<Encrypting>,
    stop: CancellationToken,
) -> ReceiverStream<io::Result<TcpCaller>> {
    let (sender, receiver) = mpsc::channel(1);
    let connections = TcpConnections::default();
    let accepted = sender.clone();
    tokio::spawn(accept(stop, sender, async move || {
        loop {
            let (stream, address) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let place = connections.add(address.ip(), &stream);
            let stream = Placed::new(stream, place);
            let Some(tls) = tls.clone() else { return Ok(TcpCaller::Plain(stream)) };
            let accepted = accepted.clone();
            // No caller waits for the handshake of another.
            tokio::spawn(async move {
                if let Some(stream) = tls.accept(stream).await {
                    let _ = accepted.send(Ok(stream)).await;
                }
            });
        }
    }));
    ReceiverStream::new(receiver)
}

/// Accepts forever. A failure causes a short pause: it neither ends the listener nor uses a whole CPU.
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
                    tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
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

/// No one can connect between bind and listen: the mode is set there.
fn listening_at(path: &Path, mode: u32, group: Option<u32>) -> io::Result<std::os::unix::net::UnixListener> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    if let Some(group) = group {
        std::os::unix::fs::chown(path, None, Some(group)).map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied => io::Error::new(
                error.kind(),
                format!(
                    "giving it to the group {group} of socket_gid: {error}; under systemd a drop-in of the unit needs \
                     SupplementaryGroups={group} and SystemCallFilter=@chown"
                ),
            ),
            _ => error,
        })?;
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    listen(&fd, Backlog::new(128)?)?;
    Ok(fd.into())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
