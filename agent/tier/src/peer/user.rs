//! Accesses files of a user with that user's rights: an agent that runs as root must not read or write for a launcher what its
//! user may not.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};
use serde::{Deserialize, Serialize};

use crate::beneath::Beneath;
use crate::handed_over::HandedOver;
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
const KNOWN: usize = 4096;

/// Groups by user and main group.
type Groups = BTreeMap<(u32, u32), Arc<[u32]>>;

/// What this process knows of the users for whom it acts, and what they gave it.
#[derive(Debug, Default)]
pub struct Users {
    /// Their supplementary groups, as the kernel reported them at their last call.
    groups: RwLock<Groups>,
    handed_over: HandedOver,
    pub(crate) lent_files: LentFiles,
}

impl Users {
    /// Records the supplementary groups of a user's process, as the kernel reports them: files that the user reaches only
    /// through such a group are then reachable for that user too.
    pub fn learn_groups(&self, user: User, groups: &[u32]) {
        let mut known = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KNOWN && !known.contains_key(&(user.uid, user.gid)) {
            known.clear();
        }
        known.insert((user.uid, user.gid), groups.into());
    }

    /// The groups that the kernel reported, or those in the account database: after a start of the agent, until the user
    /// calls.
    pub fn groups_of(&self, user: User) -> Arc<[u32]> {
        let of = (user.uid, user.gid);
        if let Some(groups) = self.groups.read().unwrap_or_else(PoisonError::into_inner).get(&of) {
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
    ///
    /// # Errors
    /// It is not a directory open for reading, belongs to another user, or there are too many.
    pub fn hand_over(&self, uid: u32, path: &Path, directory: OwnedFd) -> io::Result<()> {
        self.handed_over.keep(uid, path, directory)
    }

    /// Keeps files that the user `uid`, as reported by the kernel, opened for the restore with this token. `first` is the
    /// number of the first file: one message carries a part of them.
    ///
    /// # Errors
    /// One is not a file of that user that is open for writing, or no restore waits for them.
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
