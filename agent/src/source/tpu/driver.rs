//! The logs that libtpu's driver writes beside its stall summaries, read on from where they were left.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mainstay_core::hardware::tpu::{DriverReport, read_driver_line};

/// Read of one file at one look; what is behind it comes at the next.
const AT_ONCE: u64 = 256 * 1024;

/// Files that are followed: those of a few jobs.
const FILES: usize = 64;

#[derive(Debug)]
pub(super) struct DriverLogs {
    directory: PathBuf,
    /// How far each file was read.
    places: BTreeMap<String, u64>,
    /// What was there at the first look is of jobs before.
    looked: bool,
}

impl DriverLogs {
    pub(super) fn new(directory: PathBuf) -> DriverLogs {
        DriverLogs { directory, places: BTreeMap::new(), looked: false }
    }

    /// What came since the last look and matters.
    pub(super) fn newer(&mut self) -> Vec<DriverReport> {
        let first = !std::mem::replace(&mut self.looked, true);
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return Vec::new() };
        // `tpu_driver.INFO` and its like are links to the newest file of each weight.
        let mut files: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().map(str::to_owned))
            .filter(|name| name.starts_with("tpu_driver.") && name.contains(".log."))
            .collect();
        files.sort();
        self.places.retain(|name, _| files.contains(name));
        let mut reports = Vec::new();
        for file in files.into_iter().rev().take(FILES) {
            let path = self.directory.join(&file);
            let place = self.places.get(&file).copied();
            let read = if first { length(&path) } else { read_on(&path, place.unwrap_or(0), &mut reports) };
            // One that cannot be read now is tried again.
            if let Ok(place) = read {
                self.places.insert(file, place);
            }
        }
        reports
    }
}

/// Anybody may have put anything there: pipes and links are not followed, and nothing is waited for.
fn open(path: &Path) -> io::Result<std::fs::File> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn length(path: &Path) -> io::Result<u64> {
    Ok(open(path)?.metadata()?.len())
}

/// Reads whole lines from `place` on, and returns where the next begins.
fn read_on(path: &Path, place: u64, reports: &mut Vec<DriverReport>) -> io::Result<u64> {
    let mut file = open(path)?;
    if file.metadata()?.len() <= place {
        return Ok(place);
    }
    file.seek(SeekFrom::Start(place))?;
    let mut bytes = Vec::new();
    file.take(AT_ONCE).read_to_end(&mut bytes)?;
    let whole = match memchr::memrchr(b'\n', &bytes) {
        Some(end) => end + 1,
        // A line that is longer than all that is read at once is none of glog's.
        None if bytes.len() as u64 == AT_ONCE => bytes.len(),
        None => return Ok(place),
    };
    reports.extend(String::from_utf8_lossy(&bytes[..whole]).lines().filter_map(read_driver_line));
    Ok(place + whole as u64)
}
