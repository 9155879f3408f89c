//! Where the bytes of a shard are read: in one file, or in files that together are one.

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::files::Pack;
use crate::os::Outgoing;
use crate::seal::ReadAt;

/// Bytes of a shard.
#[derive(Debug)]
pub enum Bytes {
    /// A file that begins with it, and its memory where that is mapped.
    File(File, Option<Outgoing>),
    /// Files of somebody else's, read as the archive that they would be.
    Pack(Arc<Pack>),
}

impl Bytes {
    /// A file in memory that begins with a shard of so many bytes and is sent again and again, so that it is worth to have it mapped.
    ///
    /// # Errors
    /// The file is shorter, or the kernel refused.
    pub fn in_memory(file: File, bytes: u64) -> io::Result<Bytes> {
        let memory = Outgoing::of(&file, bytes)?;
        Ok(Bytes::File(file, Some(memory)))
    }
}

impl From<File> for Bytes {
    fn from(file: File) -> Bytes {
        Bytes::File(file, None)
    }
}

impl ReadAt for Bytes {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Bytes::File(file, _) => ReadAt::read_exact_at(file, buffer, offset),
            Bytes::Pack(pack) => pack.content.read_exact_at(buffer, offset),
        }
    }
}
