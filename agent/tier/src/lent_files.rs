//! Files that a user opened for shards that are to be restored. An agent that may not act as a user (the shipped unit runs as a user of its
//! own, without the right to become another) writes into these and into nothing else of that user's; a process of the user's puts them
//! in their places. Whoever opened a file for writing may have it written to, so no more is allowed than the user may do anyway.
//!
//! ```text
//! agent                                  the user's process (launcher, `mainstay ckpt pull`)
//! the step has N shards ───wanted───►    makes N empty files beside their places
//!                       ◄──descriptors── lends them
//! writes each shard, compares it
//!                       ───which is ───► moves each into its place, its manifest last
//!                          which
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};

/// Files of one restore at most.
pub const MOST: usize = 4096;

/// Restores of one user for which files are kept at once, and users.
const EACH: usize = 8;
const USERS: usize = 64;

/// Files that no restore has taken by then are closed.
const KEPT: Duration = Duration::from_secs(60);

/// A shard that was written into a lent file, for the process that puts it in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Landed {
    /// Which of the files, from 0.
    pub file: usize,
    /// Where it belongs below the checkpoint directory.
    pub home: PathBuf,
    /// What it is called there.
    pub name: String,
    /// The manifest that lies beside it.
    pub manifest: Vec<u8>,
}

/// The files that one restore may write into.
#[derive(Debug)]
pub(crate) struct Lot {
    files: Mutex<Vec<Option<File>>>,
    landed: Mutex<Vec<Landed>>,
    lent: Instant,
}

impl Lot {
    /// One that nothing was written into yet, with its number.
    pub(crate) fn take(&self) -> Option<(usize, File)> {
        let mut files = lock(&self.files);
        let number = files.iter().rposition(Option::is_some)?;
        Some((number, files.get_mut(number)?.take()?))
    }

    /// It was not used, or not to an end.
    pub(crate) fn give_back(&self, number: usize, file: File) {
        if let Some(place) = lock(&self.files).get_mut(number) {
            *place = Some(file);
        }
    }

    /// A shard is whole in its file.
    pub(crate) fn landed(&self, shard: Landed) {
        lock(&self.landed).push(shard);
    }

    /// What was written into them.
    pub(crate) fn all_landed(&self) -> Vec<Landed> {
        std::mem::take(&mut *lock(&self.landed))
    }

    fn count(&self) -> usize {
        lock(&self.files).len()
    }
}

/// For a user, and the checkpoint directory.
type Lots = BTreeMap<(u32, PathBuf), Arc<Lot>>;

static ALL: Mutex<Lots> = Mutex::new(BTreeMap::new());

/// Notified when files were lent.
static CAME: Condvar = Condvar::new();

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps files that the user `uid`, whom the kernel named, opened for a restore into `directory`. `first` is the number of the first: 0
/// begins anew, and more than one message may bring can follow.
///
/// # Errors
/// One is no file of that user's that is open for writing, or there are too many.
pub fn lend(uid: u32, directory: &Path, first: usize, files: Vec<OwnedFd>) -> io::Result<()> {
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
    let mut all = lock(&ALL);
    all.retain(|_, lot| lot.lent.elapsed() < KEPT || Arc::strong_count(lot) > 1);
    let key = (uid, directory.to_owned());
    let mut known = if first == 0 { Vec::new() } else { known(&mut all, &key) };
    if known.len() != first || first + files.len() > MOST {
        return refused(format!("{} files came before, and not {first}; {MOST} is the most", known.len()));
    }
    let of_user = all.keys().filter(|(other, path)| *other == uid && path != directory).count();
    let users = all.keys().map(|(other, _)| *other).filter(|other| *other != uid);
    if of_user >= EACH || users.collect::<std::collections::BTreeSet<u32>>().len() >= USERS {
        return refused("too many restores are waiting for their files or have them".to_owned());
    }
    known.extend(files.into_iter().map(|file| Some(File::from(file))));
    let lot = Lot { files: Mutex::new(known), landed: Mutex::default(), lent: Instant::now() };
    all.insert(key, Arc::new(lot));
    CAME.notify_all();
    Ok(())
}

