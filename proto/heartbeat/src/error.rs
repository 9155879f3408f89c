//! Why some bytes are not a page that this version can use.

use std::fmt;

use crate::layout::{MAJOR, PAGE_BYTES};

/// Why some bytes are not a page that this version can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// Fewer bytes than a page has.
    TooShort {
        /// The bytes there are.
        length: usize,
        /// The bytes there should be.
        needed: usize,
    },
    /// The mapping does not start at a multiple of eight.
    Misaligned,
    /// The first eight bytes are not `MAINSTAY`.
    Magic {
        /// The bytes found, as a little-endian word.
        found: u64,
    },
    /// A page of another major version.
    Major {
        /// The page's major version.
        major: u64,
        /// The page's minor version.
        minor: u64,
    },
    /// A page of this major version that claims to have another size.
    PageBytes {
        /// The size it claims.
        found: u64,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { length, needed } => {
                write!(f, "heartbeat page has {length} bytes; a whole one has {needed}")
            }
            Self::Misaligned => write!(f, "heartbeat page is not mapped at a multiple of 8 bytes"),
            Self::Magic { found } => {
                write!(f, "not a heartbeat page: it begins with {found:#018x}, not with the text MAINSTAY")
            }
            Self::Major { major, minor } => {
                write!(f, "heartbeat page has layout {major}.{minor}; this side speaks layout {MAJOR}")
            }
            Self::PageBytes { found } => {
                write!(f, "heartbeat page says it has {found} bytes; layout {MAJOR} has {PAGE_BYTES}")
            }
        }
    }
}

impl std::error::Error for LayoutError {}
