//! Writes a received shard into a job's checkpoint directory: it is moved into place when all its bytes have arrived and are verified.
//! If this agent may not write there, the shard goes into a file that the user's process lent and then moves into place.
//!
//! If the directory is on the same tmpfs as this agent's store, the shard is received into pages that are already allocated (`store`'s
//! ready memory), and its file is moved when it is complete: until then no user sees what other shards may have left in those pages.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_checkpoint_format::MANIFEST_NAME;

use super::client::Target;
use super::error::PeerError;
use super::store::{PreparedMemory, Store};
use super::user::{Access, User};
use crate::beneath::Beneath;
use crate::lent_files::{RestoreFiles, RestoredShard};
use crate::os::MappedRange;
use crate::seal::SealedShard;

/// Writes a shard into a checkpoint directory: next to its place, and moves it into that when all bytes are there.
pub struct ShardWriter<'a> {
    directory: &'a Path,
    access: Access,
    /// Has memory with allocated pages.
    store: Option<&'a Store>,
    files: Option<Arc<RestoreFiles>>,
    taken: Option<ShardInProgress<'a>>,
    lent: Option<LentFile>,
}

/// A lent file, and the shard that is written into it.
struct LentFile {
    file: File,
    shard: RestoredShard,
}

struct ShardInProgress<'a> {
    destination: Destination<'a>,
    /// The checkpoint directory.
    at: Beneath,
    /// The temporary directory below it in which the shard is written, by path and opened.
    aside: PathBuf,
    opened: File,
    home: PathBuf,
    file: String,
    manifest: Vec<u8>,
}

/// Storage of the bytes until all have arrived.
enum Destination<'a> {
    /// In a new file in the temporary directory.
    New(File),
    /// In memory of the store whose pages are already allocated.
    Ready(PreparedMemory<'a>),
}

/// Path of a shard relative to its checkpoint directory.
pub(super) fn shard_directory(sealed: &SealedShard) -> PathBuf {
    let step = PathBuf::from(format!("step-{:012}", sealed.shard.key.step));
    step.join(format!("rank-{:05}", sealed.shard.rank))
}

impl<'a> ShardWriter<'a> {
    /// Writes with the rights of this process.
    pub fn new(directory: &'a Path) -> ShardWriter<'a> {
        ShardWriter { directory, access: Access::own(), store: None, files: None, taken: None, lent: None }
    }

    /// Writes with these rights, into memory of this agent's store if that can be moved into the directory.
    pub(super) fn as_user(directory: &'a Path, access: Access, store: &'a Store) -> ShardWriter<'a> {
        let mut writer = ShardWriter::new(directory);
        (writer.access, writer.store) = (access, Some(store));
        writer
    }

