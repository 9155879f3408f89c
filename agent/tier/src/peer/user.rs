//! Files of a user are touched with that user's rights: an agent of root's must not read or write for a launcher what its
//! user may not.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};
use serde::{Deserialize, Serialize};

use crate::beneath::Beneath;
use crate::handed::Reading;

/// A user and the group of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl User {
    /// Who this process is.
    pub fn own() -> User {
        User { uid: geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
    }
}

/// Users whose groups are kept; beyond that the accounts are asked again.
const KNOWN: usize = 4096;

/// Groups by user and main group.
type Groups = BTreeMap<(u32, u32), Arc<[u32]>>;

/// The supplementary groups of users, as the kernel named them when they last called.
static GROUPS: RwLock<Groups> = RwLock::new(BTreeMap::new());

/// Notes which supplementary groups a user's process has, by the kernel's word: files that a user reaches by such a group alone are
/// reached for that user too.
pub fn learn_groups(user: User, groups: &[u32]) {
    let mut known = GROUPS.write().unwrap_or_else(PoisonError::into_inner);
    if known.len() >= KNOWN && !known.contains_key(&(user.uid, user.gid)) {
        known.clear();
    }
    known.insert((user.uid, user.gid), groups.into());
}

/// What the kernel said, or else what the accounts of this host say: after a start of the agent, until the user calls.
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

/// While it lives, this thread touches files as another user. The kernel keeps that for each thread, and takes the
/// capabilities that pass over permissions along with it. The supplementary groups are the user's too, and none of this process's.
#[derive(Debug)]
pub(crate) struct As {
    /// Where this process may not act as the user: what that user handed over is read.
    reading: Option<Reading>,
    before: User,
    groups: Vec<rustix::fs::Gid>,
    is_other: bool,
    // The rights are this thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl As {
    pub(crate) fn user(user: User) -> io::Result<As> {
        As::by_rights(user).or_else(|error| {
            let reading = Reading::of(user.uid).ok_or(error)?;
            let before = User::own();
            let not_send = std::marker::PhantomData;
            Ok(As {
                reading: Some(reading),
                before,
                groups: Vec::new(),
                is_other: false,
                _not_send: not_send,
            })
        })
    }

    /// The same, and not where the user's files can only be read.
    pub(crate) fn to_write(user: User) -> io::Result<As> {
        As::by_rights(user)
    }

    fn by_rights(user: User) -> io::Result<As> {
        let before = User::own();
        let mut groups = Vec::new();
        if user != before {
            groups = rustix::process::getgroups()?;
            let theirs = groups_of(user);
            let theirs: Vec<_> = theirs.iter().map(|group| rustix::fs::Gid::from_raw(*group)).collect();
            if groups != theirs {
                match rustix::thread::set_thread_groups(&theirs) {
                    Ok(()) => {}
                    // An agent that is not root cannot act as another one anyway, which is said below.
                    Err(error) if before.uid == 0 => return Err(error.into()),
                    Err(_) => return Err(cannot(before, user)),
                }
            }
            // The group first: as another user the thread may not change it any more.
            setfsgid(Gid::from_raw(user.gid));
            setfsuid(Uid::from_raw(user.uid));
            // These calls report no errors; the next one returns what holds.
            let holds = setfsuid(Uid::from_raw(u32::MAX));
            if holds.as_raw() != user.uid {
                let not_send = std::marker::PhantomData;
                drop(As { reading: None, before, groups, is_other: true, _not_send: not_send });
                return Err(cannot(before, user));
            }
        }
        let not_send = std::marker::PhantomData;
        Ok(As { reading: None, before, groups, is_other: user != before, _not_send: not_send })
    }
}

/// Whether this process can serve `user` in `directory`: it may act as that user, or read there what the user handed over.
///
/// # Errors
/// It may do neither.
pub fn may_serve(user: User, directory: &Path) -> io::Result<()> {
    if As::to_write(user).is_ok() {
        return Ok(());
    }
    let _as_user = As::user(user)?;
    Beneath::open(directory)?.list(Path::new(""))?;
    Ok(())
}

fn cannot(before: User, user: User) -> io::Error {
    let problem = format!("this agent runs as user {} and cannot act as user {}", before.uid, user.uid);
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

impl Drop for As {
    fn drop(&mut self) {
        if self.reading.is_some() {
            return;
        }
        setfsuid(Uid::from_raw(self.before.uid));
        setfsgid(Gid::from_raw(self.before.gid));
        if self.is_other {
            // They were this thread's a moment ago.
            let _ = rustix::thread::set_thread_groups(&self.groups);
        }
    }
}
