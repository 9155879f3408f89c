//! Where a run keeps its files: logs and journal on disk, pages and socket on tmpfs.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use mainstay_sensors::source::program;
use mainstay_sys::private_directory::private_directory;
use nix::fcntl::{Flock, FlockArg};

use crate::log_files;
use crate::log_mirror::{self, LogMirror};

/// The directories of one run.
#[derive(Debug)]
pub struct LaunchPaths {
    /// The job's name on this host: the run id, followed by a number if it was used before.
    pub job: String,
    /// Where the launcher and the ranks write logs, journal and summary.
    pub run_dir: PathBuf,
    /// Where people find them: `run_dir`, unless that is copied to another directory.
    pub published_dir: PathBuf,
    /// Copies `run_dir` to `published_dir`, if these differ.
    pub mirror: Option<LogMirror>,
    /// Heartbeat pages and the launcher's socket, or why it cannot be created.
    pub runtime_dir: Result<RuntimeDir, String>,
}

/// The run's directory on tmpfs. It stays after the run, for the black box, until another launcher of the same user finds
/// its lock free.
#[derive(Debug)]
pub struct RuntimeDir {
    /// Where it is.
    pub path: PathBuf,
    _lock: Flock<File>,
}

/// At most this many launchers of one job of the same user have heartbeats on one machine.
const MAX_LAUNCHERS_PER_JOB: u32 = 64;

/// Why a run's directories cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The run id cannot be a file name.
    #[error(
        "the run id {0:?} (--rdzv-id) cannot name a directory: use 1 to 64 letters, digits, '.', '_' and '-', \
         beginning with a letter or digit"
    )]
    RunId(String),
    /// The run's directory cannot be made.
    #[error("making the run's directory {path}: {source}; name a writable one with --log-dir")]
    RunDir {
        /// The directory.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// A hash over the files of the program. None if its directory does not answer.
pub fn hash_of_program(command: &[String]) -> Option<String> {
    let command = command.to_vec();
    log_files::ask_of_program(move || program::hash(&command)).flatten()
}

/// What launchers of one job have in common: see [`program::identity`]. Empty if the directory does not answer.
pub fn identity_of_program(command: &[String]) -> (String, String) {
    let command = command.to_vec();
    log_files::ask_of_program(move || program::identity(&command)).unwrap_or_default()
}

/// Makes the directories of a run.
///
/// # Errors
/// [`PlaceError`]. A missing runtime directory is no error: the job then runs without heartbeats.
pub fn make(log_dir: &Path, runtime_root: &Path, run_id: &str) -> Result<LaunchPaths, PlaceError> {
    if !is_file_name(run_id) {
        return Err(PlaceError::RunId(run_id.to_owned()));
    }
    let mirror = log_mirror::silenceable_mount(log_dir)
        .filter(|_| log_mirror::silenceable_mount(runtime_root).is_none())
        .and_then(|mount| {
            LogMirror::start(log_dir, runtime_root, run_id, &mount)
                .inspect_err(|error| tracing::warn!("logs are written to the log directory itself: {error}"))
                .ok()
        });
    let (run_dir, published_dir) = match &mirror {
        Some(mirror) => (mirror.local.clone(), mirror.published.clone()),
        None => {
            let run_dir = new_run_dir(log_dir, run_id)?;
            (run_dir.clone(), run_dir)
        }
    };
    let job = run_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let runtime_dir = runtime_dir(runtime_root, &job);
    Ok(LaunchPaths { job, run_dir, published_dir, mirror, runtime_dir })
}

/// Creates the directory of a run: its id, followed by a number if it was used before.
pub(crate) fn new_run_dir(log_dir: &Path, run_id: &str) -> Result<PathBuf, PlaceError> {
    let failed = |path: &Path, source| PlaceError::RunDir { path: path.to_owned(), source };
    fs::create_dir_all(log_dir).map_err(|source| failed(log_dir, source))?;
    let log_dir = log_dir.canonicalize().map_err(|source| failed(log_dir, source))?;
    let mut job = run_id.to_owned();
    let mut number = 1;
    loop {
        let run_dir = log_dir.join(&job);
        match fs::create_dir(&run_dir) {
            Ok(()) => return Ok(run_dir),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 100_000 => {
                number += 1;
                job = format!("{run_id}.{number}");
            }
            Err(source) => return Err(failed(&run_dir, source)),
        }
    }
}

fn is_file_name(run_id: &str) -> bool {
    let good = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    (1..=64).contains(&run_id.len())
        && run_id.chars().all(good)
        && run_id.starts_with(|first: char| first.is_ascii_alphanumeric())
}

/// Makes a directory on tmpfs for a job that consists of several, its roles.
///
/// # Errors
/// Why it cannot be made.
pub fn roles_dir(root: &Path, run_id: &str) -> Result<RuntimeDir, String> {
    if is_file_name(run_id) {
        runtime_dir(root, run_id)
    } else {
        Err(PlaceError::RunId(run_id.to_owned()).to_string())
    }
}

fn runtime_dir(root: &Path, job: &str) -> Result<RuntimeDir, String> {
    let with_path = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    private_directory(root).map_err(|error| with_path(root, error))?;
    // Between its creation and its lock a directory looks like a stale one, so only one launcher acts at a time.
    let turn = turn(root);
    if turn.is_some() {
        remove_stale(root);
    }
    // Two launchers of one job on one machine, as in tests of several hosts, have a directory each.
    let names = (1..=MAX_LAUNCHERS_PER_JOB).map(|number| match number {
        1 => job.to_owned(),
        _ => format!("{job}.{number}"),
    });
    let mut taken = None;
    for path in names.map(|name| root.join(name)) {
        private_directory(&path).map_err(|error| with_path(&path, error))?;
        match lock(&path).and_then(mark_as_a_jobs) {
            Ok(lock) => return Ok(RuntimeDir { path, _lock: lock }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => taken = Some(with_path(&path, error)),
            Err(error) => return Err(with_path(&path, error)),
        }
    }
    Err(taken.unwrap_or_default())
}

pub(crate) fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let file = File::options().create(true).append(true).open(directory.join("lock"))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error.into())
}

