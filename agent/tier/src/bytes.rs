//! Source of a shard's bytes: one file, or several files that are read as one archive.

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::files::Pack;
use crate::os::Outgoing;
use crate::seal::ReadAt;

/// Bytes of a shard.
#[derive(Debug)]
pub enum Bytes {
    /// A file that starts with the shard, and its memory if it is mapped.
    File(File, Option<Outgoing>),
    /// Files of a trainer, read as one archive.
    Pack(Arc<Pack>),
}

impl Bytes {
    /// A file in memory that starts with a shard of `bytes` bytes. It is mapped because it is sent many times.
    ///
    /// # Errors
    /// The file is shorter, or the kernel refuses the mapping.
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
