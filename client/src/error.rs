//! Why a page could not be opened.

use std::fmt;
use std::io;
use std::path::PathBuf;

use mainstay_heartbeat::{LayoutError, MAJOR, MINOR, PAGE_BYTES};
use nix::errno::Errno;

/// Why a page could not be opened. Training continues without heartbeats.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The file could not be opened or read.
    Io {
        /// The page's path.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The file is not a page of this client's layout.
    Layout {
        /// The page's path.
        path: PathBuf,
        /// What is wrong with it.
        source: LayoutError,
    },
    /// The file's bytes are not allocated: on a full tmpfs a store could end in SIGBUS.
    Sparse {
        /// The page's path.
        path: PathBuf,
        /// The bytes that are allocated.
        allocated: u64,
    },
    /// Another living process writes this page.
    Busy {
        /// The page's path.
        path: PathBuf,
        /// That process, if the system names it.
        pid: Option<i32>,
    },
    /// The file could not be mapped.
    Map {
        /// The page's path.
        path: PathBuf,
        /// The error of the system call.
        source: Errno,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, source } => write!(f, "opening heartbeat page {}: {source}", path.display()),
            Self::Layout { path, source: LayoutError::Major { major, minor } } => write!(
                f,
                "heartbeat page {} has layout {major}.{minor}; this client speaks {MAJOR}.{MINOR}: \
                 use client and launcher of one release",
                path.display()
            ),
            Self::Layout { path, source } => write!(f, "heartbeat page {}: {source}", path.display()),
            Self::Sparse { path, allocated } => write!(
                f,
                "heartbeat page {} has only {allocated} of {PAGE_BYTES} bytes allocated; its creator must write \
                 all of them",
                path.display()
            ),
            Self::Busy { path, pid: Some(pid) } => {
                write!(f, "heartbeat page {} is in use by process {pid}", path.display())
            }
            Self::Busy { path, pid: None } => {
                write!(f, "heartbeat page {} is in use by another process", path.display())
            }
            Self::Map { path, source } => {
                write!(f, "mapping heartbeat page {}: {}", path.display(), source.desc())
            }
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Layout { source, .. } => Some(source),
            Self::Map { source, .. } => Some(source),
            Self::Sparse { .. } | Self::Busy { .. } => None,
        }
    }
}
