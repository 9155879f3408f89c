//! Files of a user are touched with that user's rights: an agent of root's must not read or write for a launcher what its
//! user may not.

use std::io;

use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};
use serde::{Deserialize, Serialize};

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

/// While it lives, this thread touches files as another user. The kernel keeps that for each thread, and takes the
/// capabilities that pass over permissions along with it. This process's supplementary groups go too: they are not the user's.
#[derive(Debug)]
pub(crate) struct As {
    before: User,
    groups: Vec<rustix::fs::Gid>,
    // The rights are this thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl As {
    pub(crate) fn user(user: User) -> io::Result<As> {
        let before = User::own();
        let mut groups = Vec::new();
        if user != before {
            groups = rustix::process::getgroups()?;
            if !groups.is_empty() {
                rustix::thread::set_thread_groups(&[])?;
            }
            // The group first: as another user the thread may not change it any more.
            setfsgid(Gid::from_raw(user.gid));
            setfsuid(Uid::from_raw(user.uid));
            // These calls report no errors; the next one returns what holds.
            let holds = setfsuid(Uid::from_raw(u32::MAX));
            if holds.as_raw() != user.uid {
                drop(As { before, groups, _not_send: std::marker::PhantomData });
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!("this agent runs as user {} and cannot act as user {}", before.uid, user.uid),
                ));
            }
        }
        Ok(As { before, groups, _not_send: std::marker::PhantomData })
    }
}

impl Drop for As {
    fn drop(&mut self) {
        setfsuid(Uid::from_raw(self.before.uid));
        setfsgid(Gid::from_raw(self.before.gid));
        if !self.groups.is_empty() {
            // They were this thread's a moment ago.
            let _ = rustix::thread::set_thread_groups(&self.groups);
        }
    }
}
