//! Accesses files of a user with that user's rights: an agent that runs as root must not read or write for a launcher what its
//! user may not.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};
use rustix::fs::{FileType, OFlags};
use serde::{Deserialize, Serialize};

use crate::beneath::Beneath;
use crate::lent_files::LentFiles;

/// A user and the group of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl User {
    /// The user of this process.
    pub fn own() -> User {
        User { uid: geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
    }
}

/// Maximum number of users whose groups are kept; beyond that the account database is read again.
const MAX_KNOWN_USERS: usize = 4096;

/// Groups by user and main group.
type Groups = BTreeMap<(u32, u32), Arc<[u32]>>;

/// What this process knows of the users for whom it acts, and what they gave it.
#[derive(Debug, Default)]
pub struct Users {
    /// Their supplementary groups, as the kernel reported them at their last call.
    groups: RwLock<Groups>,
    handed_over: LentDirectories,
    pub(crate) lent_files: LentFiles,
}

impl Users {
    /// Records the supplementary groups of a user's process, as the kernel reports them: files that the user reaches only
    /// through such a group are then reachable for that user too.
    pub fn learn_groups(&self, user: User, groups: &[u32]) {
        let mut known = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_KNOWN_USERS && !known.contains_key(&(user.uid, user.gid)) {
            known.clear();
        }
        known.insert((user.uid, user.gid), groups.into());
    }

    /// The groups that the kernel reported, or those in the account database: after a start of the agent, until the user
    /// calls.
    pub fn groups_of(&self, user: User) -> Arc<[u32]> {
        let key = (user.uid, user.gid);
        if let Some(groups) = self.groups.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Arc::clone(groups);
        }
        let account = nix::unistd::User::from_uid(Uid::from_raw(user.uid)).ok().flatten();
        let name = account.and_then(|account| std::ffi::CString::new(account.name).ok());
        let listed = name.and_then(|name| nix::unistd::getgrouplist(&name, Gid::from_raw(user.gid)).ok());
        let groups: Vec<u32> = listed.unwrap_or_default().iter().map(|group| group.as_raw()).collect();
        self.learn_groups(user, &groups);
        groups.into()
    }

    /// Keeps a directory of the user `uid`, as reported by the kernel, under the name by which the user asks for it.
    pub fn hand_over(&self, uid: u32, path: &Path, directory: OwnedFd) -> io::Result<()> {
        self.handed_over.keep(uid, path, directory)
    }

    /// Keeps files that the user `uid`, as reported by the kernel, opened for the restore with this token. `first` is the
    /// number of the first file: one message carries a part of them.
    pub fn lend(&self, uid: u32, token: &str, first: usize, files: Vec<OwnedFd>) -> io::Result<()> {
        self.lent_files.lend(uid, token, first, files)
    }

    /// Access with the rights of a user.
    pub fn access(self: &Arc<Users>, user: User) -> Access {
        Access { user, users: Arc::clone(self) }
    }

    /// Access to what a user handed over; `None` if that is nothing.
    pub(crate) fn read_for(self: &Arc<Users>, uid: u32) -> Option<UserGuard> {
        let mut guard = UserGuard::own();
        guard.handed = Some(self.handed_over.has_any(uid).then(|| (Arc::clone(self), uid))?);
        Some(guard)
    }
}

/// The rights of a user, with which the files of that user are accessed.
#[derive(Clone, Debug)]
pub struct Access {
    user: User,
    users: Arc<Users>,
}

impl Access {
    /// This process's own rights.
    pub fn own() -> Access {
        Arc::<Users>::default().access(User::own())
    }

    /// Whose rights they are.
    pub fn user(&self) -> User {
        self.user
    }

    /// While the result lives, this thread acts as the user, or may read what the user handed over.
    ///
    /// # Errors
    /// This process may do neither.
    pub(crate) fn act(&self) -> io::Result<UserGuard> {
        self.act_to_write().or_else(|error| self.users.read_for(self.user.uid).ok_or(error))
    }

