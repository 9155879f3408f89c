//! Copies a directory that changes, and makes room in it.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use mainstay_sys::sparse::data_from;

/// Bytes that are copied at once.
const CHUNK: usize = 1 << 20;

/// Bytes at the end of each output file that stay: the launcher reads the ends.
const KEPT: u64 = 512 << 10;

/// Blocks of `stat`.
const BLOCK: u64 = 512;

/// How far copying has come.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Since when the log directory owes an answer.
    pub(super) asked: Option<Instant>,
    /// The bytes of each output file that are copied.
    copied: BTreeMap<PathBuf, u64>,
    /// The start of each output file that was removed to make room.
    removed: BTreeMap<PathBuf, u64>,
    /// Bytes that were removed before they were copied.
    lost: u64,
}

/// What is known of a file that was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Version {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(file: &Metadata) -> Version {
        Version { inode: file.ino(), length: file.len(), modified: (file.mtime(), file.mtime_nsec()) }
    }
}

#[derive(Debug)]
pub(super) struct Copier {
    from: PathBuf,
    to: PathBuf,
    /// The names in `from` that are copied, with what is below them.
    names: Vec<PathBuf>,
    copied: BTreeMap<PathBuf, Version>,
    /// Files as they were at the last look.
    seen: BTreeMap<PathBuf, Version>,
    progress: Arc<Mutex<Progress>>,
}

impl Copier {
    pub(super) fn new(from: &Path, to: &Path, names: &[&Path], progress: Arc<Mutex<Progress>>) -> Copier {
        let (from, to, names) = (from.to_owned(), to.to_owned(), names.iter().map(|name| (*name).to_owned()));
        Copier { from, to, names: names.collect(), copied: BTreeMap::new(), seen: BTreeMap::new(), progress }
    }

    pub(super) fn lost(&self) -> u64 {
        self.progress().lost
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // A holder that panics leaves no inconsistent state here.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies what is new. `all`: also files that may still be written.
    ///
    /// # Errors
    /// The first file that could not be copied; the others are.
    pub(super) fn pass(&mut self, all: bool) -> Result<(), String> {
        let mut files = BTreeMap::new();
        self.names.iter().for_each(|name| find(&self.from, name, &mut files));
        let mut outcome = Ok(());
        let gone: Vec<PathBuf> =
            self.copied.keys().filter(|name| !files.contains_key(*name)).cloned().collect();
        for name in gone {
            self.asks();
            let _ = fs::remove_file(self.to.join(&name));
            self.copied.remove(&name);
        }
        for (name, file) in &files {
            let copied = self.copy(name, file, all);
            if let (Err(error), true) = (copied, outcome.is_ok()) {
                outcome = Err(format!("{}: {error}", self.to.join(name).display()));
            }
        }
        self.seen = files.iter().map(|(name, file)| (name.clone(), Version::of(file))).collect();
        self.progress().asked = None;
        outcome
    }

    /// The log directory is asked for something.
    fn asks(&self) {
        self.progress().asked = Some(Instant::now());
    }

    fn copy(&mut self, name: &Path, file: &Metadata, all: bool) -> io::Result<()> {
        let now = Version::of(file);
        let known = self.copied.get(name).copied();
        if known == Some(now) {
            return Ok(());
        }
        if grows(name) {
            self.asks();
            return self.copy_rest(name, file, known.filter(|known| known.inode == now.inode));
        }
        // One that is being written is copied when it is complete.
        if all || self.seen.get(name) == Some(&now) {
            self.asks();
            self.copy_whole(name, file)?;
            self.copied.insert(name.to_owned(), now);
        }
        Ok(())
    }

    /// Copies what a file has grown by.
    fn copy_rest(&mut self, name: &Path, file: &Metadata, known: Option<Version>) -> io::Result<()> {
        let (source, target) = (File::open(self.from.join(name))?, self.to.join(name));
        let from = known.map_or(0, |known| known.length);
        let mut options = File::options();
        options.write(true).create(true).truncate(known.is_none()).mode(file.mode() & 0o777);
        let target = with_directory(&target, || options.open(&target))?;
        let whole = Version::of(file);
        if from > whole.length {
            // The start of a torn line was cut off.
            target.set_len(whole.length)?;
        }
        let mut version = Version { length: from.min(whole.length), ..whole };
        let mut chunk = vec![0; CHUNK];
        while version.length < whole.length {
            version.length = data_from(&source, version.length).min(whole.length);
            let most = usize::try_from(whole.length - version.length).unwrap_or(CHUNK).min(CHUNK);
            let read = source.read_at(&mut chunk[..most], version.length)?;
            if read == 0 {
                // All of it is removed, or it was cut off: seen at the next look.
                target.set_len(version.length)?;
                break;
            }
            target.write_all_at(&chunk[..read], version.length)?;
            version.length += read as u64;
            self.note(name, version);
            self.asks();
        }
        self.note(name, version);
        Ok(())
    }

    fn note(&mut self, name: &Path, version: Version) {
        self.copied.insert(name.to_owned(), version);
        self.progress().copied.insert(name.to_owned(), version.length);
    }

    /// Copies a file so that readers see the old or the new content.
    fn copy_whole(&self, name: &Path, file: &Metadata) -> io::Result<()> {
        let target = self.to.join(name);
        let aside = target.with_file_name(mainstay_tier::aside::name("log"));
        let mut options = File::options();
        options.write(true).create_new(true).mode(file.mode() & 0o777);
        let mut open = with_directory(&target, || options.open(&aside))?;
        let copied = io::copy(&mut File::open(self.from.join(name))?, &mut open);
        let placed = copied.and_then(|_| fs::rename(&aside, &target));
        if placed.is_err() {
            let _ = fs::remove_file(&aside);
        }
        placed
    }
}

/// Whether files with this name only grow. Others are replaced as a whole.
fn grows(name: &Path) -> bool {
    name.extension().is_some_and(|kind| kind == "log" || kind == "jsonl" || kind == "txt")
}

/// Opens a file, in a directory that is created if it is missing.
fn with_directory<T>(path: &Path, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            open()
        }
        opened => opened,
    }
}

