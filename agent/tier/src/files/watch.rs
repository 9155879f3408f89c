//! A directory into which a trainer writes checkpoints in its own format. A step that is complete by its framework's mark and sound by its
//! formats is sealed, offered to peers and durable storage, and restored on a host that has lost it (`restore`). A step that differs from
//! its seal (`compare`) is no longer offered. The trainer's files are read and never changed.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FileType;

use mainstay_checkpoint::files::{
    DirectorySnapshot, Proof, Rule, Seen, Written, complete, in_place, proof, rule_of, texts,
};

use super::FilesError;
use super::catalog::Catalog;
use super::copies::Copies;
use super::delegated::{Left, Started};
use super::host::{self, AGAIN, Bell, DirectoryUser, Place};
use super::tree::{self, Mark, Member};
use super::unsealed::Unsealed;
use crate::beneath::Beneath;
use crate::os::lower_priority;
use crate::peer::user::User;
use crate::peer::{Progress, Restored, Service};

/// Number of the newest steps that are checked: older ones were sealed when they were new, or are no longer of use.
const NEWEST: usize = 4;

/// Maximum length of a tracker file, bytes.
const LONGEST_TEXT: u64 = 4096;

/// Settings of a watch.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory.
    pub directory: PathBuf,
    /// The run id of what is in it: the same on each host; with its owner if a user requested the watch.
    pub run: String,
    /// The user who requested it and whose rights are used; none for a directory of the configuration: then its owner when it is first
    /// seen.
    pub user: Option<User>,
    /// Rules that recognize checkpoints.
    pub rules: Vec<Rule>,
    /// Number of files or directories of a step on one host; 0: any number.
    pub expect: usize,
    /// Seconds without a change that replace a completion mark; 0: never.
    pub quiet: u64,
    /// Index of this host, and the number of hosts that hold a part of each step.
    pub part: (u32, u32),
    /// Whether all hosts see the same files; none: derived from the file system.
    pub shared: Option<bool>,
    /// Directory of the notes.
    pub home: PathBuf,
    /// Directory of a restored step until it is unpacked.
    pub spool: PathBuf,
    /// Time between two checks.
    pub interval: Duration,
}

/// A directory that is watched until this value is dropped.
#[derive(Debug)]
pub struct FileWatch {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) settings: Settings,
    pub(super) service: Arc<Service>,
    state: Mutex<State>,
    bell: Bell,
    pub(super) is_shared: bool,
    pub(super) acting: DirectoryUser,
    pub(super) copies: Copies,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) catalog: Catalog,
    /// The files of steps, and the time since which they are unchanged.
    before: BTreeMap<u64, (Instant, Vec<Member>)>,
    /// The attempt of each step: that of the decision under which it was first seen.
    pub(super) first_seen: BTreeMap<u64, u64>,
    /// Containers that were checked.
    containers: BTreeMap<String, (Mark, bool)>,
    /// Steps that have their mark but are not sound, with the checked files and the problem.
    pub(super) unsound: BTreeMap<u64, (Vec<Member>, String)>,
    /// Sealed steps that have more files than when they were sealed.
    pub(super) grown: Vec<u64>,
    /// The directory in which sealed steps were last seen.
    pub(super) home: Option<(u64, u64)>,
    /// Whether it was reported that each save overwrites the files of the one before.
    pub(super) overwriting_reported: bool,
    /// Checks in which the complete step had changed.
    unsealed: Unsealed,
    /// Work that was left to the user's process and is not reported as done.
    pub(super) left: Option<Left>,
    /// The last error.
    problem: Option<String>,
}

/// The result of a check.
pub(super) struct DirectoryScan {
    pub(super) look: DirectorySnapshot,
    pub(super) files: BTreeMap<u64, Vec<Member>>,
}