    /// Same as [`Access::act`], but fails if the user's files can only be read.
    pub(crate) fn act_to_write(&self) -> io::Result<UserGuard> {
        let (user, before) = (self.user, User::own());
        let mut guard = UserGuard::own();
        if user != before {
            guard.groups = rustix::process::getgroups()?;
            let theirs = self.users.groups_of(user);
            let theirs: Vec<_> = theirs.iter().map(|group| rustix::fs::Gid::from_raw(*group)).collect();
            if guard.groups != theirs {
                match rustix::thread::set_thread_groups(&theirs) {
                    Ok(()) => {}
                    // An agent that is not root cannot act as another user anyway; the error is reported below.
                    Err(error) if before.uid == 0 => return Err(error.into()),
                    Err(_) => return Err(cannot(before, user)),
                }
            }
            guard.is_other = true;
            // Group first: as another user the thread may no longer change it.
            setfsgid(Gid::from_raw(user.gid));
            setfsuid(Uid::from_raw(user.uid));
            // These calls report no errors; the next one returns the current value.
            let holds = setfsuid(Uid::from_raw(u32::MAX));
            if holds.as_raw() != user.uid {
                return Err(cannot(before, user));
            }
        }
        Ok(guard)
    }

    /// Whether this process can serve the user in `directory`: it may act as that user, or read there what the user
    /// handed over.
    ///
    /// # Errors
    /// It may do neither of these.
    pub fn may_serve(&self, directory: &Path) -> io::Result<()> {
        if self.act_to_write().is_ok() {
            return Ok(());
        }
        self.act()?.open(directory)?.list(Path::new(""))?;
        Ok(())
    }
}

/// While this value lives, this thread accesses files as another user. The kernel keeps that per thread, and also drops the
/// capabilities that override permissions. The supplementary groups are the user's too, none of this process.
#[derive(Debug)]
pub(crate) struct UserGuard {
    /// If this process may not act as the user: access to what that user handed over.
    handed: Option<(Arc<Users>, u32)>,
    before: User,
    groups: Vec<rustix::fs::Gid>,
    is_other: bool,
    // The rights belong to this thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl UserGuard {
    /// With the rights of this process.
    fn own() -> UserGuard {
        let not_send = std::marker::PhantomData;
        UserGuard {
            handed: None,
            before: User::own(),
            groups: Vec::new(),
            is_other: false,
            _not_send: not_send,
        }
    }

    /// Opens a directory; see [`Beneath::open`].
    pub(crate) fn open(&self, path: &Path) -> io::Result<Beneath> {
        match &self.handed {
            None => Beneath::open(path),
            Some(handed) => below_handed(handed, path),
        }
    }

    /// Opens a directory; see [`Beneath::open_no_link`]. The links in the name of one that was handed over were followed by
    /// its user.
    pub(crate) fn open_no_link(&self, path: &Path) -> io::Result<Beneath> {
        match &self.handed {
            None => Beneath::open_no_link(path),
            Some(handed) => below_handed(handed, path),
        }
    }
}

fn below_handed((users, uid): &(Arc<Users>, u32), path: &Path) -> io::Result<Beneath> {
    let (root, way) = users.handed_over.find(*uid, path)?;
    Beneath::handed_over(*uid, root, &way, path)
}

