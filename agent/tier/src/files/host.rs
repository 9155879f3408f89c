//! What a watched directory needs from its host: its owner, a wake-up signal, the service among peers, and the attempt of a step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mainstay_checkpoint::placement::score;

use super::FilesError;
use super::catalog::Catalog;
use super::tree::Member;
use crate::beneath::Beneath;
use crate::lock;
use crate::peer::service::Service;
use crate::peer::user::{Access, User, UserGuard, Users};
use crate::peer::{Progress, WatchedDirectory};

/// Number of attempts per decision: a step that is written again long after it was sealed gets the next one, so that its parts are
/// never joined with earlier parts.
pub(super) const ATTEMPTS_PER_DECISION: u64 = 1000;

/// Wakes a thread when there may be work, or when it has to stop.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung: Mutex<bool>,
    received: Condvar,
    over: AtomicBool,
}

impl Bell {
    pub(super) fn ring(&self) {
        *lock(&self.rung) = true;
        self.received.notify_all();
    }

    pub(super) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Waits until it is rung, at most `longest`. Returns false when the thread has to stop.
    pub(super) fn wait(&self, longest: Duration) -> bool {
        let rung = lock(&self.rung);
        let waited = self.received.wait_timeout_while(rung, longest, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        !self.is_over()
    }
}

/// A directory and the user whose rights are used in it.
#[derive(Clone, Debug)]
pub(super) struct UserDirectory {
    pub(super) access: Access,
    pub(super) at: Beneath,
}

impl UserDirectory {
    /// Makes this thread act as the user while the returned value lives.
    pub(super) fn act(&self) -> Result<UserGuard, FilesError> {
        self.access.act().map_err(FilesError::reading(self.at.path()))
    }
}

/// The user whose rights are used in one directory. It is determined once: at registration, or when a directory of the configuration is
/// first seen. If the directory later belongs to another user, because its name was exchanged or leads elsewhere, it counts as missing.
#[derive(Debug)]
pub(super) struct DirectoryUser {
    user: OnceLock<User>,
    users: Arc<Users>,
    /// Whether a user requested the directory: then it must be a directory itself, not a link to one.
    asked_for: bool,
}

impl DirectoryUser {
    pub(super) fn new(users: &Arc<Users>, user: Option<User>) -> DirectoryUser {
        let asked_for = user.is_some();
        // For root, the directory's owner is used: the owner may change the content and redirect root.
        let user = user.filter(|user| user.uid != 0);
        let user = user.map_or_else(OnceLock::new, OnceLock::from);
        DirectoryUser { user, users: Arc::clone(users), asked_for }
    }

    /// The directory and its user, if it exists and still belongs to this user; this process's user if it may not act as another one.
    /// Everything after this goes through the descriptor, so a later change of the name has no effect.
    pub(super) fn in_directory(&self, directory: &Path) -> Option<UserDirectory> {
        let own = User::own();
        let is_root = own.uid == 0;
        // A directory that a user requested is accessed as that user only; one of the configuration with this process's rights.
        let user = self.known().filter(|_| is_root || self.asked_for).unwrap_or(own);
        let with_rights = |user, at| UserDirectory { access: self.users.access(user), at };
        let as_user = self.users.access(user).act().ok()?;
        let at = match self.asked_for {
            true => as_user.open_no_link(directory),
            false => as_user.open(directory),
        };
        let at = at.ok()?;
        let found = at.own_stat().ok()?;
        if !is_root {
            return (!self.asked_for || user.uid == found.st_uid).then(|| with_rights(user, at));
        }
        let user = *self.user.get_or_init(|| User { uid: found.st_uid, gid: found.st_gid });
        (user.uid == found.st_uid).then(|| with_rights(user, at))
    }

    /// The user, if known before the directory exists.
    pub(super) fn known(&self) -> Option<User> {
        self.user.get().copied()
    }
}

/// Identity of the directory: its file system and its inode number.
#[allow(clippy::useless_conversion, reason = "the kernel's types differ between processors")]
pub(super) fn identity(folder: &UserDirectory) -> Option<(u64, u64)> {
    let found = folder.at.own_stat().ok()?;
    Some((found.st_dev.into(), found.st_ino.into()))
}

/// The directory of restored archives until they are unpacked.
pub(super) fn spool_of(spool: &Path, run: &str) -> WatchedDirectory {
    WatchedDirectory { run: run.to_owned(), directory: spool.to_owned(), user: User::own(), pool: None }
}

/// The archive of one part of a step in the spool, and its directory.
pub(super) fn in_spool(spool: &Path, step: u64, part: u32) -> PathBuf {
    spool.join(format!("step-{step:012}")).join(format!("rank-{part:05}"))
}

/// The number of the current decision for a run that this agent has received.
pub(super) fn fence(service: &Service, run: &str) -> u64 {
    let known = service.shared.decisions().newest(run).map_or(0, |decision| decision.fence);
    let copies = service.shared.copies();
    let of_run = copies.iter().filter(|copy| copy.shard.key.run_id() == run);
    of_run
        .map(|copy| copy.shard.key.attempt / ATTEMPTS_PER_DECISION)
        .max()
        .map_or(known, |newest| newest.max(known))
}

/// Stores the current decision so that it outlives this process: what is sealed next belongs to it.
pub(super) fn keep_decision(service: &Service, run: &str, catalog: &Catalog) {
    let known = catalog.decision();
    let newest = service.shared.decisions().newest(run).cloned();
    match (newest, known) {
        (None, Some(known)) => _ = service.shared.decisions().store(&known),
        (Some(newest), known) if known.as_ref() != Some(&newest) => catalog.note_decision(&newest),
        _ => {}
    }
}

/// Whether this host is the one that handles files that all hosts see.
pub(super) fn is_first(service: &Service, run: &str) -> bool {
    let me = service.name();
    let mine = score(run, me);
    service.shared.alive().iter().all(|other| (score(run, other), other.as_str()) < (mine, me))
}

/// The time since which the files of each step are unchanged.
pub(super) fn since(
    mut before: BTreeMap<u64, (Instant, Vec<Member>)>,
    now: BTreeMap<u64, Vec<Member>>,
) -> BTreeMap<u64, (Instant, Vec<Member>)> {
    let with_time = |(step, members): (u64, Vec<Member>)| match before.remove(&step) {
        Some((since, same)) if same == members => (step, (since, same)),
        _ => (step, (Instant::now(), members)),
    };
    now.into_iter().map(with_time).collect()
}

/// Whether they have been unchanged for at least one check interval.
pub(super) fn is_same(
    before: &BTreeMap<u64, (Instant, Vec<Member>)>,
    step: u64,
    now: Option<&Vec<Member>>,
    interval: Duration,
) -> bool {
    before.get(&step).is_some_and(|(since, members)| Some(members) == now && since.elapsed() >= interval)
}

/// Reports one line to the caller of a restore.
pub(super) fn report_line(report: &(dyn Fn(Progress) + Sync), step: u64, message: String) {
    report(Progress::line(step, 0, message));
}

/// Offers these packs in place of the previous ones.
pub(super) fn offer(service: &Service, directory: &Path, run: &str, packs: Vec<Arc<super::Pack>>) {
    if service.shared.own.set_packs(directory, run, packs) {
        service.nudge();
    }
}