/// The files that came so far, of a restore that has not begun to use them.
fn known(all: &mut Lots, key: &(u32, PathBuf)) -> Vec<Option<File>> {
    let Some(lot) = all.get(key).filter(|lot| Arc::strong_count(lot) == 1) else { return Vec::new() };
    std::mem::take(&mut *lock(&lot.files))
}

/// Waits until so many files are lent for a restore into `directory`, and takes them from those that are kept; none after `within`.
pub(crate) fn wait(uid: u32, directory: &Path, count: usize, within: Duration) -> Option<Arc<Lot>> {
    let key = (uid, directory.to_owned());
    let too_few = |all: &mut Lots| all.get(&key).is_none_or(|lot| lot.count() < count);
    let waited = CAME.wait_timeout_while(lock(&ALL), within, too_few);
    let (mut all, late) = waited.unwrap_or_else(PoisonError::into_inner);
    if late.timed_out() {
        return None;
    }
    all.remove(&key)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn own() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn files(at: &Path, count: usize) -> Vec<OwnedFd> {
        (0..count).map(|number| File::create(at.join(number.to_string())).unwrap().into()).collect()
    }

    #[test]
    fn a_restore_gets_the_files_when_all_have_come_and_once() {
        let at = tempfile::tempdir().unwrap();
        let place = at.path().to_owned();
        let waits = std::thread::spawn(move || wait(own(), &place, 3, Duration::from_secs(60)).unwrap());
        lend(own(), at.path(), 0, files(at.path(), 2)).unwrap();
        lend(own(), at.path(), 2, files(at.path(), 1)).unwrap();
        let lot = waits.join().unwrap();
        let mut numbers: Vec<usize> = std::iter::from_fn(|| lot.take()).map(|(number, _)| number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2]);
        assert!(wait(own(), at.path(), 1, Duration::ZERO).is_none(), "they are taken");
    }

    #[test]
    fn files_that_follow_no_others_begin_nothing() {
        let at = tempfile::tempdir().unwrap();
        let error = lend(own(), at.path(), 16, files(at.path(), 1)).unwrap_err().to_string();
        assert!(error.contains("0 files came before, and not 16"), "{error}");
    }

    #[test]
    fn only_a_users_own_files_that_are_open_for_writing_are_taken() {
        let at = tempfile::tempdir().unwrap();
        let path = at.path().join("file");
        fs::write(&path, "words").unwrap();
        let told = |file: File| lend(own(), at.path(), 0, vec![file.into()]).unwrap_err().to_string();
        assert!(told(File::open(&path).unwrap()).contains("not open for writing"));
        assert!(told(File::open(at.path()).unwrap()).contains("no file of user"));
        assert!(told(File::options().write(true).open("/dev/null").unwrap()).contains("no file of user"));
        let fifo = at.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(
            told(File::options().read(true).write(true).open(&fifo).unwrap()).contains("no file of user")
        );
        let of_another = lend(own() + 1, at.path(), 0, files(at.path(), 1)).unwrap_err().to_string();
        assert!(of_another.contains("no file of user"), "{of_another}");
        let mut written = File::create(&path).unwrap();
        written.write_all(b"as before").unwrap();
        lend(own(), &at.path().join("other"), 0, vec![written.into()]).unwrap();
    }

    #[test]
    fn one_user_has_files_for_a_few_restores_only() {
        let at = tempfile::tempdir().unwrap();
        let each = |number: usize| lend(own(), &at.path().join(number.to_string()), 0, files(at.path(), 1));
        let refused = (0..=EACH + 1).filter(|number| each(*number).is_err()).count();
        assert!(refused >= 1, "none was refused");
        (0..=EACH + 1)
            .for_each(|number| _ = wait(own(), &at.path().join(number.to_string()), 1, Duration::ZERO));
    }
}
