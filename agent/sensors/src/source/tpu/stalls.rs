//! The stall summaries that libtpu writes when it finds that its cores do not move.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mainstay_health::hardware::tpu::Stall;
use mainstay_proto::libtpu::tpu_telemetry::AllCoreStateSummaries;
use prost::Message;

use super::service::core_states;

/// Larger than the summary of any host.
const MAX_SUMMARY_BYTES: u64 = 64 << 20;

/// Summaries reported at one look; a directory full of them is one incident.
const MAX_SUMMARIES_PER_POLL: usize = 8;

/// Files that are older than this when first seen belong to an earlier incident.
const OLDEST: Duration = Duration::from_secs(3600);

/// A file that was written less than this ago may be incomplete.
const SETTLED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Stalls {
    directory: PathBuf,
    seen: BTreeSet<String>,
}

impl Stalls {
    /// Summaries with the names in `reported` are already reported.
    pub(super) fn new(directory: PathBuf, seen_before: BTreeSet<String>) -> Stalls {
        Stalls { directory, seen: seen_before }
    }

    /// New summaries since the last look.
    pub(super) fn newer(&mut self) -> Vec<Stall> {
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return Vec::new() };
        let mut files: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().map(str::to_owned))
            .filter(|name| name.starts_with("tpu_stall_summary_") && name.ends_with(".pb"))
            .filter(|name| !self.seen.contains(name))
            .collect();
        files.sort();
        let mut stalls = Vec::new();
        for file in files {
            let cores = match read(&self.directory.join(&file)) {
                Ok(SummaryFile::Fresh) => continue,
                Ok(SummaryFile::OfAnotherDay) => None,
                Ok(SummaryFile::Summary(bytes)) => Some(
                    AllCoreStateSummaries::decode(bytes.as_slice())
                        .map(|all| core_states(all.core_states))
                        .map_err(|error| error.to_string()),
                ),
                Err(error) => Some(Err(error.to_string())),
            };
            self.seen.insert(file.clone());
            stalls.extend(cores.map(|cores| Stall { file, cores }));
        }
        stalls.truncate(MAX_SUMMARIES_PER_POLL);
        stalls
    }
}

enum SummaryFile {
    /// It may still be written.
    Fresh,
    OfAnotherDay,
    Summary(Vec<u8>),
}

/// Reads a file. Any user may have created it: follows no pipes or links, and waits for nothing.
fn read(path: &Path) -> io::Result<SummaryFile> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    let age = SystemTime::now().duration_since(about.modified()?).unwrap_or_default();
    if !about.is_file() || age > OLDEST {
        return Ok(SummaryFile::OfAnotherDay);
    }
    if age < SETTLED {
        return Ok(SummaryFile::Fresh);
    }
    let mut bytes = Vec::new();
    file.take(MAX_SUMMARY_BYTES).read_to_end(&mut bytes)?;
    Ok(SummaryFile::Summary(bytes))
}
