//! Files that a user opened for shards to be restored. An agent that may not act as a user (the shipped unit has a system user that
//! may not become another one) writes only into these files of that user; a process of the user moves them into place. A user
//! may write to any file that the user has opened for writing, so the agent gains no additional rights.
//!
//! ```text
//! agent                                  the user's process (launcher, `mainstay ckpt pull`)
//! the step has N shards ───wanted───►    creates N empty files next to their places
//!                       ◄──descriptors── lends them
//! writes and verifies each shard
//!                       ───which is ───► moves each into its place, its manifest last
//!                          which
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FileType, OFlags};

use crate::lock;

/// Maximum number of files of one restore.
const MAX_FILES: usize = 4096;

/// Maximum number of files of all restores together. The shipped unit may have 65,536 open.
const MAX_FILES_OF_ALL: usize = 16_384;

/// A shard that was written into a lent file, for the process that moves it into place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredShard {
    /// Index of the file, from 0.
    pub file: usize,
    /// Its directory, relative to the checkpoint directory.
    pub home: PathBuf,
    /// Its file name there.
    pub name: String,
    /// Content of the manifest next to it.
    pub manifest: Vec<u8>,
}

/// The files that one restore may write into.
#[derive(Debug)]
pub(crate) struct RestoreFiles {
    count: usize,
    files: Mutex<Vec<Option<File>>>,
    written: Mutex<Vec<RestoredShard>>,
}

impl RestoreFiles {
    /// Takes an unused file, with its number.
    pub(crate) fn take(&self) -> Option<(usize, File)> {
        let mut files = lock(&self.files);
        let number = files.iter().rposition(Option::is_some)?;
        Some((number, files.get_mut(number)?.take()?))
    }

    /// Returns a file that was not used, or not completely written.
    pub(crate) fn give_back(&self, number: usize, file: File) {
        if let Some(slot) = lock(&self.files).get_mut(number) {
            *slot = Some(file);
        }
    }

    /// Records a shard that was written completely.
    pub(crate) fn record_written(&self, shard: RestoredShard) {
        lock(&self.written).push(shard);
    }

    /// Takes the shards that were written.
    pub(crate) fn take_written(&self) -> Vec<RestoredShard> {
        std::mem::take(&mut *lock(&self.written))
    }

    fn is_short(&self) -> bool {
        lock(&self.files).len() < self.count
    }
}

/// Key: the user and the token of a restore.
type RestoresByToken = BTreeMap<(u32, String), Arc<RestoreFiles>>;

/// The restores that wait for files. Files that no restore waits for are not kept.
#[derive(Debug, Default)]
pub(crate) struct LentFiles {
    restores: Mutex<RestoresByToken>,
    /// Notified when files were lent.
    lent: Condvar,
    /// Number of restores that have wanted files.
    number: AtomicU64,
}

/// A restore that wants files. It accepts none after it is dropped.
#[derive(Debug)]
pub(crate) struct PendingRestore<'a> {
    all: &'a LentFiles,
    key: (u32, String),
    files: Arc<RestoreFiles>,
}

impl LentFiles {
    /// Asks this user for `count` files.
    pub(crate) fn request(&self, uid: u32, count: usize) -> io::Result<PendingRestore<'_>> {
        // Differs from tokens of an earlier agent process, whose callers may still lend files.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let token = format!("{since:x}-{}", self.number.fetch_add(1, Ordering::Relaxed));
        let lot = Arc::new(RestoreFiles { count, files: Mutex::default(), written: Mutex::default() });
        let mut all = lock(&self.restores);
        let of_others: usize = all.values().map(|lot| lot.count).sum();
        if count > MAX_FILES || of_others + count > MAX_FILES_OF_ALL {
            let problem = format!(
                "{count} files are more than can be lent: {MAX_FILES} for one restore, {MAX_FILES_OF_ALL} in all"
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, problem));
        }
        let key = (uid, token);
        all.insert(key.clone(), Arc::clone(&lot));
        Ok(PendingRestore { all: self, key, files: lot })
    }

    /// Keeps files that the user `uid`, as reported by the kernel, opened for the restore with this token. `first` is the number of the first
    /// file: one message carries a part of them.
    pub(crate) fn lend(&self, uid: u32, token: &str, first: usize, files: Vec<OwnedFd>) -> io::Result<()> {
        let refused = |problem: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        for file in &files {
            let found = rustix::fs::fstat(file)?;
            if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile || found.st_uid != uid {
                return refused(format!("no file of user {uid}"));
            }
            let flags = rustix::fs::fcntl_getfl(file)?;
            if flags.contains(OFlags::PATH) || flags & OFlags::ACCMODE == OFlags::RDONLY {
                return refused("a file that is not open for writing".to_owned());
            }
        }
        let all = lock(&self.restores);
        let Some(lot) = all.get(&(uid, token.to_owned())) else {
            return refused("no restore of this user waits for these files".to_owned());
        };
        let mut kept = lock(&lot.files);
        if kept.len() != first || first + files.len() > lot.count {
            let (came, expected) = (kept.len(), lot.count);
            return refused(format!("{came} files came before, and not {first}; {expected} are wanted"));
        }
        kept.extend(files.into_iter().map(|file| Some(File::from(file))));
        self.lent.notify_all();
        Ok(())
    }
}

