//! Accesses files of a user with that user's rights: an agent that runs as root must not read or write for a launcher what its
//! user may not.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};
use serde::{Deserialize, Serialize};

use crate::beneath::Beneath;
use crate::handed_over::Reading;

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

/// The supplementary groups of users, as the kernel reported them at their last call.
static GROUPS: RwLock<Groups> = RwLock::new(BTreeMap::new());

/// Records the supplementary groups of a user's process, as the kernel reports them: files that the user reaches only through such a
/// group are then reachable for that user too.
pub fn learn_groups(user: User, groups: &[u32]) {
    let mut known = GROUPS.write().unwrap_or_else(PoisonError::into_inner);
    if known.len() >= KNOWN && !known.contains_key(&(user.uid, user.gid)) {
        known.clear();
    }
    known.insert((user.uid, user.gid), groups.into());
}

/// The groups that the kernel reported, or those in the account database: after a start of the agent, until the user calls.
pub fn groups_of(user: User) -> Arc<[u32]> {
    let of = (user.uid, user.gid);
    if let Some(groups) = GROUPS.read().unwrap_or_else(PoisonError::into_inner).get(&of) {
        return Arc::clone(groups);
    }
    let account = nix::unistd::User::from_uid(Uid::from_raw(user.uid)).ok().flatten();
    let name = account.and_then(|account| std::ffi::CString::new(account.name).ok());
    let listed = name.and_then(|name| nix::unistd::getgrouplist(&name, Gid::from_raw(user.gid)).ok());
    let groups: Vec<u32> = listed.unwrap_or_default().iter().map(|group| group.as_raw()).collect();
    learn_groups(user, &groups);
    groups.into()
}

/// While this value lives, this thread accesses files as another user. The kernel keeps that per thread, and also drops the
/// capabilities that override permissions. The supplementary groups are the user's too, none of this process.
#[derive(Debug)]
pub(crate) struct UserGuard {
    /// If this process may not act as the user: access to what that user handed over.
    reading: Option<Reading>,
    before: User,
    groups: Vec<rustix::fs::Gid>,
    is_other: bool,
    // The rights belong to this thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl UserGuard {
    pub(crate) fn user(user: User) -> io::Result<UserGuard> {
        UserGuard::by_rights(user).or_else(|error| {
            let reading = Reading::of(user.uid).ok_or(error)?;
            let before = User::own();
            let not_send = std::marker::PhantomData;
            Ok(UserGuard {
                reading: Some(reading),
                before,
                groups: Vec::new(),
                is_other: false,
                _not_send: not_send,
            })
        })
    }

    /// Same as [`UserGuard::user`], but fails if the user's files can only be read.
    pub(crate) fn to_write(user: User) -> io::Result<UserGuard> {
        UserGuard::by_rights(user)
    }

    fn by_rights(user: User) -> io::Result<UserGuard> {
        let before = User::own();
        let mut groups = Vec::new();
        if user != before {
            groups = rustix::process::getgroups()?;
            let theirs = groups_of(user);
            let theirs: Vec<_> = theirs.iter().map(|group| rustix::fs::Gid::from_raw(*group)).collect();
            if groups != theirs {
                match rustix::thread::set_thread_groups(&theirs) {
                    Ok(()) => {}
                    // An agent that is not root cannot act as another user anyway; the error is reported below.
                    Err(error) if before.uid == 0 => return Err(error.into()),
                    Err(_) => return Err(cannot(before, user)),
                }
            }
            // Group first: as another user the thread may no longer change it.
            setfsgid(Gid::from_raw(user.gid));
            setfsuid(Uid::from_raw(user.uid));
            // These calls report no errors; the next one returns the current value.
            let holds = setfsuid(Uid::from_raw(u32::MAX));
            if holds.as_raw() != user.uid {
                let not_send = std::marker::PhantomData;
                drop(UserGuard { reading: None, before, groups, is_other: true, _not_send: not_send });
                return Err(cannot(before, user));
            }
        }
        let not_send = std::marker::PhantomData;
        Ok(UserGuard { reading: None, before, groups, is_other: user != before, _not_send: not_send })
    }
}

/// Whether this process can serve `user` in `directory`: it may act as that user, or read there what the user handed over.
///
/// # Errors
/// It may do neither of these.
pub fn may_serve(user: User, directory: &Path) -> io::Result<()> {
    if UserGuard::to_write(user).is_ok() {
        return Ok(());
    }
    let _as_user = UserGuard::user(user)?;
    Beneath::open(directory)?.list(Path::new(""))?;
    Ok(())
}

fn cannot(before: User, user: User) -> io::Error {
    let problem = format!("this agent runs as user {} and cannot act as user {}", before.uid, user.uid);
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

impl Drop for UserGuard {
    fn drop(&mut self) {
        if self.reading.is_some() {
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
