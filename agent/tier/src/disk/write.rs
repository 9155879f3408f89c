//! Writes one shard: data first, then its manifest, each synced to disk before the next step. The manifest's name appears last and
//! atomically. A previous shard stays until then.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::{CHUNK_BYTES, MANIFEST_NAME, Manifest, chunk_sum};

use crate::aside;
use crate::disk::volume::Volume;
use crate::disk::{shard_directory, step_directory, steps, stored_shard};
use crate::lock;
use crate::seal::ReadAt;

/// Maximum number of bytes that wait for the disk: more would evict pages that training reads, and cause one long stall.
const MAX_UNSYNCED_BYTES: u64 = 64 << 20;

/// Why a shard was not written. A previous shard stays.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum WriteError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("its bytes changed between sealing and writing (chunk {chunk})")]
    Changed { chunk: usize },
    /// A newer shard is waiting to be written.
    #[error("it was abandoned")]
    GivenUp,
}

impl WriteError {
    /// Whether the disk is full.
    pub fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, WriteError::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }
}

/// Rate limit for writing, over all shards.
#[derive(Debug, Default)]
pub struct Pace {
    bytes_per_second: Option<u64>,
    state: Mutex<Paced>,
    hurried: Condvar,
}

#[derive(Debug, Default)]
struct Paced {
    /// Time at which the next bytes may be written.
    next: Option<Instant>,
    hurry: bool,
}

impl Pace {
    /// Maximum number of bytes per second; none: as fast as the disk.
    pub fn new(bytes_per_second: Option<u64>) -> Pace {
        Pace { bytes_per_second: bytes_per_second.filter(|rate| *rate > 0), ..Pace::default() }
    }

    /// Removes the limit, also for threads that wait: there is no training left to protect.
    pub fn hurry(&self) {
        lock(&self.state).hurry = true;
        self.hurried.notify_all();
    }

    /// Waits until `bytes` bytes may be written.
    pub fn wait(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        let now = Instant::now();
        let mut state = lock(&self.state);
        let from = state.next.map_or(now, |next| next.max(now));
        state.next = Some(from + Duration::from_secs_f64(bytes as f64 / rate as f64));
        let wait = from.saturating_duration_since(now);
        drop(self.hurried.wait_timeout_while(state, wait, |state| !state.hurry));
    }
}

/// Writes a shard with its manifest and verifies each chunk on the way. Does nothing if the shard is already stored. Stops when
/// `given_up` returns true.
///
/// # Errors
/// [`WriteError`]. A later write removes what an attempt left behind.
pub fn write(
    volume: &dyn Volume,
    directory: &Path,
    manifest: &Manifest,
    source: &dyn ReadAt,
    pace: &Pace,
    given_up: &dyn Fn() -> bool,
) -> Result<(), WriteError> {
    let identity = &manifest.identity;
    if let Some(there) = stored_shard(volume, directory, identity.step, identity.rank)
        && there.manifest.root().is_some()
        && there.manifest.root() == manifest.root()
    {
        return Ok(());
    }
    let home = step_directory(directory, identity.step);
    make_directories(volume, &home)?;
    let shard = shard_directory(directory, identity.step, identity.rank);
    let job = Job { volume, manifest, source, pace, given_up };
    if volume.is_directory(&shard) { job.write_again(&shard) } else { job.write_new(&home, &shard) }
}

struct Job<'a> {
    volume: &'a dyn Volume,
    manifest: &'a Manifest,
    source: &'a dyn ReadAt,
    pace: &'a Pace,
    given_up: &'a dyn Fn() -> bool,
}

