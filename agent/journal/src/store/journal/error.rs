//! Errors of the journal, and what to do about them.

use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

/// Why an operation of the journal failed.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process writes to the same directory.
    #[error(
        "the journal in {} is in use by {}; stop it or choose another state_dir",
        dir.display(),
        holder.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    Locked {
        /// The journal's directory.
        dir: PathBuf,
        /// The process that holds it, if known.
        holder: Option<i32>,
    },
    /// The operating system refused.
    #[error("{operation} {}: {source}{}", path.display(), advice(source))]
    Io {
        /// What was attempted.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The error from the system.
        #[source]
        source: io::Error,
    },
    /// The file system does not answer.
    #[error("the file system of {} does not answer; writing resumes when it does", dir.display())]
    Silent {
        /// The journal's directory.
        dir: PathBuf,
    },
    /// An entry has no JSON form.
    #[error("writing entry {seq} as JSON: {source}")]
    Encode {
        /// Its number.
        seq: u64,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// An entry was appended under a number that is already used.
    #[error("entry {seq} comes too late: the journal continues at {next}")]
    Order {
        /// Its number.
        seq: u64,
        /// The number that the journal expects.
        next: u64,
    },
}

impl JournalError {
    pub(super) fn io(operation: &'static str, path: &Path, source: io::Error) -> JournalError {
        JournalError::Io { operation, path: path.to_owned(), source }
    }

    /// Whether the error may go away with time: the disk is full or fails, as opposed to a lock or an entry.
    pub fn is_disk(&self) -> bool {
        matches!(self, JournalError::Io { .. } | JournalError::Silent { .. })
    }
}

/// What would help, for errors that operators see.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOSPC | Errno::EDQUOT) => {
            "; free space on this file system or lower journal.max_size; writing resumes by itself"
        }
        Some(Errno::EFBIG) => "; raise the file size limit (ulimit -f) or lower journal.max_size",
        Some(Errno::EIO) => "; the disk or its file system fails: see the kernel log",
        Some(Errno::EROFS) => {
            "; the file system is read-only: remount it, or set state_dir to a writable one"
        }
        Some(Errno::EACCES | Errno::EPERM) => {
            "; give this user write access, or set state_dir to a directory of its own"
        }
        Some(Errno::ENOTDIR | Errno::EEXIST) => "; there is a file where a directory is needed",
        _ => "",
    }
}
