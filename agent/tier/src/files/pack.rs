//! Files of a checkpoint as one sequence of bytes, read in place: nothing is copied on this host.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use mainstay_checkpoint::archive::{self, Entry, Layout, Piece};
use mainstay_checkpoint::inventory::Medium;
use mainstay_checkpoint_format::{CHUNK_BYTES, Chunks, Identity, Manifest, SealedFile};

use rustix::fs::FileType;

use super::FilesError;
use super::tree::{FileVersion, Member};
use crate::beneath::medium_at;
use crate::lock;
use crate::peer::user::Access;
use crate::seal::SealedShard;
use crate::seal::{ReadAt, sums};

/// File name of the archive.
pub const ARCHIVE_NAME: &str = "files.tar";

/// Name of the format in a manifest.
pub const SERIALISATION: &str = "files";

/// Maximum number of files kept open for reading.
const MAX_OPEN_FILES: usize = 32;

/// Files, read as one archive.
#[derive(Debug)]
pub struct Content {
    base: PathBuf,
    access: Access,
    members: Vec<Member>,
    layout: Layout,
    open: Mutex<BTreeMap<usize, Arc<File>>>,
}

impl Content {
    /// Creates the content from files below `base`, which are read with these rights.
    pub fn new(base: &Path, access: Access, members: Vec<Member>) -> Result<Content, FilesError> {
        let entry =
            |member: &Member| Entry { path: member.path.clone(), size: member.size(), mode: member.mode };
        let layout = archive::layout(&members.iter().map(entry).collect::<Vec<_>>())?;
        Ok(Content { base: base.to_owned(), access, members, layout, open: Mutex::default() })
    }

    /// Its files.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Their directory.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// Size of the archive in bytes.
    pub fn size(&self) -> u64 {
        self.layout.size
    }

    /// Whether every file is unchanged.
    pub fn is_still(&self) -> bool {
        let Ok(as_user) = self.access.act() else { return false };
        let Ok(base) = as_user.open(&self.base) else { return false };
        let files = self.members.iter().filter(|member| member.content.is_none());
        files.into_iter().all(|member| {
            base.stat(Path::new(&member.path)).is_ok_and(|found| {
                FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
                    && FileVersion::from_stat(&found) == member.mark
            })
        })
    }

    /// Reads all files and creates the manifest. Files that change meanwhile are not a checkpoint.
    pub fn seal(&self, identity: &Identity, run: &str, now_unix_s: u64) -> Result<Manifest, FilesError> {
        let (whole, parts) =
            sums(self, self.layout.size, CHUNK_BYTES).map_err(FilesError::reading(&self.base))?;
        if !self.is_still() {
            return Err(FilesError::Changed(self.base.clone()));
        }
        Ok(Manifest {
            identity: identity.clone(),
            run: run.to_owned(),
            created_unix_s: now_unix_s,
            serialisation: SERIALISATION.to_owned(),
            software: BTreeMap::new(),
            file: SealedFile { name: ARCHIVE_NAME.to_owned(), size: self.layout.size, xxh3_128: whole },
            chunks: Some(Chunks { bytes: CHUNK_BYTES, sums: parts }),
            shared_content: None,
        })
    }

    fn read_member(&self, index: usize, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let member = self.members.get(index).ok_or(io::ErrorKind::UnexpectedEof)?;
        if let Some(text) = &member.content {
            return text.as_bytes().to_vec().read_exact_at(buffer, offset);
        }
        self.opened(index, member)?.read_exact_at(buffer, offset)
    }

    fn opened(&self, index: usize, member: &Member) -> io::Result<Arc<File>> {
        let mut open = lock(&self.open);
        if let Some(file) = open.get(&index) {
            return Ok(Arc::clone(file));
        }
        let as_user = self.access.act()?;
        let file = Arc::new(as_user.open(&self.base)?.read(Path::new(&member.path))?);
        if FileVersion::of(&file.metadata()?) != member.mark {
            let path = self.base.join(&member.path);
            return Err(io::Error::other(format!("{} has changed since it was sealed", path.display())));
        }
        if open.len() >= MAX_OPEN_FILES {
            open.clear();
        }
        open.insert(index, Arc::clone(&file));
        Ok(file)
    }
}

impl ReadAt for Content {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut at, mut left) = (offset, buffer);
        let pieces = &self.layout.pieces;
        let mut index = pieces.partition_point(|(begin, _)| *begin <= at).saturating_sub(1);
        while !left.is_empty() {
            let (begin, piece) = pieces.get(index).ok_or(io::ErrorKind::UnexpectedEof)?;
            let end = pieces.get(index + 1).map_or(self.layout.size, |(next, _)| *next);
            let count = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX).min(left.len());
            let (now, later) = left.split_at_mut(count);
            match piece {
                Piece::Bytes(bytes) => {
                    let from = usize::try_from(at - begin).unwrap_or(usize::MAX);
                    now.copy_from_slice(bytes.get(from..from + count).ok_or(io::ErrorKind::UnexpectedEof)?);
                }
                Piece::Content(index) => self.read_member(*index, now, at - begin)?,
            }
            (at, left, index) = (at + count as u64, later, index + 1);
        }
        Ok(())
    }
}

/// Files that were sealed.
#[derive(Debug)]
pub struct Pack {
    /// What was sealed.
    pub sealed: Arc<SealedShard>,
    /// The files.
    pub content: Content,
    /// The medium of the files.
    pub medium: Medium,
    /// Whether other hosts see the same files: then no replicas of them are kept.
    pub is_shared: bool,
}

impl Pack {
    /// Joins files and their manifest.
    ///
    /// # Errors
    /// The manifest is not one of such files.
    pub fn new(content: Content, manifest: Vec<u8>, is_shared: bool) -> Result<Pack, FilesError> {
        let sealed = SealedShard::of(manifest).map_err(|error| FilesError::Manifest(error.to_string()))?;
        if sealed.shard.bytes != content.size() {
            return Err(FilesError::Manifest("it is of other files".to_owned()));
        }
        let base = content.access.act().and_then(|as_user| as_user.open(content.base()));
        let medium = base.map_or(Medium::Disk, |at| medium_at(&at));
        Ok(Pack { sealed: Arc::new(sealed), content, medium, is_shared })
    }
}
