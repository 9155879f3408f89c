//! File systems, which may hang: each is asked on one of our threads, and no caller waits for it.
//!
//! One thread asks all of them, one after the other. If one does not answer while others wait, that thread is left with it
//! and a new one asks the others; the old thread ends when its file system answers. A file system with a pending request is
//! not asked again, so at most one thread hangs per file system.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_health::host::os::{Disk, Reading, Space};
use mainstay_health::parse::mounts::{Mount, meant_writable, mount_of, parse_mounts};
use mainstay_model::time::{Mono, Span};
use mainstay_sys::apart::apart;
use nix::sys::statvfs::{FsFlags, statvfs};

use super::proc::read;

/// After this time without an answer, a file system that has answered before counts as silent.
const SILENT_AFTER: Span = Span::seconds(10);

/// The stack of a thread that only calls statvfs.
const STACK_BYTES: usize = 128 << 10;

/// Asks a path's file system. May block indefinitely.
pub type Ask = dyn Fn(&Path) -> io::Result<Probed> + Send + Sync;

/// The answer of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// The path without symbolic links, which identifies its mount.
    pub path: PathBuf,
    /// Its total and free space.
    pub space: Space,
    /// Whether it is read-only.
    pub read_only: bool,
}

/// Asks with statvfs. A path that does not exist represents the nearest existing directory above it.
pub fn ask_statvfs(path: &Path) -> io::Result<Probed> {
    for ancestor in path.ancestors() {
        let path = match std::fs::canonicalize(ancestor) {
            Ok(path) => path,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let stat = statvfs(&path)?;
        let blocks = |count: u64| count.saturating_mul(stat.fragment_size());
        return Ok(Probed {
            space: Space {
                total: blocks(stat.blocks()),
                free: blocks(stat.blocks_available()),
                inodes: stat.files(),
                inodes_free: stat.files_available(),
            },
            read_only: stat.flags().contains(FsFlags::ST_RDONLY),
            path,
        });
    }
    Err(ErrorKind::NotFound.into())
}

/// The watched paths and their state.
pub(super) struct DiskProbes {
    queue: Arc<ProbeQueue>,
    watched: BTreeMap<PathBuf, WatchedDisk>,
}

impl std::fmt::Debug for DiskProbes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskProbes").field("watched", &self.watched).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct WatchedDisk {
    /// When it was asked, while the answer is pending.
    asked: Option<Mono>,
    answer: Option<Result<Probed, String>>,
    /// No longer watched; kept only while an answer is pending.
    dropped: bool,
}

impl WatchedDisk {
    /// The path that identifies its mount: without symbolic links once they are resolved.
    fn place<'a>(&'a self, path: &'a Path) -> &'a Path {
        match &self.answer {
            Some(Ok(probed)) => &probed.path,
            Some(Err(_)) | None => path,
        }
    }

    /// Since when it is silent, if that is too long.
    fn silent_since(&self, now: Mono) -> Option<Mono> {
        let slow = |asked: &Mono| self.answer.is_none() || now.since(*asked) >= SILENT_AFTER;
        self.asked.filter(slow)
    }
}

impl DiskProbes {
    pub(super) fn new(paths: Vec<PathBuf>, ask: Box<Ask>) -> DiskProbes {
        let queue = Arc::new(ProbeQueue { ask, state: Mutex::default(), wake: Condvar::new() });
        let mut probes = DiskProbes { queue, watched: BTreeMap::new() };
        probes.watch(paths);
        probes
    }

    pub(super) fn watch(&mut self, paths: Vec<PathBuf>) {
        let paths: BTreeSet<PathBuf> = paths.into_iter().collect();
        self.watched.retain(|path, watched| {
            watched.dropped = !paths.contains(path);
            !watched.dropped || watched.asked.is_some()
        });
        for path in paths {
            self.watched.entry(path).or_default();
        }
    }

    /// One entry per mount, in the order of their paths.
    pub(super) fn sample(
        &mut self,
        now: Mono,
        mountinfo: &Path,
        fstab: &Path,
        patience: Duration,
    ) -> Vec<Disk> {
        let mounts = read(mountinfo).map(|text| parse_mounts(&text));
        let fstab = std::fs::read_to_string(fstab).unwrap_or_default();
        let table = mounts.as_deref().unwrap_or_default();
        // Late answers show that a mount has recovered, and that it can be asked again.
        let late = std::mem::take(&mut ProbeQueue::lock(&self.queue).answers);
        self.take(late);
        let mut asked = BTreeSet::new();
        while self.ask(now, table, &mut asked) {
            let answers = self.queue.wait(patience);
            self.take(answers);
        }

        let mut disks: BTreeMap<PathBuf, Disk> = BTreeMap::new();
        for (path, watched) in self.watched.iter().filter(|(_, watched)| !watched.dropped) {
            let mount = mount_of(table, watched.place(path));
            let point = mount.map_or_else(|| path.clone(), |mount| mount.point.clone());
            let disk = watched.report(now, &point, mount, mounts.as_ref().err(), &fstab);
            // Of several paths on one mount, one with a pending request comes first, then one with an answer.
            let known = disks.entry(point).or_insert_with(|| disk.clone());
            let tells_more = known.silent_since.is_none() && known.space.value().is_none();
            if disk.silent_since.is_some() || tells_more {
                *known = disk;
            }
        }
        disks.into_values().collect()
    }