    /// Writes into the files of this lot, if there is one.
    pub(super) fn in_files(mut self, lot: Option<Arc<RestoreFiles>>) -> ShardWriter<'a> {
        self.files = lot;
        self
    }

    fn io_error(&self, what: &str, error: &io::Error) -> PeerError {
        PeerError::Local(format!("{what} {}: {error}", self.directory.display()))
    }

    /// Writes the manifest and moves the shard into place. All bytes are verified.
    pub fn finish(mut self) -> Result<(), PeerError> {
        if let (Some(lot), Some(LentFile { file, shard })) = (&self.files, self.lent.take()) {
            let synced = file.sync_data();
            return match synced {
                Ok(()) => {
                    lot.record_written(shard);
                    Ok(())
                }
                Err(error) => {
                    lot.give_back(shard.file, file);
                    Err(self.io_error("writing a shard for", &error))
                }
            };
        }
        let Some(taken) = self.taken.take() else {
            return Err(PeerError::Local("nothing came".to_owned()));
        };
        let (at, aside, home) = (taken.at.clone(), taken.aside.clone(), taken.home.clone());
        let put = || -> io::Result<()> {
            let manifest = taken.fill_directory(self.access.user())?;
            let _as_user = self.access.act()?;
            settle(&at, &aside, &home, &manifest)
        };
        put().map_err(|error| {
            remove(&at, &aside, &self.access);
            self.io_error("writing a shard into", &error)
        })
    }

    fn begin_in_file(&self, lot: &RestoreFiles, sealed: &SealedShard) -> io::Result<LentFile> {
        let (number, file) = lot.take().ok_or_else(|| io::Error::other("no lent file is left"))?;
        if let Err(error) = file.set_len(0).and_then(|()| make_room(&file, sealed.shard.bytes)) {
            lot.give_back(number, file);
            return Err(error);
        }
        let written = sealed.clone().as_written().map_err(|error| io::Error::other(error.to_string()))?;
        let (home, name) = (shard_directory(sealed), sealed.file.clone());
        Ok(LentFile { file, shard: RestoredShard { file: number, home, name, manifest: written.manifest } })
    }

    fn begin_as_user(&self, sealed: &SealedShard) -> io::Result<(Beneath, PathBuf, PathBuf, File)> {
        let as_user = self.access.act_to_write()?;
        fs::create_dir_all(self.directory)?;
        let at = as_user.open(self.directory)?;
        let home = shard_directory(sealed);
        let step = home.parent().unwrap_or(Path::new(""));
        at.make_directories(step)?;
        // This name is one that the client cleans up if this process dies.
        let aside = step.join(crate::aside::name(&format!("rank-{:05}", sealed.shard.rank)));
        at.make_directory(&aside)?;
        let opened = File::from(at.readable(&aside)?);
        Ok((at, home, aside, opened))
    }
}

impl ShardInProgress<'_> {
    /// Moves the file into its directory if it was not created there; returns the manifest.
    fn fill_directory(self, user: User) -> io::Result<Vec<u8>> {
        match self.destination {
            Destination::New(file) => file.sync_data()?,
            Destination::Ready(ready) => {
                if user != User::own() {
                    std::os::unix::fs::fchown(&ready.file, Some(user.uid), Some(user.gid))?;
                }
                ready.file.set_permissions(fs::Permissions::from_mode(0o644))?;
                ready.give(&self.opened, &self.file)?;
            }
        }
        Ok(self.manifest)
    }
}

impl Drop for ShardWriter<'_> {
    fn drop(&mut self) {
        // Another copy of the shard may be written into the same file.
        if let (Some(lot), Some(LentFile { file, shard })) = (&self.files, self.lent.take()) {
            lot.give_back(shard.file, file);
        }
        if let Some(taken) = self.taken.take() {
            remove(&taken.at, &taken.aside, &self.access);
        }
    }
}

impl Target for ShardWriter<'_> {
    fn begin(&mut self, sealed: &SealedShard) -> Result<(), PeerError> {
        if let Some(lot) = &self.files {
            let started = self.begin_in_file(lot, sealed);
            self.lent = Some(started.map_err(|error| self.io_error("making room for a shard of", &error))?);
            return Ok(());
        }
        let begin = || -> io::Result<ShardInProgress<'_>> {
            let (at, home, aside, opened) = self.begin_as_user(sealed)?;
            let bytes = sealed.shard.bytes;
            // With its own rights, this agent puts a file only where the user may put one.
            let is_theirs = opened.metadata()?.uid() == self.access.user().uid;
            let ready = self.store.filter(|_| is_theirs).and_then(|store| store.lend(bytes, &opened));
            let destination = match ready {
                Some(ready) => Destination::Ready(ready),
                None => {
                    let _as_user = self.access.act()?;
                    let file = at.create(&aside.join(&sealed.file), 0o644)?;
                    make_room(&file, bytes)?;
                    Destination::New(file)
                }
            };
            // The user sees the run under the name that the user gave.
            let written = sealed.clone().as_written().map_err(|error| io::Error::other(error.to_string()))?;
            let (file, manifest) = (sealed.file.clone(), written.manifest);
            Ok(ShardInProgress { destination, at, aside, opened, home, file, manifest })
        };
        self.taken = Some(begin().map_err(|error| self.io_error("making room for a shard in", &error))?);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerError> {
        let file = match (&self.lent, &self.taken) {
            (Some(lent), _) => &lent.file,
            (None, Some(ShardInProgress { destination: Destination::New(file), .. })) => file,
            (None, Some(ShardInProgress { destination: Destination::Ready(ready), .. })) => &ready.file,
            (None, None) => return Ok(()),
        };
        file.write_all_at(bytes, offset).map_err(|error| self.io_error("writing a shard into", &error))
    }

    fn memory(&self, offset: u64, length: u32) -> Option<MappedRange<'_>> {
        match &self.taken.as_ref()?.destination {
            Destination::New(_) => None,
            Destination::Ready(ready) => ready.memory(offset, length),
        }
    }
}