/// The regular files in a directory below `root`, by their names below `root`.
fn find(root: &Path, below: &Path, files: &mut BTreeMap<PathBuf, Metadata>) {
    for entry in fs::read_dir(root.join(below)).into_iter().flatten().flatten() {
        let name = below.join(entry.file_name());
        // Of a link itself.
        match entry.metadata() {
            Ok(of) if of.is_dir() => find(root, &name, files),
            Ok(of) if of.is_file() => {
                files.insert(name, of);
            }
            _ => {}
        }
    }
}

/// Removes the start of output files while all of them have more than `most` bytes: first what is copied, then, since
/// ranks must not run out of memory or disk, also what is not.
pub(super) fn make_room(root: &Path, most: u64, progress: &mut Progress) {
    let mut files = BTreeMap::new();
    find(root, Path::new(""), &mut files);
    files.retain(|name, _| name.extension().is_some_and(|kind| kind == "log"));
    let mut all: u64 = files.values().map(|of| of.blocks() * BLOCK).sum();
    if all <= most {
        return;
    }
    let mut by_size: Vec<(u64, PathBuf, u64)> =
        files.into_iter().map(|(name, of)| (of.blocks() * BLOCK, name, of.len())).collect();
    by_size.sort_unstable_by(|one, other| other.cmp(one));
    for only_copied in [true, false] {
        for (_, name, length) in &by_size {
            let copied = progress.copied.get(name).copied().unwrap_or(0);
            let removed = progress.removed.get(name).copied().unwrap_or(0);
            let end = if only_copied { copied.min(*length) } else { *length };
            let end = end.saturating_sub(KEPT);
            if all <= most || end <= removed || !punch(&root.join(name), end) {
                continue;
            }
            progress.removed.insert(name.clone(), end);
            progress.lost += end.saturating_sub(removed.max(copied));
            all = all.saturating_sub(end - removed);
        }
    }
}