impl Job<'_> {
    /// Writes a new shard: in a temporary directory, which is then renamed.
    fn write_new(&self, home: &Path, shard: &Path) -> Result<(), WriteError> {
        let name = shard.file_name().unwrap_or_default().to_string_lossy();
        let aside = home.join(aside::name(&name));
        let done = (|| {
            self.volume.make_directory(&aside).map_err(write_error(&aside))?;
            self.data(&aside.join(&self.manifest.file.name))?;
            self.small(&aside.join(MANIFEST_NAME), &self.manifest.encode())?;
            self.volume.sync_directory(&aside).map_err(write_error(&aside))?;
            self.volume.rename(&aside, shard).map_err(write_error(shard))?;
            self.volume.sync_directory(home).map_err(write_error(home))
        })();
        if done.is_err() {
            remove_tree(self.volume, &aside);
            let _ = self.volume.remove_directory(home);
        }
        done
    }

    /// Replaces the shard of the same step: the new state next to the old one, then the manifest over the old manifest.
    fn write_again(&self, shard: &Path) -> Result<(), WriteError> {
        let there = self.volume.list(shard).map_err(write_error(shard))?;
        let names = (0_u32..).map(|turn| match turn {
            0 => self.manifest.file.name.clone(),
            _ => format!("state.{turn}.safetensors"),
        });
        let name = names.into_iter().find(|name| !there.contains(name)).unwrap_or_default();
        let mut manifest = self.manifest.clone();
        manifest.file.name.clone_from(&name);
        let state = shard.join(&name);
        let aside = shard.join(aside::name(MANIFEST_NAME));
        let done = (|| {
            self.data(&state)?;
            self.small(&aside, &manifest.encode())?;
            // The state's name must be on disk before the manifest that names it.
            self.volume.sync_directory(shard).map_err(write_error(shard))?;
            let over = shard.join(MANIFEST_NAME);
            self.volume.rename(&aside, &over).map_err(write_error(&over))
        })();
        if let Err(error) = done {
            remove_tree(self.volume, &state);
            remove_tree(self.volume, &aside);
            return Err(error);
        }
        self.volume.sync_directory(shard).map_err(write_error(shard))?;
        for old in there.iter().filter(|old| **old != name && *old != MANIFEST_NAME) {
            remove_tree(self.volume, &shard.join(old));
        }
        Ok(())
    }

    fn data(&self, path: &Path) -> Result<(), WriteError> {
        let size = self.manifest.file.size;
        let chunks = self.manifest.chunks.as_ref();
        let chunk = chunks.map_or(CHUNK_BYTES, |chunks| chunks.bytes);
        let mut sink = self.volume.create(path).map_err(write_error(path))?;
        let mut buffer = Vec::new();
        let (mut at, mut waiting) = (0, 0);
        for index in 0_usize.. {
            let length = chunk.min(size - at);
            if length == 0 {
                break;
            }
            if (self.given_up)() {
                return Err(WriteError::GivenUp);
            }
            self.pace.wait(length);
            buffer.resize(usize::try_from(length).unwrap_or(0), 0);
            self.source.read_exact_at(&mut buffer, at).map_err(write_error(path))?;
            // Verify the bytes that are written, not those at their source.
            if chunks.is_some_and(|chunks| chunks.sums.get(index) != Some(&chunk_sum(&buffer))) {
                return Err(WriteError::Changed { chunk: index });
            }
            sink.write(&buffer).map_err(write_error(path))?;
            at += length;
            waiting += length;
            if waiting >= MAX_UNSYNCED_BYTES {
                sink.sync().map_err(write_error(path))?;
                waiting = 0;
            }
        }
        sink.sync().map_err(write_error(path))?;
        sink.forget();
        Ok(())
    }

    fn small(&self, path: &Path, content: &[u8]) -> Result<(), WriteError> {
        let mut sink = self.volume.create(path).map_err(write_error(path))?;
        sink.write(content).and_then(|()| sink.sync()).map_err(write_error(path))
    }
}

fn write_error(path: &Path) -> impl Fn(io::Error) -> WriteError + '_ {
    move |source| WriteError::Io { path: path.to_owned(), source }
}

/// Creates a directory and its missing parents, and syncs each name to disk.
fn make_directories(volume: &dyn Volume, path: &Path) -> Result<(), WriteError> {
    if volume.is_directory(path) {
        return Ok(());
    }
    let Some(parent) = path.parent() else { return Ok(()) };
    make_directories(volume, parent)?;
    match volume.make_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && volume.is_directory(path) => {}
        made => made.map_err(write_error(path))?,
    }
    volume.sync_directory(parent).map_err(write_error(parent))
}

/// Removes a file, or a directory with its content. What cannot be removed stays for the next call.
pub(crate) fn remove_tree(volume: &dyn Volume, path: &Path) {
    if volume.is_directory(path) {
        for name in volume.list(path).unwrap_or_default() {
            remove_tree(volume, &path.join(name));
        }
        let _ = volume.remove_directory(path);
    } else {
        let _ = volume.remove_file(path);
    }
}

/// Removes unfinished shards and removals of processes that are gone. `lives` returns whether a process is alive.
pub fn clear_aside(volume: &dyn Volume, directory: &Path, lives: &dyn Fn(u32) -> bool) {
    let is_ours =
        |what: &str| what.starts_with("rank-") || what.starts_with("step-") || what == MANIFEST_NAME;
    let clear = |directory: &Path| {
        for name in volume.list(directory).unwrap_or_default() {
            if aside::is_left(&name, is_ours, lives) {
                remove_tree(volume, &directory.join(name));
            }
        }
    };
    clear(directory);
    for step in steps(volume, directory) {
        clear(&step_directory(directory, step));
    }
}
