//! Hands the agent open descriptors of the directories with this job's checkpoints, so that an agent that may not act as
//! this user can read them.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_sys::handover::{self, Contents, MAX_DESCRIPTORS};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

use crate::agent_link::trust::is_trusted;

/// How long the agent may take.
const WITHIN: Duration = Duration::from_secs(2);

/// The socket on which the agent at `socket` receives directories.
pub fn socket_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".directories");
    name.into()
}

/// Hands over `directories` to the agent at `socket`; returns what it refused, as text. Blocks.
///
/// # Errors
/// No agent accepts them.
pub fn hand_over(socket: &Path, directories: &[PathBuf]) -> std::io::Result<String> {
    let stream = trusted(socket)?;
    let opened = directories.iter().filter_map(|path| {
        let flags = nix::libc::O_DIRECTORY | nix::libc::O_NONBLOCK;
        let directory = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        Some((path, OwnedFd::from(directory)))
    });
    let (names, directories): (Vec<&PathBuf>, Vec<OwnedFd>) = opened.take(MAX_DESCRIPTORS).unzip();
    if names.is_empty() {
        return Ok(String::new());
    }
    let response = Contents::Directories(names.into_iter().cloned().collect());
    let answer = handover::send(&stream, &serde_json::to_vec(&response)?, &directories)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Whether the agent at `socket` may act as this user: it belongs to root or this user. Blocks.
///
/// # Errors
/// No agent accepts directories.
pub(crate) fn may_act_as_this_user(socket: &Path) -> io::Result<bool> {
    let stream = UnixStream::connect(socket_of(socket))?;
    let owner = getsockopt(&stream, PeerCredentials)?.uid();
    Ok(owner == 0 || owner == nix::unistd::geteuid().as_raw())
}

/// Lends files for shards to the agent at `socket`, for the restore with this token. `first` is the number of the first
/// file; there are at most [`MAX_DESCRIPTORS`]. Blocks.
///
/// # Errors
/// No agent accepts them, or it refused.
pub(crate) fn lend(socket: &Path, token: &str, first: usize, files: &[OwnedFd]) -> io::Result<()> {
    let response = Contents::Files { token: token.to_owned(), first };
    // The agent reads one message per connection.
    let answer = handover::send(&trusted(socket)?, &serde_json::to_vec(&response)?, files)?;
    if answer.is_empty() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&answer).into_owned()))
}

/// Connects to the agent that listens next to `socket`, if it may read what this user hands over.
fn trusted(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket_of(socket))?;
    let owner = getsockopt(&stream, PeerCredentials)?.uid();
    if !is_trusted(socket, owner) {
        let problem = format!("{} is served by user {owner}, who is not trusted", socket.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    stream.set_read_timeout(Some(WITHIN))?;
    stream.set_write_timeout(Some(WITHIN))?;
    Ok(stream)
}