impl FileWatch {
    /// Starts to watch. The directory need not exist yet.
    ///
    /// # Errors
    /// The directory of notes cannot be created, or a thread cannot be started.
    pub fn start(service: &Arc<Service>, settings: Settings) -> Result<FileWatch, FilesError> {
        let is_shared = settings.shared.unwrap_or_else(|| tree::is_shared(&settings.directory));
        let catalog = Catalog::open_with_lost(&settings.home, service.users(), is_shared)?;
        let lost = catalog.lost().values().map(|lost| &lost.pack);
        let known = catalog.packs().values().chain(lost).map(|pack| &pack.sealed.shard.of);
        let first_seen = known.map(|of| (of.step, of.attempt)).collect();
        let state = State {
            catalog,
            before: BTreeMap::new(),
            first_seen,
            containers: BTreeMap::new(),
            unsound: BTreeMap::new(),
            grown: Vec::new(),
            home: None,
            overwriting_reported: false,
            unsealed: Unsealed::default(),
            left: None,
            problem: None,
        };
        let copies = Copies::open(&settings.home, &settings.run, service);
        let service = Arc::clone(service);
        let (state, bell, acting) =
            (Mutex::new(state), Bell::default(), DirectoryUser::new(service.users(), settings.user));
        // Determine the owner of a directory of the configuration now, before another user can exchange it.
        let _ = acting.in_directory(&settings.directory);
        let inner = Arc::new(Inner { settings, service, state, bell, is_shared, acting, copies });
        let working = Arc::clone(&inner);
        host::spawn("ckpt-files", move || working.work())
            .map_err(FilesError::reading(&inner.settings.home))?;
        Ok(FileWatch { inner })
    }

    /// Reports a change in the directory.
    pub fn nudge(&self) {
        self.inner.bell.ring();
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.inner.settings.directory
    }

    /// The run id.
    pub fn run(&self) -> &str {
        &self.inner.settings.run
    }

    /// Whether a step was sealed in it at any time and is not forgotten.
    pub fn has_sealed(&self) -> bool {
        let state = self.inner.state();
        !state.catalog.packs().is_empty() || !state.catalog.lost().is_empty()
    }

    /// The last error, or why nothing is sealed, until the next success.
    pub fn problem(&self) -> Option<String> {
        self.inner.state().problem.clone()
    }

    /// Decides with the other hosts to which step the job goes back, and restores this host's files of it into the directory. Newer names
    /// that a trainer would use and that are not whole are set aside. `again`: the job has run before, so the steps that it sealed must
    /// exist.
    ///
    /// # Errors
    /// There is no decision, or the step cannot be restored. [`FilesError::Lost`]: steps were sealed, and none of them is whole
    /// anywhere; the trainer must not be started.
    pub fn begin_restore(
        &self,
        again: bool,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Started, FilesError> {
        self.inner.restore(again, report)
    }

    /// Reports that a process of the user has done what [`FileWatch::begin_restore`] left to it.
    ///
    /// # Errors
    /// There is no such work with this token, or the files differ from what was sealed.
    pub fn end_restore(&self, token: &str) -> Result<Restored, FilesError> {
        self.inner.end_restore(token)
    }

    /// Does both if this process may write as the user.
    ///
    /// # Errors
    /// The errors of both, or this process may not write as the user.
    pub fn restore(&self, again: bool, report: &(dyn Fn(Progress) + Sync)) -> Result<Restored, FilesError> {
        match self.begin_restore(again, report)? {
            Started::Done(restored) => Ok(restored),
            Started::Left(_) => {
                Err(FilesError::reading(self.directory())(io::ErrorKind::PermissionDenied.into()))
            }
        }
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        self.inner.bell.end();
    }
}

impl Inner {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        lower_priority(5, true);
        loop {
            let mut state = self.state();
            let looked = self.look(&mut state, self.settings.interval);
            let Settings { directory, interval, .. } = &self.settings;
            let problem = match looked {
                Ok(_) => state.unsealed.problem(*interval),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem.as_ref().filter(|problem| state.problem.as_ref() != Some(problem))
            {
                tracing::warn!("checkpoints in {}: {problem}", directory.display());
            }
            state.problem = problem;
            drop(state);
            if !self.bell.wait(self.settings.interval) {
                return;
            }
        }
    }