/// Writes the manifest into a shard's temporary directory and moves the directory into place.
fn settle(at: &Beneath, aside: &Path, home: &Path, manifest: &[u8]) -> io::Result<()> {
    write_manifest(at, aside, manifest)?;
    if at.is_there(home) {
        // The existing directory has another shard of this step, or a damaged one.
        at.exchange(aside, home)?;
        at.remove_tree(aside)?;
    } else {
        at.rename(aside, home)?;
    }
    at.sync_directory(home.parent().unwrap_or(Path::new("")))?;
    at.sync_directory(Path::new(""))
}

/// Moves a shard that an agent wrote into a lent file into place, with the rights of this process. `file` is the path relative to
/// `directory`.
///
/// # Errors
/// The agent names a place that no shard has, the bytes do not match the manifest, or an I/O error.
pub fn settle_lent(directory: &Path, file: &Path, shard: &RestoredShard) -> io::Result<()> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "the agent names a place that no shard has");
    let sealed =
        SealedShard::of(shard.manifest.clone()).map_err(|error| io::Error::other(error.to_string()))?;
    if shard_directory(&sealed) != shard.home || sealed.file != shard.name || shard.name.contains('/') {
        return Err(wrong());
    }
    let at = Beneath::open(directory)?;
    // Bytes that may replace another shard are verified first, regardless of who wrote them.
    let written = at.read(file)?;
    if written.metadata()?.len() != sealed.shard.bytes || sealed.first_bad(&written)?.is_some() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "what was written is not what was sealed"));
    }
    let step = shard.home.parent().ok_or_else(wrong)?;
    at.make_directories(step)?;
    let aside = step.join(crate::aside::name(&format!("rank-{:05}", sealed.shard.rank)));
    at.make_directory(&aside)?;
    let put = || {
        at.rename(file, &aside.join(&shard.name))?;
        settle(&at, &aside, &shard.home, &shard.manifest)
    };
    put().inspect_err(|_| _ = at.remove_tree(&aside))
}

fn write_manifest(at: &Beneath, aside: &Path, manifest: &[u8]) -> io::Result<()> {
    let mut file = at.create(&aside.join(MANIFEST_NAME), 0o644)?;
    file.write_all(manifest)?;
    file.sync_all()?;
    at.sync_directory(aside)
}

fn remove(at: &Beneath, aside: &Path, access: &Access) {
    if let Ok(_as_user) = access.act() {
        let _ = at.remove_tree(aside);
    }
}

/// Ensures that there is room for a file before it is written, so that no shard fails halfway.
fn make_room(file: &File, bytes: u64) -> io::Result<()> {
    const TMPFS: i64 = 0x0102_1994;
    let found = rustix::fs::fstatfs(file)?;
    if found.f_type == TMPFS {
        // Preallocated tmpfs pages are zeroed first, which takes as long as receiving the bytes.
        let free = found.f_bavail.saturating_mul(found.f_bsize.unsigned_abs());
        return if free < bytes { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
    }
    if bytes > 0 {
        rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
    }
    Ok(())
}
