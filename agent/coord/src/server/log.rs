//! The log of the built-in store: one file with a snapshot and the later changes, in frames with a checksum.
//!
//! A frame is its length (4 bytes, little-endian), the xxh3 of its payload (8 bytes), and the payload: records as
//! protobuf. Acknowledged frames are on disk. An incomplete tail was not acknowledged, and is cut.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use prost::Message;

use super::store::{Limits, Store};
use crate::error::CoordError;
use crate::etcd::log::Record;

/// The first bytes of the file: its type and version.
pub const MAGIC: &[u8; 8] = b"MSTCORD1";
/// The name of the log in its directory.
pub const FILE: &str = "coordination.log";
const NEW: &str = "coordination.log.new";
const HEADER_BYTES: usize = 12;
/// The largest record, in bytes. The snapshot of a full store is below it.
const MAX_RECORD_BYTES: usize = 1 << 30;
/// A log is rewritten from a snapshot when it is larger than this (bytes) and than four times the last snapshot.
const MIN_REWRITE_BYTES: u64 = 8 << 20;
/// The time limit for a lock that a process still holds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Records that were read, and the number of bytes that they took.
#[derive(Debug, Default)]
pub struct Parsed {
    /// The records of all complete frames, in order.
    pub records: Vec<Record>,
    /// Bytes up to the end of the last complete frame.
    pub whole: usize,
}

/// Reads frames up to the first incomplete one. Accepts any bytes.
#[must_use]
pub fn parse(bytes: &[u8]) -> Parsed {
    let mut parsed = Parsed::default();
    let Some(mut rest) = bytes.strip_prefix(MAGIC.as_slice()) else { return parsed };
    parsed.whole = MAGIC.len();
    while let Some((record, length)) = frame(rest) {
        parsed.records.push(record);
        parsed.whole += length;
        rest = &rest[length..];
    }
    parsed
}

fn frame(bytes: &[u8]) -> Option<(Record, usize)> {
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let length = u32::from_le_bytes(header[..4].try_into().ok()?) as usize;
    let checksum = u64::from_le_bytes(header[4..].try_into().ok()?);
    if length > MAX_RECORD_BYTES {
        return None;
    }
    let payload = rest.get(..length)?;
    if checksum_of(payload) != checksum {
        return None;
    }
    Some((Record::decode(payload).ok()?, HEADER_BYTES + length))
}

/// Encodes one record as a frame.
#[must_use]
pub fn encode(record: &Record) -> Vec<u8> {
    let payload = record.encode_to_vec();
    let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len());
    // The limits keep every record below it; a longer one would be read as torn.
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&checksum_of(&payload).to_le_bytes());
    frame.extend_from_slice(&payload);
    frame
}

/// The hash has a seed: the frame of an empty payload must not be twelve zeros, which a file system may leave behind.
fn checksum_of(payload: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot_with_seed(0x006d_7374_636f_7264, payload)
}

/// The log of one store, open for appending.
#[derive(Debug)]
pub struct Log {
    directory: PathBuf,
    /// Holds the lock: two stores on one directory would overwrite each other's log.
    _lock: File,
    file: File,
    length: u64,
    /// The length after the last snapshot.
    snapshot: u64,
}

impl Log {
    /// Opens the log of a directory and restores its store; a new store if there is none. Blocks.
    ///
    /// # Errors
    /// The directory cannot be used, another process uses it, or this version cannot read the log.
    pub fn open(
        directory: &Path,
        cluster: u64,
        limits: Limits,
        now: u64,
    ) -> Result<(Log, Store), CoordError> {
        fs::create_dir_all(directory).map_err(|error| CoordError::file(directory, error))?;
        let lock = lock(directory)?;
        let path = directory.join(FILE);
        // An unfinished snapshot; the log that it should have replaced is still there.
        let _ = fs::remove_file(directory.join(NEW));
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(CoordError::file(&path, error)),
        };
        let parsed = parse(&bytes);
        if parsed.whole == 0 && bytes.len() >= MAGIC.len() {
            return Err(CoordError::file(&path, "it is not a log of a coordination store; move it away"));
        }
        let mut records = parsed.records.into_iter();
        let Some(first) = records.next() else {
            // Nothing was ever acknowledged.
            let store = Store::new(cluster, limits);
            let log = Log::create(directory, lock, &store)?;
            return Ok((log, store));
        };
        let unfit = |error: super::store::Unfit| CoordError::file(&path, format!("{error}; move it away"));
        let mut store = Store::restore(first, limits, now).map_err(unfit)?;
        for record in records {
            store.replay(record, now).map_err(unfit)?;
        }
        let torn = bytes.len() - parsed.whole;
        if torn > 0 {
            tracing::warn!(path = %path.display(), bytes = torn, "the end of the coordination log was not written whole; it is cut");
        }
        // Start from a snapshot: it is quicker to read next time, and has no torn end.
        let log = Log::create(directory, lock, &store)?;
        Ok((log, store))
    }

    fn create(directory: &Path, lock: File, store: &Store) -> Result<Log, CoordError> {
        let path = directory.join(FILE);
        let (file, length) =
            write_snapshot(directory, store).map_err(|error| CoordError::file(&path, error))?;
        Ok(Log { directory: directory.to_owned(), _lock: lock, file, length, snapshot: length })
    }

    /// Appends records, and returns when they are on disk.
    ///
    /// # Errors
    /// The records may be missing: the log must be rewritten ([`Log::rewrite`]) before anything is acknowledged.
    pub fn append(&mut self, records: &[Record]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let frames: Vec<u8> = records.iter().flat_map(encode).collect();
        self.file.write_all(&frames)?;
        self.file.sync_data()?;
        self.length += frames.len() as u64;
        Ok(())
    }

    /// Whether most of the log is history that a snapshot would omit.
    #[must_use]
    pub fn is_grown(&self) -> bool {
        self.length > MIN_REWRITE_BYTES && self.length > self.snapshot.saturating_mul(4)
    }

    /// Replaces the log with a snapshot.
    ///
    /// # Errors
    /// The old log is still there, and may be torn.
    pub fn rewrite(&mut self, store: &Store) -> io::Result<()> {
        let (file, length) = write_snapshot(&self.directory, store)?;
        (self.file, self.length, self.snapshot) = (file, length, length);
        Ok(())
    }
}

/// Writes a log with one snapshot next to the old log, then replaces it.
fn write_snapshot(directory: &Path, store: &Store) -> io::Result<(File, u64)> {
    let new = directory.join(NEW);
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).read(true).open(&new)?;
    file.write_all(MAGIC)?;
    file.write_all(&encode(&store.snapshot()))?;
    file.sync_all()?;
    let length = file.seek(SeekFrom::End(0))?;
    fs::rename(&new, directory.join(FILE))?;
    File::open(directory)?.sync_all()?;
    Ok((file, length))
}

fn lock(directory: &Path) -> Result<File, CoordError> {
    let path = directory.join("lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|error| CoordError::file(&path, error))?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            // A child process keeps this program's open files between fork and exec.
            Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_TIMEOUT / 50);
            }
            Err(fs::TryLockError::WouldBlock) => {
                let why = "another coordination store uses this directory; stop it or choose another one";
                return Err(CoordError::file(&path, why));
            }
            Err(fs::TryLockError::Error(error)) => return Err(CoordError::file(&path, error)),
        }
    }
}

/// Random bits for values that must be unique.
pub(crate) fn random() -> Result<u64, CoordError> {
    let mut bytes = [0; 8];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| CoordError::io("/dev/urandom", error))?;
    // 0 means that there is none.
    Ok(u64::from_le_bytes(bytes).max(1))
}