    /// One check: steps that have changed are no longer offered; steps that are complete and unchanged for the time `settled` are sealed.
    /// Returns whether something was sealed.
    pub(super) fn look(&self, state: &mut State, settled: Duration) -> Result<bool, FilesError> {
        let Settings { directory, run, .. } = &self.settings;
        host::keep_decision(&self.service, run, &state.catalog);
        let Some(place) = self.acting.in_directory(directory) else {
            // The directory may reappear unchanged: its steps are not forgotten.
            let gone: Vec<u64> = state.catalog.packs().keys().copied().collect();
            let why = || format!("{} is not there", directory.display());
            gone.into_iter().for_each(|step| _ = state.catalog.lose(step, why(), false, true));
            self.offer(state);
            return Ok(false);
        };
        if self.is_shared && !host::is_first(&self.service, run) {
            host::offer(&self.service, directory, run, Vec::new());
            return Ok(false);
        }
        let DirectoryScan { look, files } = self.sight(&place, state)?;
        let attempt = host::fence(&self.service, run) * AGAIN;
        files.keys().for_each(|step| _ = state.first_seen.entry(*step).or_insert(attempt));
        self.judge(state, &look, &files, &place)?;
        if state.home.is_none() || !state.catalog.packs().is_empty() {
            state.home = host::identity(&place);
        }
        state.unsound.retain(|step, _| files.contains_key(step));
        let Settings { rules, expect, quiet, .. } = &self.settings;
        let mut changed = None;
        let all_complete = complete(rules, &look, *expect, *quiet);
        let has_complete = !all_complete.is_empty();
        let due = all_complete.into_iter().find(|of| {
            let files = files.get(&of.step);
            let may_be = match (state.catalog.packs().get(&of.step), state.catalog.lost().get(&of.step)) {
                (Some(_), _) => state.grown.contains(&of.step),
                (None, Some(lost)) => lost.is_again || lost.is_gone,
                (None, None) => true,
            };
            let is_unsound = state.unsound.get(&of.step).is_some_and(|(were, _)| Some(were) == files);
            let is_same = settled.is_zero() || host::is_same(&state.before, of.step, files, settled);
            let is_put_back = state.left.as_ref().is_some_and(|left| left.is_of(of.step));
            if may_be && !is_same && changed.is_none() {
                changed = of.names.first().cloned();
            }
            may_be && is_same && !is_unsound && !is_put_back
        });
        let newest = state.catalog.packs().keys().next_back().copied();
        let due = due.filter(|of| state.catalog.packs().len() < 2 || Some(of.step) >= newest);
        let sealed = match &due {
            Some(due) => self.seal(state, due, &look, files.get(&due.step), &place),
            None => Ok(false),
        };
        match (&changed, &due) {
            (Some(name), None) => state.unsealed.changed(name),
            // Nothing is complete while a trainer writes, also one that writes again and again.
            (None, None) if !has_complete => {}
            _ => state.unsealed.settled(),
        }
        state.before = host::since(std::mem::take(&mut state.before), files);
        self.offer(state);
        sealed
    }

    /// The directory as it is now.
    pub(super) fn sight(&self, place: &Place, state: &mut State) -> Result<DirectoryScan, FilesError> {
        let _as_user = place.act()?;
        let (look, files) = self.see(&place.at, &mut state.containers)?;
        Ok(DirectoryScan { look, files })
    }

    pub(super) fn offer(&self, state: &State) {
        let packs = state.catalog.packs().values().cloned().collect();
        host::offer(&self.service, &self.settings.directory, &self.settings.run, packs);
    }

