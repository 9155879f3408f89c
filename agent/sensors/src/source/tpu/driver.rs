//! The logs that libtpu's driver writes next to its stall summaries, read on from the last position.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mainstay_health::hardware::tpu::{DriverReport, read_driver_line};

/// Bytes of one file that are read at one look; the next look reads the rest.
const MAX_BYTES_PER_POLL: u64 = 256 * 1024;

/// Files that are followed: those of a few jobs.
const MAX_FILES: usize = 64;

#[derive(Debug)]
pub(super) struct DriverLogs {
    directory: PathBuf,
    /// The position in each file.
    offsets: BTreeMap<String, u64>,
    /// Lines from before the first look belong to earlier jobs.
    looked: bool,
}

impl DriverLogs {
    pub(super) fn new(directory: PathBuf) -> DriverLogs {
        DriverLogs { directory, offsets: BTreeMap::new(), looked: false }
    }

    /// The relevant lines since the last look.
    pub(super) fn newer(&mut self) -> Vec<DriverReport> {
        let first = !std::mem::replace(&mut self.looked, true);
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return Vec::new() };
        // `tpu_driver.INFO` and similar names are links to the newest file of each severity.
        let mut files: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().map(str::to_owned))
            .filter(|name| name.starts_with("tpu_driver.") && name.contains(".log."))
            .collect();
        files.sort();
        self.offsets.retain(|name, _| files.contains(name));
        let mut reports = Vec::new();
        for file in files.into_iter().rev().take(MAX_FILES) {
            let path = self.directory.join(&file);
            let offset = self.offsets.get(&file).copied();
            let read = if first { length(&path) } else { read_on(&path, offset.unwrap_or(0), &mut reports) };
            // A file that cannot be read now is retried.
            if let Ok(offset) = read {
                self.offsets.insert(file, offset);
            }
        }
        reports
    }
}

/// Any user may have created it: follow no pipes or links, and wait for nothing.
fn open(path: &Path) -> io::Result<std::fs::File> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn length(path: &Path) -> io::Result<u64> {
    Ok(open(path)?.metadata()?.len())
}

/// Reads complete lines from `offset` on, and returns where the next one starts.
fn read_on(path: &Path, offset: u64, reports: &mut Vec<DriverReport>) -> io::Result<u64> {
    let mut file = open(path)?;
    if file.metadata()?.len() <= offset {
        return Ok(offset);
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES_PER_POLL).read_to_end(&mut bytes)?;
    let whole = match memchr::memrchr(b'\n', &bytes) {
        Some(end) => end + 1,
        // A line longer than one read is not from glog.
        None if bytes.len() as u64 == MAX_BYTES_PER_POLL => bytes.len(),
        None => return Ok(offset),
    };
    reports.extend(String::from_utf8_lossy(&bytes[..whole]).lines().filter_map(read_driver_line));
    Ok(offset + whole as u64)
}
