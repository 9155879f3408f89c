//! What was learned about jobs, one small file for each, next to the run directories: `.learned/KEY.json`.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mainstay_progress::memory::{JobMemory, MAX_FILE_BYTES};

/// Their directory, next to the run directories, whose names do not start with a dot.
pub const DIRECTORY: &str = ".learned";

/// Number of files that are kept, two for each job: those of the jobs that ran last.
const MAX_FILES: usize = 128;

/// The file of one job.
#[derive(Clone, Debug)]
pub struct Memory {
    directory: PathBuf,
    file: PathBuf,
}

impl Memory {
    /// The file for the job with this key, for runs that keep their logs in `log_dir`.
    pub fn open(log_dir: &Path, key: &str) -> Memory {
        let directory = log_dir.join(DIRECTORY);
        Memory { file: directory.join(format!("{key}.json")), directory }
    }

    /// What earlier runs learned; none if there were none, or if it cannot be read.
    pub fn read(&self) -> Option<JobMemory> {
        let mut text = Vec::new();
        File::open(&self.file).ok()?.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut text).ok()?;
        let learned = JobMemory::parse(&text);
        if learned.is_none() {
            tracing::warn!(file = %self.file.display(), "the learned values of this job cannot be used and are skipped");
        }
        learned
    }

    /// Stores what this run learned, replacing the previous content.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, learned: JobMemory) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        let aside = self.directory.join(mainstay_tier::aside::name("learned"));
        fs::write(&aside, learned.written())?;
        fs::rename(&aside, &self.file)?;
        forget_the_oldest(&self.directory);
        Ok(())
    }

    /// The file for the same job in another log directory.
    #[must_use]
    pub fn moved_to(&self, log_dir: &Path) -> Memory {
        let directory = log_dir.join(DIRECTORY);
        Memory { file: directory.join(self.file.file_name().unwrap_or_default()), directory }
    }
}

/// Removes the oldest files of the directory, so that it has at most [`MAX_FILES`].
pub fn forget_the_oldest(directory: &Path) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let written = |path: PathBuf| {
        let modified = fs::metadata(&path).and_then(|metadata| metadata.modified());
        (modified.unwrap_or(SystemTime::UNIX_EPOCH), path)
    };
    let mut files: Vec<(SystemTime, PathBuf)> = entries.map(|entry| written(entry.path())).collect();
    files.sort();
    let too_many = files.len().saturating_sub(MAX_FILES);
    for (_, file) in files.into_iter().take(too_many) {
        // Another launcher may have removed it; in both cases it is gone.
        let _ = fs::remove_file(file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::time::Span;

    #[test]
    fn what_one_run_keeps_the_next_one_finds_and_the_oldest_jobs_are_forgotten() {
        let place = testing::tempdir().unwrap();
        let memory = Memory::open(place.path(), "abc");
        assert_eq!(memory.read(), None);
        memory.write(JobMemory { rest: Span(7), ..JobMemory::default() }).unwrap();
        assert_eq!(memory.read().map(|learned| (learned.rest, learned.runs)), Some((Span(7), 1)));
        for number in 0..MAX_FILES {
            Memory::open(place.path(), &number.to_string()).write(JobMemory::default()).unwrap();
        }
        let left = fs::read_dir(place.path().join(".learned")).unwrap().count();
        assert_eq!(left, MAX_FILES);
        let last = Memory::open(place.path(), &(MAX_FILES - 1).to_string());
        assert!(last.read().is_some());
    }

    #[test]
    fn a_damaged_file_is_ignored_and_replaced() {
        let place = testing::tempdir().unwrap();
        let memory = Memory::open(place.path(), "abc");
        fs::create_dir_all(&memory.directory).unwrap();
        fs::write(&memory.file, vec![b'x'; MAX_FILE_BYTES + 10]).unwrap();
        assert_eq!(memory.read(), None);
        memory.write(JobMemory::default()).unwrap();
        assert!(memory.read().is_some());
    }
}