/// Gives back the start of a file; the offsets of the rest stay the same.
fn punch(path: &Path, end: u64) -> bool {
    let punched =
        File::options().write(true).open(path).map_err(|_| Errno::IO).and_then(|file| {
            fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, end)
        });
    punched.is_ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn append(path: &Path, text: &[u8]) {
        let opened = File::options().create(true).append(true).open(path);
        opened.expect("a local file").write_all(text).expect("written");
    }

    #[test]
    fn files_that_grow_are_continued_and_others_are_replaced_when_they_are_complete() {
        let root = testing::tempdir().expect("a directory");
        let (from, to) = (root.path().join("from"), root.path().join("to"));
        fs::create_dir_all(from.join("run/attempt_0")).expect("a directory");
        fs::create_dir_all(from.join("other")).expect("a directory");
        fs::create_dir(&to).expect("a directory");
        let mut copier = Copier::new(&from, &to, &[Path::new("run")], Arc::default());
        let copied = |name: &str| fs::read_to_string(to.join(name)).ok();
        append(&from.join("other/file.log"), b"of no run");
        append(&from.join("run/attempt_0/stdout.log"), b"one\n");
        append(&from.join("run/summary.json"), b"{");
        copier.pass(false).expect("copied");
        assert_eq!(copied("run/attempt_0/stdout.log").as_deref(), Some("one\n"));
        assert_eq!((copied("run/summary.json"), copied("other/file.log")), (None, None));
        append(&from.join("run/attempt_0/stdout.log"), b"two\n");
        append(&from.join("run/summary.json"), b"}");
        copier.pass(true).expect("copied");
        assert_eq!(copied("run/attempt_0/stdout.log").as_deref(), Some("one\ntwo\n"));
        assert_eq!(copied("run/summary.json").as_deref(), Some("{}"));
        // A torn line is cut off, and a segment of the journal is removed.
        File::options()
            .write(true)
            .open(from.join("run/attempt_0/stdout.log"))
            .expect("open")
            .set_len(5)
            .expect("cut");
        fs::remove_file(from.join("run/summary.json")).expect("removed");
        copier.pass(false).expect("copied");
        assert_eq!(copied("run/attempt_0/stdout.log").as_deref(), Some("one\nt"));
        assert_eq!(copied("run/summary.json"), None);
    }

    #[test]
    fn room_is_made_by_what_is_copied_first_and_what_is_lost_is_counted() {
        let root = testing::tempdir().expect("a directory");
        let (from, to) = (root.path().join("from"), root.path().join("to"));
        fs::create_dir_all(from.join("run")).expect("a directory");
        fs::create_dir(&to).expect("a directory");
        let progress = Arc::new(Mutex::new(Progress::default()));
        let mut copier = Copier::new(&from, &to, &[Path::new("run")], Arc::clone(&progress));
        let (mib, log) = (1 << 20, from.join("run/stdout.log"));
        append(&log, &vec![b'a'; 4 * mib]);
        copier.pass(false).expect("copied");
        make_room(&from, 2 << 20, &mut progress.lock().expect("no panic"));
        assert_eq!(copier.lost(), 0, "all of it is copied");
        let length = |path: &Path| fs::metadata(path).expect("it exists");
        assert_eq!(length(&log).len(), 4 << 20, "offsets stay the same");
        assert!(length(&log).blocks() * BLOCK <= 2 << 20);
        append(&log, &vec![b'b'; 4 * mib]);
        make_room(&from, 2 << 20, &mut progress.lock().expect("no panic"));
        assert_eq!(copier.lost(), (4 << 20) - KEPT, "of what is not copied, the end stays");
        copier.pass(false).expect("copied");
        let copied = fs::read(to.join("run/stdout.log")).expect("it is copied");
        assert_eq!(copied.len(), 8 * mib);
        assert!(copied[..4 * mib].iter().all(|byte| *byte == b'a'));
        assert!(copied[8 * mib - usize::try_from(KEPT).expect("small")..].iter().all(|byte| *byte == b'b'));
    }
}
