//! Checks the watched directories and launchers' memory with the rights of their users.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint_format::MANIFEST_NAME;
use rustix::fs::FileType;

use super::{Found, Inner, LocalShards, Watched};
use crate::beneath::Beneath;
use crate::files::tree::Mark;
use crate::medium::medium_at;
use crate::peer::pooled::{self, Pooled};
use crate::peer::sealed::Sealed;
use crate::peer::user::{Access, User};

/// The mark of a file when it was last read, and its manifest; none if it was not valid.
pub(super) type LastRead = (Mark, Option<Arc<Sealed>>);

/// Maximum time for the check of one place before the check continues without it.
const LOOK_WITHIN: Duration = Duration::from_secs(2);

/// Manifests that were read, by user and path.
pub(super) type Read = BTreeMap<(u32, PathBuf), LastRead>;

/// The result of checking one place.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) pooled: Vec<Pooled>,
    pub(super) looked: Read,
    pub(super) shards: Vec<(String, Found)>,
}

/// Whether a check of a place is running, and whether it is stuck.
#[derive(Debug, Default)]
pub(super) struct Turn {
    is_taken: AtomicBool,
    is_stuck: AtomicBool,
}

impl Turn {
    fn take(&self) -> bool {
        !self.is_taken.swap(true, Ordering::SeqCst)
    }

    fn end(&self) {
        self.is_stuck.store(false, Ordering::SeqCst);
        self.is_taken.store(false, Ordering::SeqCst);
    }
}

impl LocalShards {
    /// Checks one place on a separate thread. A check that does not return is waited for once, and not started again until it has returned.
    pub(super) fn look_aside(
        &self,
        place: &Watched,
        were_read: &Arc<Read>,
        known: &Arc<Vec<Pooled>>,
    ) -> Option<Seen> {
        let turn = {
            let mut inner = self.inner();
            let Inner { turns, watched, .. } = &mut *inner;
            turns.retain(|(uid, directory), _| {
                watched.iter().any(|of| of.user.uid == *uid && of.directory == *directory)
            });
            Arc::clone(turns.entry((place.user.uid, place.directory.clone())).or_default())
        };
        let until = Instant::now() + LOOK_WITHIN;
        // Another check may be running that started before the change that this one is about.
        while !turn.take() {
            if turn.is_stuck.load(Ordering::SeqCst) || Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let (reported, reports) = std::sync::mpsc::sync_channel(1);
        let access = self.users.access(place.user);
        let (place, were_read, known, of_thread) =
            (place.clone(), Arc::clone(were_read), Arc::clone(known), Arc::clone(&turn));
        let work = move || {
            let seen = look_at(&place, &access, &were_read, &known);
            of_thread.end();
            let _ = reported.send(seen);
        };
        if std::thread::Builder::new().name("ckpt-look".to_owned()).spawn(work).is_err() {
            turn.end();
            return None;
        }
        let seen = reports.recv_timeout(until.saturating_duration_since(Instant::now()));
        if seen.is_err() {
            turn.is_stuck.store(true, Ordering::SeqCst);
            tracing::warn!(
                "a watched checkpoint directory does not answer: what was seen there last is offered"
            );
        }
        seen.ok()
    }
}

/// Checks one place.
fn look_at(place: &Watched, access: &Access, were_read: &Read, known: &[Pooled]) -> Seen {
    let mut seen = Seen::default();
    if let Some(pool) = &place.pool {
        seen.pooled = pooled::look(pool, access, &place.run, known);
    }
    let Ok(as_user) = access.act() else { return seen };
    let Ok(at) = as_user.open(&place.directory) else { return seen };
    let medium = medium_at(&at);
    for below in rank_directories(&at) {
        let manifest = below.join(MANIFEST_NAME);
        let path = place.directory.join(&manifest);
        let Some(mark) = mark_of(&at, &manifest, place.user) else { continue };
        let known = were_read
            .get(&(place.user.uid, path.clone()))
            .filter(|(before, _)| *before == mark)
            .map(|(_, sealed)| sealed.clone());
        // Only agents create and store pieces: no rank seals one.
        let read = || {
            let sealed = Sealed::read_in(&at, &manifest).ok();
            let sealed = sealed.filter(|sealed| sealed.shard.piece.is_none())?;
            sealed.owned_as(&place.run).ok()
        };
        let sealed = known.unwrap_or_else(|| read().map(Arc::new));
        seen.looked.insert((place.user.uid, path), (mark, sealed.clone()));
        if let Some(sealed) = sealed {
            let (root, access) = (place.directory.clone(), access.clone());
            let found = Found { sealed: Arc::clone(&sealed), root, below, access, medium };
            seen.shards.push((sealed.shard.root.clone(), found));
        }
    }
    seen
}

/// The directories of ranks below `directory`: `step-*/rank-*`.
pub(crate) fn rank_directories(at: &Beneath) -> Vec<PathBuf> {
    let named = |below: &Path, prefix: &str| -> Vec<PathBuf> {
        let is_ours = |name: &str| {
            let digits = name.strip_prefix(prefix);
            digits
                .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let names = at.list(below).unwrap_or_default().into_iter().map(|(name, _)| name);
        names.filter(|name| name.to_str().is_some_and(is_ours)).map(|name| below.join(name)).collect()
    };
    named(Path::new(""), "step-").iter().flat_map(|step| named(step, "rank-")).collect()
}

fn mark_of(at: &Beneath, below: &Path, user: User) -> Option<Mark> {
    let found = at.stat(below).ok().filter(|found| found.st_uid == user.uid)?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    is_file.then(|| Mark::of_stat(&found))
}