/// Runtime directories, in which jobs have theirs, have a lock too, and one may be below another.
fn mark_as_a_jobs(lock: Flock<File>) -> io::Result<Flock<File>> {
    lock.set_len(0)?;
    io::Write::write_all(&mut &*lock, b"job\n")?;
    Ok(lock)
}

/// Whether a directory is that of one job, and nothing of another launcher is below it.
fn is_a_jobs(directory: &Path) -> bool {
    let marked = fs::metadata(directory.join("lock")).is_ok_and(|lock| lock.len() > 0);
    // Launchers up to 0.1.0 do not mark it.
    (marked || directory.join("api.sock.lock").exists()) && !has_a_lock_below(directory)
}

fn has_a_lock_below(directory: &Path) -> bool {
    let Ok(entries) = fs::read_dir(directory) else { return true };
    let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let mut below = entries.flatten().filter(is_directory).map(|entry| entry.path());
    below.any(|path| path.join("lock").exists() || has_a_lock_below(&path))
}

/// Waits for this launcher's turn to create and remove directories in `root`. None if another launcher, perhaps a stopped
/// one, does not end its turn: then nothing is removed, and the job goes on.
pub(crate) fn turn(root: &Path) -> Option<Flock<File>> {
    const MAX_TRIES: u32 = 200;
    let mut file = File::options().create(true).append(true).open(root.join("lock")).ok()?;
    for _ in 0..MAX_TRIES {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(turn) => return Some(turn),
            Err((again, _)) => file = again,
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    None
}

/// Removes the directories of jobs whose launchers are gone; tmpfs is memory.
fn remove_stale(root: &Path) {
    let Ok(entries) = fs::read_dir(root) else { return };
    for directory in entries.flatten().map(|entry| entry.path()).filter(|path| path.join("lock").exists()) {
        if is_a_jobs(&directory) && lock(&directory).is_ok() {
            // Another process may be removing it too; the result is the same.
            let _ = fs::remove_dir_all(&directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_id_that_was_used_gets_a_number_and_living_runs_keep_their_pages() {
        let root = testing::tempdir().expect("a directory");
        let (logs, tmpfs) = (root.path().join("logs"), root.path().join("shm"));
        let first = make(&logs, &tmpfs, "run").expect("places");
        let second = make(&logs, &tmpfs, "run").expect("places");
        assert_eq!((first.job.as_str(), second.job.as_str()), ("run", "run.2"));
        assert!(tmpfs.join("run").exists(), "the first run lives");
        drop(first);
        make(&logs, &tmpfs, "other").expect("places");
        assert!(!tmpfs.join("run").exists(), "the first run is gone");
        assert!(tmpfs.join("run.2").exists());
    }

    #[test]
    fn runtime_directories_below_each_other_are_left_alone() {
        let root = testing::tempdir().expect("a directory");
        let (logs, outer) = (root.path().join("logs"), root.path().join("shm"));
        let inner = outer.join("inner");
        let path = |paths: &LaunchPaths| paths.runtime_dir.as_ref().expect("a directory").path.clone();
        // Below another one, and below the directory of an ended job.
        let ended = make(&logs, &outer, "ended").expect("places");
        let below_ended = path(&ended).join("shm");
        drop(ended);
        let living =
            [make(&logs, &inner, "one"), make(&logs, &below_ended, "two")].map(|made| made.expect("places"));
        fs::create_dir(inner.join("pools")).expect("made");
        make(&logs, &outer, "other").expect("places");
        for paths in &living {
            assert!(path(paths).join("lock").exists(), "{paths:?}");
        }
        drop(living);
        make(&logs, &outer, "another").expect("places");
        assert!(inner.join("pools").exists(), "checkpoints that a killed launcher left in memory");
    }

    #[test]
    fn launchers_that_start_at_once_leave_each_other_their_pages() {
        let root = testing::tempdir().expect("a directory");
        let (logs, tmpfs) = (root.path().join("logs"), root.path().join("shm"));
        let begin = || {
            let paths: Vec<LaunchPaths> =
                (0..20).map(|_| make(&logs, &tmpfs, "run").expect("places")).collect();
            let present = |place: &LaunchPaths| {
                place.runtime_dir.as_ref().is_ok_and(|runtime| runtime.path.join("lock").exists())
            };
            paths.iter().filter(|place| !present(place)).count()
        };
        let lost: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(begin)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a count")).sum()
        });
        assert_eq!(lost, 0, "directories of living launchers that were removed");
    }

    #[test]
    fn launchers_of_one_job_with_log_directories_of_their_own_have_pages_of_their_own() {
        let root = testing::tempdir().expect("a directory");
        let tmpfs = root.path().join("shm");
        let paths_in = |logs: &str| make(&root.path().join(logs), &tmpfs, "run").expect("places");
        let (first, second) = (paths_in("a"), paths_in("b"));
        assert_eq!((first.job.as_str(), second.job.as_str()), ("run", "run"));
        let path = |paths: &LaunchPaths| paths.runtime_dir.as_ref().expect("a directory").path.clone();
        assert_eq!((path(&first), path(&second)), (tmpfs.join("run"), tmpfs.join("run.2")));
    }

    #[test]
    fn a_run_id_must_be_a_file_name() {
        let root = testing::tempdir().expect("a directory");
        for id in ["", "..", "a/b", ".hidden", "-x", "ä", &"x".repeat(65)] {
            let error = make(root.path(), root.path(), id).expect_err(id);
            assert!(matches!(error, PlaceError::RunId(_)), "{error}");
        }
    }
}