impl PendingRestore<'_> {
    /// The token with which the files are lent.
    pub(crate) fn token(&self) -> &str {
        &self.key.1
    }

    /// Waits until all files are lent; none after `within`.
    pub(crate) fn wait(self, within: Duration) -> Option<Arc<RestoreFiles>> {
        let waited =
            self.all.lent.wait_timeout_while(lock(&self.all.restores), within, |_| self.files.is_short());
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(all);
        (!self.files.is_short()).then(|| Arc::clone(&self.files))
    }
}

impl Drop for PendingRestore<'_> {
    fn drop(&mut self) {
        let lot = lock(&self.all.restores).remove(&self.key);
        // Closing a file may take long, and other threads need the list.
        drop(lot);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind::PermissionDenied;
    use std::path::Path;

    use super::*;

    fn own() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn files(at: &Path, count: usize) -> Vec<OwnedFd> {
        (0..count).map(|number| File::create(at.join(number.to_string())).unwrap().into()).collect()
    }

    #[test]
    fn a_restore_gets_its_files_after_all_were_lent() {
        let all = LentFiles::default();
        let at = testing::tempdir().unwrap();
        let (pending, other) = (all.request(own(), 3).unwrap(), all.request(own(), 1).unwrap());
        let token = pending.token().to_owned();
        let lot = std::thread::scope(|scope| {
            let waits = scope.spawn(move || pending.wait(Duration::from_secs(60)).unwrap());
            all.lend(own(), &token, 0, files(at.path(), 2)).unwrap();
            all.lend(own(), &token, 2, files(at.path(), 1)).unwrap();
            waits.join().unwrap()
        });
        let mut numbers: Vec<usize> = std::iter::from_fn(|| lot.take()).map(|(number, _)| number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2]);
        assert!(other.wait(Duration::ZERO).is_none(), "they are another restore's");
    }

    #[test]
    fn files_that_no_restore_waits_for_are_not_kept() {
        let all = LentFiles::default();
        let at = testing::tempdir().unwrap();
        let pending = all.request(own(), 2).unwrap();
        let token = pending.token().to_owned();
        let refused = |uid, first, count| {
            all.lend(uid, &token, first, files(at.path(), count)).unwrap_err().kind() == PermissionDenied
        };
        assert!(refused(own(), 1, 1), "the first file did not come");
        assert!(refused(own(), 0, 3), "more than are wanted");
        // Files that arrive too late do not go to another restore.
        assert!(pending.wait(Duration::ZERO).is_none());
        assert!(refused(own(), 0, 2), "nobody waits any more");
    }

    #[test]
    fn an_incompletely_written_file_is_used_again() {
        let all = LentFiles::default();
        let at = testing::tempdir().unwrap();
        let pending = all.request(own(), 1).unwrap();
        all.lend(own(), pending.token(), 0, files(at.path(), 1)).unwrap();
        let lot = pending.wait(Duration::ZERO).unwrap();
        let (number, file) = lot.take().unwrap();
        assert!(lot.take().is_none());
        lot.give_back(number, file);
        assert!(lot.take().is_some());
    }

    #[test]
    fn only_a_users_own_files_that_are_open_for_writing_are_taken() {
        let all = LentFiles::default();
        let at = testing::tempdir().unwrap();
        let path = at.path().join("file");
        fs::write(&path, "words").unwrap();
        let pending = all.request(own(), 1).unwrap();
        let refused = |uid, file: File| {
            all.lend(uid, pending.token(), 0, vec![file.into()]).unwrap_err().kind() == PermissionDenied
        };
        assert!(refused(own(), File::open(&path).unwrap()), "not for writing");
        assert!(refused(own(), File::open(at.path()).unwrap()), "a directory");
        assert!(refused(own(), File::options().write(true).open("/dev/null").unwrap()), "a device");
        let fifo = at.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(refused(own(), File::options().read(true).write(true).open(&fifo).unwrap()), "a pipe");
        let of_another = File::create(at.path().join("another")).unwrap();
        assert!(refused(own() + 1, of_another), "of another user");
        all.lend(own(), pending.token(), 0, vec![File::create(&path).unwrap().into()]).unwrap();
    }

    #[test]
    fn restores_want_no_more_files_than_the_agent_can_hold() {
        let all = LentFiles::default();
        assert!(all.request(own(), MAX_FILES + 1).is_err());
        let held: Vec<PendingRestore> = (0..8).filter_map(|_| all.request(own(), MAX_FILES).ok()).collect();
        assert_eq!(held.len(), MAX_FILES_OF_ALL / MAX_FILES);
    }
}
