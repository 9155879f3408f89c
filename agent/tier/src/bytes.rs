//! Where the bytes of a shard are read: in one file, or in files that together are one.

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::files::Pack;
use crate::seal::ReadAt;

/// Bytes of a shard.
#[derive(Debug)]
pub enum Bytes {
    /// A file that begins with it.
    File(File),
    /// Files of somebody else's, read as the archive that they would be.
    Pack(Arc<Pack>),
}

impl From<File> for Bytes {
    fn from(file: File) -> Bytes {
        Bytes::File(file)
    }
}

impl ReadAt for Bytes {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Bytes::File(file) => ReadAt::read_exact_at(file, buffer, offset),
            Bytes::Pack(pack) => pack.content.read_exact_at(buffer, offset),
        }
    }
}
