//! Files in the job's log directory, which may be on a network file system that does not answer. The launcher's loop waits
//! for them only for a limited time, and not at all while an earlier request hangs.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use mainstay_sys::timed_files::Patient;

/// How long a request may take: a busy file server sometimes needs seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// One launcher has one log directory.
static DISK: Patient = Patient::new("log-files");

/// The result of work on files of the log directory; none if it does not answer in time.
pub fn ask<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    DISK.ask(REQUEST_TIMEOUT, work)
}

/// Where ranks write while the log directory does not answer.
static ASIDE: Patient = Patient::new("logs-aside");
static ASIDE_DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

/// From now on, files in here do not count as files of the log directory. One launcher has one such directory.
pub fn write_aside(directory: &Path) {
    ASIDE_DIRECTORY.get_or_init(|| directory.to_owned());
}

/// The result of work on a rank's file; none if it does not answer in time.
pub fn ask_at<T: Send + 'static>(path: &Path, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if is_aside(path) { ASIDE.ask(REQUEST_TIMEOUT, work) } else { ask(work) }
}

/// Whether a file is where ranks write while the log directory does not answer.
pub fn is_aside(path: &Path) -> bool {
    ASIDE_DIRECTORY.get().is_some_and(|directory| path.starts_with(directory))
}

/// The working directory and the program may be on another file system than the logs.
static PROGRAM: Patient = Patient::new("program-files");

/// The result of work on the program's files and in the working directory; none if they do not answer in time.
pub fn ask_of_program<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    PROGRAM.ask(REQUEST_TIMEOUT, work)
}

/// Whether the log directory does not answer at present, as far as known.
pub fn are_stuck() -> bool {
    DISK.is_stuck()
}

/// The length of a file; none if unknown.
pub fn length(path: &Path) -> Option<u64> {
    let file = path.to_owned();
    ask_at(path, move || fs::metadata(file).ok().map(|metadata| metadata.len())).flatten()
}

/// Opens a file to append to, and creates its directory.
///
/// # Errors
/// It cannot be opened, or not in time.
pub fn append_to(path: &Path) -> io::Result<File> {
    let file = path.to_owned();
    let open = move || {
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory)?;
        }
        File::options().create(true).append(true).open(file)
    };
    ask_at(path, open).unwrap_or_else(|| Err(silent()))
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "its file system does not answer")
}
