//! Hands the agent the directories with this job's checkpoints, open: an agent that may not act as this user reads them so.

use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::trust::is_trusted;
use crate::os::handover::{self, MOST};

/// How long the agent may take.
const WITHIN: Duration = Duration::from_secs(2);

/// Where the agent at `socket` takes directories.
pub fn socket_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".directories");
    name.into()
}

/// Hands over `directories` to the agent at `socket`; what it refused, in words. Blocks.
///
/// # Errors
/// There is no agent that takes them.
pub fn hand_over(socket: &Path, directories: &[PathBuf]) -> std::io::Result<String> {
    let stream = UnixStream::connect(socket_of(socket))?;
    let owner = getsockopt(&stream, PeerCredentials)?.uid();
    if !is_trusted(socket, owner) {
        let problem = format!("{} is served by user {owner}, who is not trusted", socket.display());
        return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, problem));
    }
    stream.set_read_timeout(Some(WITHIN))?;
    stream.set_write_timeout(Some(WITHIN))?;
    let opened = directories.iter().filter_map(|path| {
        let flags = nix::libc::O_DIRECTORY | nix::libc::O_NONBLOCK;
        let directory = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        Some((path, OwnedFd::from(directory)))
    });
    let (names, directories): (Vec<&PathBuf>, Vec<OwnedFd>) = opened.take(MOST).unzip();
    if names.is_empty() {
        return Ok(String::new());
    }
    let answer = handover::send(&stream, &serde_json::to_vec(&names)?, &directories)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