    /// The directory as it is now, and the files of its newest steps.
    fn see(
        &self,
        at: &Beneath,
        containers: &mut BTreeMap<String, (Mark, bool)>,
    ) -> Result<(DirectorySnapshot, BTreeMap<u64, Vec<Member>>), FilesError> {
        let Settings { directory, rules, .. } = &self.settings;
        let reading = FilesError::reading;
        let mut look = DirectorySnapshot {
            now: i64::try_from(host::now_unix_s()).unwrap_or(0),
            ..DirectorySnapshot::default()
        };
        let mut steps: BTreeMap<u64, Vec<(String, bool)>> = BTreeMap::new();
        let mut written_over = Vec::new();
        let wanted = texts(rules);
        for (name, kind) in at.list(Path::new("")).map_err(reading(directory))? {
            let Ok(name) = name.into_string() else { continue };
            let is_directory = kind == FileType::Directory;
            if let Some((_, step)) =
                rule_of(rules, &name, is_directory).filter(|_| is_directory || kind == FileType::RegularFile)
            {
                steps.entry(step).or_default().push((name, is_directory));
            } else if kind == FileType::RegularFile && in_place(rules, &name, false).is_some() {
                written_over.push(name);
            } else if wanted.contains(name.as_str())
                && let Some(text) = read_text(at, &name)
            {
                look.texts.insert(name, text);
            } else if rules.iter().any(|rule| matches!(rule.proof, Proof::NoneBeside(_))) {
                look.texts.insert(name, Default::default());
            }
        }
        // Step numbers and seconds are never compared.
        for name in written_over.into_iter().filter(|_| steps.is_empty()) {
            let Some(file) = tree::one(at, &name) else { continue };
            let step = u64::try_from(file.mark.written.0).unwrap_or(0);
            look.in_place.insert(name.clone(), step);
        }
        for (name, step) in &look.in_place {
            steps.entry(*step).or_default().push((name.clone(), false));
        }
        let mut files = BTreeMap::new();
        for (step, names) in steps.into_iter().rev().take(NEWEST) {
            let mut of_step = Vec::new();
            for (name, is_directory) in names {
                // A step that disappears during the check is checked the next time.
                let Ok(members) = tree::members(at, &name) else { continue };
                look.names.insert(name.clone(), seen(at, &name, is_directory, &members, containers));
                of_step.extend(members);
            }
            of_step.sort_by(|a, b| a.path.cmp(&b.path));
            files.insert(step, of_step);
        }
        containers.retain(|name, _| look.names.contains_key(name));
        Ok((look, files))
    }
}

fn seen(
    at: &Beneath,
    name: &str,
    is_directory: bool,
    members: &[Member],
    containers: &mut BTreeMap<String, (Mark, bool)>,
) -> Seen {
    let newest = members.iter().map(|of| of.mark.written).max().unwrap_or_default();
    let direct = |of: &Member| {
        let below = of.path.strip_prefix(name)?.strip_prefix('/')?;
        (!below.contains('/')).then(|| (below.to_owned(), of.mark.written))
    };
    let container = members.first().filter(|_| !is_directory && proof::is_known(name)).map(|file| {
        let known = containers.get(name).filter(|(mark, _)| *mark == file.mark).map(|(_, whole)| *whole);
        let whole = known.unwrap_or_else(|| is_whole(at, name).unwrap_or(false));
        containers.insert(name.to_owned(), (file.mark, whole));
        whole
    });
    Seen { is_directory, newest, files: members.iter().filter_map(direct).collect(), container }
}

fn is_whole(at: &Beneath, name: &str) -> io::Result<bool> {
    let file = at.read(Path::new(name))?;
    let size = file.metadata()?.len();
    let some = |from: u64, length: u64| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length.min(size)).unwrap_or(0)];
        file.read_exact_at(&mut bytes, from)?;
        Ok(bytes)
    };
    let head = some(0, proof::HEAD as u64)?;
    let head = some(0, proof::head_wanted(name, &head).max(proof::HEAD as u64))?;
    let tail = (proof::TAIL as u64).min(size);
    Ok(proof::is_whole(name, size, &head, &some(size - tail, tail)?))
}

pub(super) fn read_text(at: &Beneath, name: &str) -> Option<(String, Written)> {
    let file = at.read(Path::new(name)).ok()?;
    let written = Mark::of(&file.metadata().ok()?).written;
    let mut text = String::new();
    file.take(LONGEST_TEXT).read_to_string(&mut text).ok()?;
    Some((text, written))
}