fn cannot(before: User, user: User) -> io::Error {
    let problem = format!("this agent runs as user {} and cannot act as user {}", before.uid, user.uid);
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

impl Drop for UserGuard {
    fn drop(&mut self) {
        if self.handed.is_some() {
            return;
        }
        setfsuid(Uid::from_raw(self.before.uid));
        setfsgid(Gid::from_raw(self.before.gid));
        if self.is_other {
            // Restores the thread's previous groups.
            let _ = rustix::thread::set_thread_groups(&self.groups);
        }
    }
}

// Directories that users handed over as open descriptors. An agent that may not act as a user (the shipped unit has a system user that
// may not become another one) reads that user's checkpoints only through them. A descriptor that is open for reading proves that its
// user may read the directory, and a later change of the directory's name has no effect. Files below must belong to that user.
// Nothing is written through them.

/// Maximum number of directories per user; the newest are kept.
const MAX_DIRECTORIES_EACH: usize = 64;

/// Maximum number of users; directories of further users are refused.
const MAX_USERS: usize = 64;

/// The directories of one user, the newest last.
type DirectoriesOfUser = VecDeque<(PathBuf, Arc<OwnedFd>)>;

/// The directories of all users.
#[derive(Debug, Default)]
pub(crate) struct LentDirectories(RwLock<BTreeMap<u32, DirectoriesOfUser>>);

fn is_there(directory: &OwnedFd) -> bool {
    rustix::fs::fstat(directory).is_ok_and(|found| found.st_nlink > 0)
}

impl LentDirectories {
    /// Keeps a directory of the user `uid`, as reported by the kernel, under the name by which the user asks for it.
    pub(crate) fn keep(&self, uid: u32, path: &Path, directory: OwnedFd) -> io::Result<()> {
        let refused = |problem: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        let found = rustix::fs::fstat(&directory)?;
        if !path.is_absolute() || FileType::from_raw_mode(found.st_mode) != FileType::Directory {
            return refused(format!("{}: no directory with an absolute path", path.display()));
        }
        // Opening a directory with O_PATH needs no right to read it.
        if rustix::fs::fcntl_getfl(&directory)?.contains(OFlags::PATH) {
            return refused(format!("{}: it is not open for reading", path.display()));
        }
        if found.st_uid != uid {
            return refused(format!("{}: it is of user {}, not of user {uid}", path.display(), found.st_uid));
        }
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.values_mut().for_each(|of_user| of_user.retain(|(_, directory)| is_there(directory)));
        all.retain(|_, of_user| !of_user.is_empty());
        if all.len() >= MAX_USERS && !all.contains_key(&uid) {
            return refused(format!("{MAX_USERS} users have handed directories over, which is the most"));
        }
        let of_user = all.entry(uid).or_default();
        of_user.retain(|(other, _)| other != path);
        of_user.push_back((path.to_owned(), Arc::new(directory)));
        while of_user.len() > MAX_DIRECTORIES_EACH {
            of_user.pop_front();
        }
        Ok(())
    }

    /// Whether a user handed over any directory.
    pub(crate) fn has_any(&self, uid: u32) -> bool {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        all.get(&uid).is_some_and(|of_user| !of_user.is_empty())
    }

    /// The directory that a user handed over under this name or a parent of it, and the path from there.
    ///
    /// # Errors
    /// The user has not handed it over, or no descriptor is free.
    pub(crate) fn find(&self, uid: u32, path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let below = all.get(&uid).into_iter().flat_map(|of_user| of_user.iter().rev()).filter_map(
            |(root, directory)| {
                let way = path.strip_prefix(root).ok()?;
                Some((Arc::clone(directory), way.to_owned()))
            },
        );
        let found = below
            .filter(|(directory, _)| is_there(directory))
            .min_by_key(|(_, way)| way.components().count());
        drop(all);
        let Some((directory, way)) = found else {
            let problem = format!("{}: user {uid} has not handed this directory over", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        };
        Ok((directory.as_fd().try_clone_to_owned()?, way))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::ErrorKind::PermissionDenied;
    use std::os::unix::fs::{OpenOptionsExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{CWD, RenameFlags};

    use super::*;
    use crate::peer::Users;

    fn own() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn open(path: &Path) -> OwnedFd {
        File::open(path).unwrap().into()
    }

    #[test]
    fn only_a_users_own_directory_that_is_open_for_reading_is_kept() {
        let users = Arc::new(Users::default());
        let at = testing::tempdir().unwrap();
        let file = at.path().join("file");
        fs::write(&file, "words").unwrap();
        let path_only = File::options().read(true).custom_flags(nix::libc::O_PATH).open(at.path()).unwrap();
        let refused = |uid, path: &Path, directory: OwnedFd| {
            users.hand_over(uid, path, directory).unwrap_err().kind() == PermissionDenied
        };
        assert!(refused(own(), at.path(), path_only.into()), "not for reading");
        assert!(refused(own(), &file, open(&file)), "a file");
        assert!(refused(own(), Path::new("out"), open(at.path())), "a relative path");
        assert!(refused(own() + 1, at.path(), open(at.path())), "of another user");
        assert!(users.read_for(own() + 1).is_none());
    }

    #[test]
    fn only_handed_over_directories_are_read_and_nothing_is_written() {
        let users = Arc::new(Users::default());
        let at = testing::tempdir().unwrap();
        let (out, secret) = (at.path().join("out"), at.path().join("secret"));
        for (directory, text) in [(&out, "own"), (&secret, "secret")] {
            fs::create_dir_all(directory.join("sub")).unwrap();
            fs::write(directory.join("sub/file"), text).unwrap();
        }
        symlink(&secret, out.join("way")).unwrap();
        nix::unistd::mkfifo(&out.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        users.hand_over(own(), &out, open(&out)).unwrap();
        let reading = users.read_for(own()).unwrap();
        let of_out = reading.open(&out).unwrap();
        assert!(of_out.read(Path::new("sub/file")).is_ok());
        assert!(reading.open(&out.join("sub")).unwrap().read(Path::new("file")).is_ok(), "what is below it");
        assert!(reading.open(&secret).is_err() && reading.open(at.path()).is_err());
        let giant = "n".repeat(300);
        for below in ["way/sub/file", "pipe", "../secret/sub/file", &giant] {
            assert!(of_out.read(Path::new(below)).is_err(), "{below}");
        }
        let new = Path::new("sub/new");
        for refused in [
            of_out.create(new, 0o600).map(drop),
            of_out.make_directory(new),
            of_out.write_whole(new, b"x"),
            of_out.write_over(Path::new("sub/file")).map(drop),
            of_out.rename(Path::new("sub/file"), new),
            of_out.remove_tree(Path::new("sub")),
            of_out.remove_file(Path::new("sub/file")),
            of_out.link_to(Path::new("/"), new),
        ] {
            assert_eq!(refused.unwrap_err().kind(), PermissionDenied);
        }
        if nix::unistd::geteuid().is_root() {
            // Hard link to another user's file in this user's directory.
            let theirs = at.path().join("theirs");
            fs::write(&theirs, "theirs").unwrap();
            std::os::unix::fs::chown(&theirs, Some(61_001), Some(61_001)).unwrap();
            fs::hard_link(&theirs, out.join("linked")).unwrap();
            assert_eq!(of_out.read(Path::new("linked")).unwrap_err().kind(), PermissionDenied);
        }
    }

    #[test]
    fn a_name_exchanged_after_the_handover_does_not_redirect_reads() {
        let users = Arc::new(Users::default());
        let at = testing::tempdir().unwrap();
        let (out, way, secret) = (at.path().join("out"), at.path().join("way"), at.path().join("secret"));
        for (directory, text) in [(&out, "own"), (&secret, "secret")] {
            fs::create_dir(directory).unwrap();
            fs::write(directory.join("file"), text).unwrap();
        }
        symlink(&secret, &way).unwrap();
        users.hand_over(own(), &out, open(&out)).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, &out, CWD, &way, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let reading = users.read_for(own()).unwrap();
            for _ in 0..2_000 {
                let file = reading.open(&out).and_then(|at| at.read(Path::new("file"))).unwrap();
                assert_eq!(io::read_to_string(file).unwrap(), "own");
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_user_who_hands_over_very_many_loses_the_oldest_and_uses_no_more_descriptors() {
        let users = Arc::new(Users::default());
        let at = testing::tempdir().unwrap();
        let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
        let name = |index: usize| at.path().join(index.to_string());
        (0..4 * MAX_DIRECTORIES_EACH).for_each(|index| fs::create_dir(name(index)).unwrap());
        (0..MAX_DIRECTORIES_EACH)
            .for_each(|index| users.hand_over(own(), &name(index), open(&name(index))).unwrap());
        let before = descriptors();
        (MAX_DIRECTORIES_EACH..4 * MAX_DIRECTORIES_EACH)
            .for_each(|index| users.hand_over(own(), &name(index), open(&name(index))).unwrap());
        // Other tests of this process open files at the same time.
        assert!(descriptors() < before + MAX_DIRECTORIES_EACH);
        let reading = users.read_for(own()).unwrap();
        assert!(reading.open(&name(0)).is_err() && reading.open(&name(4 * MAX_DIRECTORIES_EACH - 1)).is_ok());
        // The descriptor of a removed directory is closed.
        fs::remove_dir(name(4 * MAX_DIRECTORIES_EACH - 1)).unwrap();
        assert!(reading.open(&name(4 * MAX_DIRECTORIES_EACH - 1)).is_err());
    }

    #[test]
    fn reading_without_free_descriptors_is_an_error_and_works_again_afterwards() {
        let users = Arc::new(Users::default());
        let at = testing::tempdir().unwrap();
        fs::write(at.path().join("file"), "own").unwrap();
        users.hand_over(own(), at.path(), open(at.path())).unwrap();
        let read = || {
            let reading = users.read_for(own()).unwrap();
            reading.open(at.path()).and_then(|at| at.read(Path::new("file")))
        };
        testing::without_descriptors(|| assert!(read().is_err()));
        assert_eq!(io::read_to_string(read().unwrap()).unwrap(), "own");
    }
}
