//! Passes open directories and files from one process to another over a Unix socket (`SCM_RIGHTS`): one message
//! with a description and the descriptors, and one answer. gRPC over the agent's socket cannot carry descriptors,
//! so this uses a separate socket.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Maximum number of descriptors in one message.
pub const MAX_DESCRIPTORS: usize = 16;

/// Maximum number of bytes of the description in one message, and of an answer.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// What the descriptors of one message are.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Contents {
    /// Directories with checkpoints, by name.
    Directories(Vec<PathBuf>),
    /// Files for shards that are to be restored.
    Files {
        /// The token of their restore.
        token: String,
        /// The number of the first of them.
        first: usize,
    },
}

/// Sends the names and the descriptors; returns the answer.
///
/// # Errors
/// The other side does not accept them, or there are too many.
pub fn send(mut stream: &UnixStream, names: &[u8], directories: &[OwnedFd]) -> io::Result<Vec<u8>> {
    if directories.len() > MAX_DESCRIPTORS || names.len() > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too much for one message"));
    }
    let raw: Vec<RawFd> = directories.iter().map(AsRawFd::as_raw_fd).collect();
    let length = u32::try_from(names.len()).unwrap_or(u32::MAX).to_le_bytes();
    let control = [ControlMessage::ScmRights(&raw)];
    let sent =
        sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&length)], &control, MsgFlags::MSG_NOSIGNAL, None)?;
    if sent != length.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    stream.write_all(names)?;
    let mut answer = Vec::new();
    stream.take(MAX_MESSAGE_BYTES as u64).read_to_end(&mut answer)?;
    Ok(answer)
}

/// Receives the names and the descriptors.
///
/// # Errors
/// The received data is not a valid message.
pub fn receive(mut stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut length = [0; 4];
    let mut control = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut directories = Vec::new();
    let came = {
        let mut into = [IoSliceMut::new(&mut length)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_WAITALL;
        let message = recvmsg::<()>(stream.as_raw_fd(), &mut into, Some(&mut control), flags)?;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = control {
                // SAFETY: the kernel has just opened these descriptors for this process, and no other code knows
                // them.
                directories.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if message.flags.contains(MsgFlags::MSG_CTRUNC) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "more descriptors than one message may have",
            ));
        }
        message.bytes
    };
    let length = u32::from_le_bytes(length) as usize;
    if came != 4 || length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no message of a launcher"));
    }
    let mut names = vec![0; length];
    stream.read_exact(&mut names)?;
    Ok((names, directories))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    #[test]
    fn a_directory_arrives_unchanged() {
        let place = testing::tempdir().expect("a directory");
        let opened = File::open(place.path()).expect("a directory");
        let inode = opened.metadata().expect("a stat").ino();
        let (one, other) = UnixStream::pair().expect("sockets");
        let taking = std::thread::spawn(move || {
            let (names, directories) = receive(&other).expect("a message");
            (&other).write_all(b"taken").expect("an answer");
            (names, directories)
        });
        let answer = send(&one, b"names", &[opened.into()]).expect("an answer");
        let (names, mut directories) = taking.join().expect("a message");
        assert_eq!((&*answer, &*names, directories.len()), (&b"taken"[..], &b"names"[..], 1));
        let arrived = File::from(directories.remove(0));
        assert_eq!(arrived.metadata().expect("a stat").ino(), inode);
    }

    #[test]
    fn an_invalid_message_leaves_no_descriptor() {
        let (one, other) = UnixStream::pair().expect("sockets");
        other.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
        (&one).write_all(&u32::MAX.to_le_bytes()).expect("bytes");
        assert!(receive(&other).is_err());
        drop(one);
        assert!(receive(&other).is_err());
    }
}