    /// Asks one path of each mount without a pending request, among those not asked yet. Returns false if none is left.
    fn ask(&mut self, now: Mono, mounts: &[Mount], asked: &mut BTreeSet<PathBuf>) -> bool {
        let point = |path: &Path, watched: &WatchedDisk| {
            let place = watched.place(path);
            mount_of(mounts, place).map_or_else(|| place.to_owned(), |mount| mount.point.clone())
        };
        let mut owing: BTreeSet<PathBuf> = self
            .watched
            .iter()
            .filter(|(_, watched)| watched.asked.is_some())
            .map(|(path, watched)| point(path, watched))
            .collect();
        let mut questions = Vec::new();
        for (path, watched) in &mut self.watched {
            let open = !watched.dropped && watched.asked.is_none() && !asked.contains(path);
            if open && owing.insert(point(path, watched)) {
                watched.asked = Some(now);
                asked.insert(path.clone());
                questions.push(path.clone());
            }
        }
        let some = !questions.is_empty();
        self.queue.put(questions);
        some
    }

    fn take(&mut self, answers: Vec<(PathBuf, Result<Probed, String>)>) {
        for (path, answer) in answers {
            if let Some(watched) = self.watched.get_mut(&path) {
                watched.asked = None;
                watched.answer = Some(answer);
            }
        }
        self.watched.retain(|_, watched| !watched.dropped || watched.asked.is_some());
    }
}

impl Drop for DiskProbes {
    fn drop(&mut self) {
        ProbeQueue::lock(&self.queue).closed = true;
        self.queue.wake.notify_all();
    }
}

impl WatchedDisk {
    fn report(
        &self,
        now: Mono,
        point: &Path,
        mount: Option<&Mount>,
        no_table: Option<&String>,
        fstab: &str,
    ) -> Disk {
        let probed = match &self.answer {
            Some(Ok(probed)) => Ok(probed),
            Some(Err(why)) => Err(why.clone()),
            None => Err("it was not asked yet".to_owned()),
        };
        let refuses = probed.as_ref().is_ok_and(|probed| probed.read_only);
        let read_only = match (mount, no_table) {
            (Some(mount), _) => Reading::Value(mount.read_only || refuses),
            (None, _) if refuses => Reading::Value(true),
            (None, Some(why)) => Reading::Failed(why.clone()),
            (None, None) => Reading::Failed("the table of mounts does not have it".to_owned()),
        };
        Disk {
            mount: point.display().to_string(),
            space: probed.map_or_else(Reading::Failed, |probed| Reading::Value(probed.space)),
            silent_since: self.silent_since(now),
            read_only,
            meant_writable: meant_writable(fstab, point)
                .filter(|_| !mount.is_some_and(|mount| mount.by_choice)),
        }
    }
}

/// Holds the requests and the answers.
struct ProbeQueue {
    ask: Box<Ask>,
    state: Mutex<ProbeQueueState>,
    wake: Condvar,
}

#[derive(Default)]
struct ProbeQueueState {
    questions: VecDeque<PathBuf>,
    answers: Vec<(PathBuf, Result<Probed, String>)>,
    /// The thread that takes requests; threads with earlier numbers keep the one they have.
    worker: u64,
    /// That thread is working on a request.
    busy: bool,
    closed: bool,
}

impl ProbeQueue {
    fn lock(queue: &Arc<ProbeQueue>) -> MutexGuard<'_, ProbeQueueState> {
        queue.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(self: &Arc<ProbeQueue>, paths: Vec<PathBuf>) {
        let mut state = ProbeQueue::lock(self);
        state.questions.extend(paths);
        if state.worker == 0 && !state.questions.is_empty() {
            self.hire(&mut state);
        }
        self.wake.notify_all();
    }

    /// Waits until all requests are answered, at most `patience`. A thread that blocks the others is abandoned, and they
    /// get their time.
    fn wait(self: &Arc<ProbeQueue>, patience: Duration) -> Vec<(PathBuf, Result<Probed, String>)> {
        let mut deadline = Instant::now() + patience;
        let mut state = ProbeQueue::lock(self);
        while state.busy || !state.questions.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let left_alone = state.busy && self.hire(&mut state);
                if !left_alone || state.questions.is_empty() {
                    break;
                }
                deadline = Instant::now() + patience;
                continue;
            }
            state = self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.answers.drain(..).collect()
    }

    /// Starts the next thread. Without one the requests stay, and their file systems count as silent.
    fn hire(self: &Arc<ProbeQueue>, state: &mut ProbeQueueState) -> bool {
        let (queue, number) = (self.clone(), state.worker + 1);
        let thread = std::thread::Builder::new().name("disk-probe".to_owned()).stack_size(STACK_BYTES);
        match thread.spawn(move || queue.work(number)) {
            Ok(_) => {
                (state.worker, state.busy) = (number, false);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "no thread can be started to ask file systems");
                false
            }
        }
    }

    fn work(self: Arc<ProbeQueue>, number: u64) {
        let mut state = ProbeQueue::lock(&self);
        while state.worker == number && !state.closed {
            let Some(path) = state.questions.pop_front() else {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.busy = true;
            drop(state);
            // A thread that waits for a file system would keep this process from ending.
            let answer = apart(c"disk-probe", &[], || (self.ask)(&path))
                .unwrap_or_else(|| Err(io::Error::other("the process that asked was killed")))
                .map_err(|error| format!("asking {}: {error}", path.display()));
            state = ProbeQueue::lock(&self);
            state.answers.push((path, answer));
            if state.worker == number {
                state.busy = false;
            }
            self.wake.notify_all();
        }
    }
}
