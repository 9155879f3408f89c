//! A shard that is open for reading, wherever it is stored.

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::files::Pack;
use crate::os::SendMapping;
use crate::peer::pooled::PooledShard;
use crate::seal::{Bytes, SealedShard};

/// A shard that is open for reading.
#[derive(Debug)]
pub struct OpenShard {
    /// Its manifest.
    pub sealed: Arc<SealedShard>,
    /// Its bytes: they start with the shard.
    pub bytes: Arc<Bytes>,
    /// Its slot in a launcher's memory, which may be used for another step at any time.
    pub(super) pooled: Option<PooledShard>,
}

impl OpenShard {
    /// From a file that has only the shard.
    pub(crate) fn of_file((sealed, file): (Arc<SealedShard>, File)) -> OpenShard {
        OpenShard { sealed, bytes: Arc::new(file.into()), pooled: None }
    }

    /// From a replica in the store.
    pub(crate) fn of_replica(
        (sealed, file, memory): (Arc<SealedShard>, File, Option<SendMapping>),
    ) -> OpenShard {
        OpenShard { sealed, bytes: Arc::new(Bytes::File(file, memory)), pooled: None }
    }

    /// From files in their trainer's directory.
    pub(super) fn of_pack(pack: &Arc<Pack>) -> OpenShard {
        let bytes = Arc::new(Bytes::Pack(Arc::clone(pack)));
        OpenShard { sealed: Arc::clone(&pack.sealed), bytes, pooled: None }
    }

    /// Whether it is in files of a trainer: it need not be fetched to this host.
    pub(crate) fn is_pack(&self) -> bool {
        matches!(*self.bytes, Bytes::Pack(_))
    }

    /// Whether the file still has the shard: then differing bytes are damaged.
    pub fn is_still(&self) -> bool {
        match &*self.bytes {
            Bytes::Pack(pack) => pack.content.is_still(),
            Bytes::File(..) => self.pooled.as_ref().is_none_or(PooledShard::is_still),
        }
    }

    /// Asks the pool owner to keep it in its slot for the next seconds.
    pub fn pin(&self) {
        self.pooled.iter().for_each(PooledShard::pin);
    }

    /// Whether the file is long enough.
    pub(crate) fn fits(&self) -> bool {
        let bytes = self.sealed.shard.bytes;
        match &*self.bytes {
            Bytes::Pack(pack) => pack.content.is_still(),
            Bytes::File(file, _) => file.metadata().is_ok_and(|found| match self.pooled {
                Some(_) => found.len() >= bytes,
                None => found.len() == bytes,
            }),
        }
    }

    /// The first chunk that differs from the seal.
    pub(crate) fn first_bad(&self) -> io::Result<Option<u32>> {
        match (&*self.bytes, &self.pooled) {
            (Bytes::File(file, _), None) => self.sealed.first_bad(file),
            (bytes, _) => self.sealed.first_bad_from_start(bytes),
        }
    }
}
