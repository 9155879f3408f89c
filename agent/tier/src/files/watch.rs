//! A directory into which a trainer writes checkpoints in its own format. A step that is complete by its framework's mark and sound by its
//! formats is sealed, offered to peers and durable storage, and restored on a host that has lost it (`restore`). A step that differs from
//! its seal (`compare`) is no longer offered. The trainer's files are read and never changed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use mainstay_checkpoint::files::{
    Complete, DirectoryEntry, DirectorySnapshot, ModifiedTime, Proof, complete, in_place, matching_rule,
    proof, texts,
};
use mainstay_checkpoint::inventory::Shard;
use mainstay_checkpoint_format::Identity;
use rustix::fs::FileType;

use crate::beneath::Beneath;
use crate::files::FilesError;
use crate::files::all::{HostStorage, WatchRequest};
use crate::files::catalog::{Catalog, LostStep};
use crate::files::host::{self, ATTEMPTS_PER_DECISION, Bell, DirectoryUser, UserDirectory};
use crate::files::pack::{Content, Pack};
use crate::files::put_back::{PendingPutBack, Started};
use crate::files::tree::{self, FileVersion, Member};
use crate::lock;
use crate::os::{lower_priority, now_unix_s, spawn};
use crate::peer::error::PeerError;
use crate::peer::user::User;
use crate::peer::{Progress, Restored, Service, WatchedDirectory, land};

/// Number of the newest steps that are checked: older ones were sealed when they were new, or are no longer of use.
const MAX_CHECKED_STEPS: usize = 4;

/// Maximum length of a tracker file, bytes.
const MAX_TEXT_BYTES: u64 = 4096;

/// Settings of a watch.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) request: WatchRequest,
    /// Index of this host, and the number of hosts that hold a part of each step.
    pub(super) part: (u32, u32),
    pub(super) storage: HostStorage,
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
    containers: BTreeMap<String, (FileVersion, bool)>,
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
    pub(super) left: Option<PendingPutBack>,
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
    pub(super) fn start(service: &Arc<Service>, settings: Settings) -> Result<FileWatch, FilesError> {
        let is_shared =
            settings.request.shared.unwrap_or_else(|| tree::is_shared(&settings.request.directory));
        let catalog = Catalog::open_with_lost(&settings.storage.home, service.users(), is_shared)?;
        let lost = catalog.lost().values().map(|lost| &lost.pack);
        let known = catalog.packs().values().chain(lost).map(|pack| &pack.sealed.shard.key);
        let first_seen = known.map(|key| (key.step, key.attempt)).collect();
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
        let copies = Copies::open(&settings.storage.home, &settings.request.run, service);
        let service = Arc::clone(service);
        let (state, bell, acting) =
            (Mutex::new(state), Bell::default(), DirectoryUser::new(service.users(), settings.request.user));
        // Determine the owner of a directory of the configuration now, before another user can exchange it.
        let _ = acting.in_directory(&settings.request.directory);
        let inner = Arc::new(Inner { settings, service, state, bell, is_shared, acting, copies });
        let working = Arc::clone(&inner);
        spawn("ckpt-files", move || working.work())
            .map_err(FilesError::reading(&inner.settings.storage.home))?;
        Ok(FileWatch { inner })
    }

    /// Reports a change in the directory.
    pub fn nudge(&self) {
        self.inner.bell.ring();
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.inner.settings.request.directory
    }

    /// The run id.
    pub fn run(&self) -> &str {
        &self.inner.settings.request.run
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
        lock(&self.state)
    }

    fn work(&self) {
        lower_priority(5, true);
        loop {
            let mut state = self.state();
            let looked = self.look(&mut state, self.settings.storage.interval);
            let Settings {
                request: WatchRequest { directory, .. },
                storage: HostStorage { interval, .. },
                ..
            } = &self.settings;
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
            if !self.bell.wait(self.settings.storage.interval) {
                return;
            }
        }
    }

    /// One check: steps that have changed are no longer offered; steps that are complete and unchanged for the time `settled` are sealed.
    /// Returns whether something was sealed.
    pub(super) fn look(&self, state: &mut State, settled: Duration) -> Result<bool, FilesError> {
        let Settings { request: WatchRequest { directory, run, .. }, .. } = &self.settings;
        host::keep_decision(&self.service, run, &state.catalog);
        let Some(folder) = self.acting.in_directory(directory) else {
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
        let DirectoryScan { look, files } = self.scan(&folder, state)?;
        let attempt = host::fence(&self.service, run) * ATTEMPTS_PER_DECISION;
        files.keys().for_each(|step| _ = state.first_seen.entry(*step).or_insert(attempt));
        self.judge(state, &look, &files, &folder)?;
        if state.home.is_none() || !state.catalog.packs().is_empty() {
            state.home = host::identity(&folder);
        }
        state.unsound.retain(|step, _| files.contains_key(step));
        let Settings { request: WatchRequest { rules, expect, quiet, .. }, .. } = &self.settings;
        let mut changed = None;
        let all_complete = complete(rules, &look, *expect, *quiet);
        let has_complete = !all_complete.is_empty();
        let due = all_complete.into_iter().find(|complete_step| {
            let files = files.get(&complete_step.step);
            let may_be = match (
                state.catalog.packs().get(&complete_step.step),
                state.catalog.lost().get(&complete_step.step),
            ) {
                (Some(_), _) => state.grown.contains(&complete_step.step),
                (None, Some(lost)) => lost.is_again || lost.is_gone,
                (None, None) => true,
            };
            let is_unsound =
                state.unsound.get(&complete_step.step).is_some_and(|(were, _)| Some(were) == files);
            let is_same =
                settled.is_zero() || host::is_same(&state.before, complete_step.step, files, settled);
            let is_put_back = state.left.as_ref().is_some_and(|left| left.is_of(complete_step.step));
            if may_be && !is_same && changed.is_none() {
                changed = complete_step.names.first().cloned();
            }
            may_be && is_same && !is_unsound && !is_put_back
        });
        let newest = state.catalog.packs().keys().next_back().copied();
        let due =
            due.filter(|complete_step| state.catalog.packs().len() < 2 || Some(complete_step.step) >= newest);
        let sealed = match &due {
            Some(due) => self.seal(state, due, &look, files.get(&due.step), &folder),
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
    pub(super) fn scan(
        &self,
        folder: &UserDirectory,
        state: &mut State,
    ) -> Result<DirectoryScan, FilesError> {
        let _as_user = folder.act()?;
        let (look, files) = self.see(&folder.at, &mut state.containers)?;
        Ok(DirectoryScan { look, files })
    }

    pub(super) fn offer(&self, state: &State) {
        let packs = state.catalog.packs().values().cloned().collect();
        host::offer(&self.service, &self.settings.request.directory, &self.settings.request.run, packs);
    }

    /// The directory as it is now, and the files of its newest steps.
    fn see(
        &self,
        at: &Beneath,
        containers: &mut BTreeMap<String, (FileVersion, bool)>,
    ) -> Result<(DirectorySnapshot, BTreeMap<u64, Vec<Member>>), FilesError> {
        let Settings { request: WatchRequest { directory, rules, .. }, .. } = &self.settings;
        let reading = FilesError::reading;
        let mut look = DirectorySnapshot {
            now: i64::try_from(now_unix_s()).unwrap_or(0),
            ..DirectorySnapshot::default()
        };
        let mut steps: BTreeMap<u64, Vec<(String, bool)>> = BTreeMap::new();
        let mut written_over = Vec::new();
        let text_names = texts(rules);
        for (name, kind) in at.list(Path::new("")).map_err(reading(directory))? {
            let Ok(name) = name.into_string() else { continue };
            let is_directory = kind == FileType::Directory;
            if let Some((_, step)) = matching_rule(rules, &name, is_directory)
                .filter(|_| is_directory || kind == FileType::RegularFile)
            {
                steps.entry(step).or_default().push((name, is_directory));
            } else if kind == FileType::RegularFile && in_place(rules, &name, false).is_some() {
                written_over.push(name);
            } else if text_names.contains(name.as_str())
                && let Some(text) = read_text(at, &name)
            {
                look.texts.insert(name, text);
            } else if rules.iter().any(|rule| matches!(rule.proof, Proof::NoneBeside(_))) {
                look.texts.insert(name, Default::default());
            }
        }
        // Step numbers and seconds are never compared.
        for name in written_over.into_iter().filter(|_| steps.is_empty()) {
            let Some(file) = tree::regular_file(at, &name) else { continue };
            let step = u64::try_from(file.mark.written.0).unwrap_or(0);
            look.in_place.insert(name.clone(), step);
        }
        for (name, step) in &look.in_place {
            steps.entry(*step).or_default().push((name.clone(), false));
        }
        let mut files = BTreeMap::new();
        for (step, names) in steps.into_iter().rev().take(MAX_CHECKED_STEPS) {
            let mut of_step = Vec::new();
            for (name, is_directory) in names {
                // A step that disappears during the check is checked the next time.
                let Ok(members) = tree::members(at, &name) else { continue };
                look.names
                    .insert(name.clone(), directory_entry(at, &name, is_directory, &members, containers));
                of_step.extend(members);
            }
            of_step.sort_by(|a, b| a.path.cmp(&b.path));
            files.insert(step, of_step);
        }
        containers.retain(|name, _| look.names.contains_key(name));
        Ok((look, files))
    }
}

fn directory_entry(
    at: &Beneath,
    name: &str,
    is_directory: bool,
    members: &[Member],
    containers: &mut BTreeMap<String, (FileVersion, bool)>,
) -> DirectoryEntry {
    let newest = members.iter().map(|member| member.mark.written).max().unwrap_or_default();
    let direct = |member: &Member| {
        let below = member.path.strip_prefix(name)?.strip_prefix('/')?;
        (!below.contains('/')).then(|| (below.to_owned(), member.mark.written))
    };
    let container = members.first().filter(|_| !is_directory && proof::is_known(name)).map(|file| {
        let known = containers.get(name).filter(|(mark, _)| *mark == file.mark).map(|(_, whole)| *whole);
        let whole = known.unwrap_or_else(|| is_whole(at, name).unwrap_or(false));
        containers.insert(name.to_owned(), (file.mark, whole));
        whole
    });
    DirectoryEntry { is_directory, newest, files: members.iter().filter_map(direct).collect(), container }
}

fn is_whole(at: &Beneath, name: &str) -> io::Result<bool> {
    let file = at.read(Path::new(name))?;
    let size = file.metadata()?.len();
    let some = |from: u64, length: u64| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length.min(size)).unwrap_or(0)];
        file.read_exact_at(&mut bytes, from)?;
        Ok(bytes)
    };
    let head = some(0, proof::HEAD_BYTES as u64)?;
    let head = some(0, proof::head_wanted(name, &head).max(proof::HEAD_BYTES as u64))?;
    let tail = (proof::TAIL_BYTES as u64).min(size);
    Ok(proof::is_whole(name, size, &head, &some(size - tail, tail)?))
}

pub(super) fn read_text(at: &Beneath, name: &str) -> Option<(String, ModifiedTime)> {
    let file = at.read(Path::new(name)).ok()?;
    let written = FileVersion::of(&file.metadata().ok()?).written;
    let mut text = String::new();
    file.take(MAX_TEXT_BYTES).read_to_string(&mut text).ok()?;
    Some((text, written))
}

// Checks the sealed steps of one directory: which are still offered, and which may be sealed as another step.

impl Inner {
    /// Compares each sealed step with the files.
    pub(super) fn judge(
        &self,
        state: &mut State,
        look: &DirectorySnapshot,
        files: &BTreeMap<u64, Vec<Member>>,
        folder: &UserDirectory,
    ) -> Result<(), FilesError> {
        let Settings { request: WatchRequest { run, .. }, .. } = &self.settings;
        let trackers: BTreeMap<String, ModifiedTime> =
            look.texts.iter().map(|(name, (_, written))| (name.clone(), *written)).collect();
        let lost = state.catalog.lost().iter().map(|(step, lost)| (*step, Arc::clone(&lost.pack)));
        let known: Vec<(u64, Arc<Pack>)> =
            state.catalog.packs().iter().map(|(step, pack)| (*step, Arc::clone(pack))).chain(lost).collect();
        let fence = host::fence(&self.service, run);
        state.grown.clear();
        for (step, pack) in known {
            let members = pack.content.members();
            let now = match files.get(&step) {
                Some(now) => now.clone(),
                // An older step, or one whose names are gone.
                None => {
                    let _as_user = folder.act()?;
                    let there = |member: &&Member| member.content.is_none();
                    let current = |member: &Member| tree::regular_file(&folder.at, &member.path);
                    members.iter().filter(there).filter_map(current).collect()
                }
            };
            let went_back = fence * ATTEMPTS_PER_DECISION > pack.sealed.shard.key.attempt;
            let became = compare(members, &now, &trackers, went_back);
            if pack.sealed.shard.key.run_id() != run
                && matches!(became, StepChange::Unchanged | StepChange::Extended)
            {
                // It is sealed for this run too after its bytes are compared.
                self.lose(state, step, "it was sealed for another run".to_owned(), true, false);
                continue;
            }
            match became {
                StepChange::Unchanged => _ = state.catalog.find(step),
                StepChange::Extended => {
                    state.catalog.find(step);
                    state.grown.push(step);
                }
                StepChange::Rewritten => {
                    self.lose(state, step, "it was written again".to_owned(), true, false);
                }
                StepChange::Damaged(why) => self.lose(state, step, why, false, false),
                // Its trainer has deleted it; its copies stay valid.
                StepChange::Missing => self.lose(state, step, "its files are gone".to_owned(), false, true),
            }
        }
        // A step that a trainer deletes when it has newer ones is no loss.
        let newest = state.catalog.packs().keys().next_back().copied();
        let is_over = |(step, lost): (&u64, &LostStep)| {
            let is_replaced = self.is_in_place(&lost.pack.content);
            ((lost.is_gone || is_replaced) && Some(*step) < newest).then_some(*step)
        };
        let over: Vec<u64> = state.catalog.lost().iter().filter_map(is_over).collect();
        for step in over {
            state.catalog.remove(step);
            state.first_seen.remove(&step);
        }
        Ok(())
    }

    pub(super) fn lose(&self, state: &mut State, step: u64, why: String, is_again: bool, is_gone: bool) {
        let reason = why.clone();
        let sealed = state.catalog.sealed(step);
        let is_overwritten = is_again && sealed.is_some_and(|pack| self.is_in_place(&pack.content));
        if !state.catalog.lose(step, why, is_again, is_gone) || is_gone {
            return;
        }
        let Settings { request: WatchRequest { run, directory, .. }, .. } = &self.settings;
        let shown = directory.display();
        if !is_overwritten {
            tracing::warn!(run, step, directory = %shown, "a sealed step is no longer offered here: {reason}");
        } else if !std::mem::replace(&mut state.overwriting_reported, true) {
            tracing::warn!(
                "{shown}: each save overwrites the one before, so a failure during a save leaves no whole step there: write \
                 each step to a file of its own, or keep copies on peers (`checkpoint.peers` of the agent)"
            );
        }
    }

    /// Whether the next step overwrites these files.
    pub(super) fn is_in_place(&self, content: &Content) -> bool {
        content
            .members()
            .iter()
            .all(|member| in_place(&self.settings.request.rules, &member.path, false).is_some())
    }
}

// Seals a step of a trainer in place: checks its files by their formats, reads them once and writes a note.

/// Job name of the steps in watched directories; the run id distinguishes the jobs.
const JOB: &str = "files";

/// A step that is written again more than this many seconds after it was sealed is another step. Before that, its writer was not done.
const MAX_REWRITE_S: u64 = 120;

impl Inner {
    /// Seals a step that has its mark, if its files are sound. Returns whether it was sealed.
    pub(super) fn seal(
        &self,
        state: &mut State,
        complete_step: &Complete,
        look: &DirectorySnapshot,
        files: Option<&Vec<Member>>,
        folder: &UserDirectory,
    ) -> Result<bool, FilesError> {
        let Some(mut members) = files.cloned().filter(|files| !files.is_empty()) else { return Ok(false) };
        let Settings { request: WatchRequest { directory, run, .. }, part, .. } = &self.settings;
        if let Err(why) = sound(folder, &members) {
            tracing::warn!(run, step = complete_step.step, directory = %directory.display(), "a step has its mark and is not sealed: {why}");
            state.unsound.insert(complete_step.step, (members, why));
            return Ok(false);
        }
        let of_another_run = |pack: &&Arc<Pack>| pack.sealed.shard.key.run_id() != run;
        if let Some(known) = state.catalog.sealed(complete_step.step).filter(of_another_run).cloned()
            && known.content.is_still()
            && !matches!(known.sealed.first_bad_from_start(&known.content), Ok(None))
        {
            let why = "its bytes are not those that were sealed for another run".to_owned();
            self.lose(state, complete_step.step, why, false, false);
            return Ok(false);
        }
        let trackers = complete_step.trackers.iter().map(|(name, text)| {
            let written = look.texts.get(name).map_or_else(Default::default, |(_, written)| *written);
            let mark = FileVersion { written, ..FileVersion::default() };
            Member { path: name.clone(), mode: 0o644, mark, content: Some(text.clone()) }
        });
        members.extend(trackers);
        let former = state.catalog.sealed(complete_step.step).map(|pack| pack.sealed.shard.clone());
        if former.as_ref().is_some_and(|former| former.key.run_id() != run) {
            state
                .first_seen
                .insert(complete_step.step, host::fence(&self.service, run) * ATTEMPTS_PER_DECISION);
        } else if let Some(former) = former.as_ref().filter(|_| !state.grown.contains(&complete_step.step)) {
            let age = now_unix_s().saturating_sub(former.created.max(0).unsigned_abs());
            if age > MAX_REWRITE_S {
                // ModifiedTime by a trainer that went back: must not be joined with parts that other hosts have of the earlier step.
                state.first_seen.insert(complete_step.step, former.key.attempt + 1);
            }
        }
        let (rank, world_size) = if self.is_shared { (0, 1) } else { *part };
        let attempt = state.first_seen.get(&complete_step.step).copied().unwrap_or(0);
        let identity = Identity { job: JOB.to_owned(), attempt, step: complete_step.step, rank, world_size };
        let content = Content::new(directory, folder.access.clone(), members)?;
        let manifest = match content.seal(&identity, run, now_unix_s()) {
            // The next check decides.
            Err(FilesError::Changed(_)) => return Ok(false),
            sealed => sealed?,
        };
        let members = content.members().to_vec();
        let user = folder.access.user();
        let pack = state.catalog.insert(manifest.encode(), directory, user, members, self.is_shared)?;
        state.unsound.remove(&complete_step.step);
        let replaced = |former: &Shard| former.root != pack.sealed.shard.root && former.key.run_id() == run;
        if let Some(former) = former.filter(replaced) {
            // Its replicas are of files that no longer exist.
            self.service.shared.own.forget_pack(&former.root);
            self.service.shared.withdraw(&former.root);
        }
        if self.is_in_place(&pack.content)
            && let Err(error) = self.copies.keep(&self.service, &pack)
        {
            tracing::warn!(run, directory = %directory.display(), %error, "no copy of a file that is written over could be kept");
        }
        tracing::info!(run, step = complete_step.step, directory = %directory.display(), "a step was sealed as its trainer wrote it");
        Ok(true)
    }
}

/// Checks by their formats whether all files are complete.
fn sound(folder: &UserDirectory, members: &[Member]) -> Result<(), String> {
    for member in members {
        let problem = |problem: String| format!("{}: {problem}", member.path);
        let open = || {
            let _as_user = folder.act().map_err(|error| error.to_string())?;
            folder.at.read(Path::new(&member.path)).map_err(|error| error.to_string())
        };
        let file = open().map_err(problem)?;
        let mut read = |at: u64, buffer: &mut [u8]| {
            FileExt::read_exact_at(&file, buffer, at).map_err(|error| error.to_string())
        };
        proof::sound(&member.path, member.mark.size, &mut read).map_err(problem)?;
    }
    Ok(())
}

// Compares a step with its seal: its files are unchanged, a trainer wrote all of them again and completed them, or they are damaged.
// What was sealed once is not sealed again just because it looks complete.

/// The state of a step after it was sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StepChange {
    /// Nothing has changed.
    Unchanged,
    /// All sealed files exist, and more.
    Extended,
    /// All of it was written again, and its framework's mark last: when complete, it is sealed as another step.
    Rewritten,
    /// None of its files exists.
    Missing,
    /// A part of it differs from what was sealed.
    Damaged(String),
}

/// Compares the files `now` with the sealed ones. `trackers`: when the small files that name a step were last written;
/// `went_back`: whether the job has restarted since the step was sealed.
pub(super) fn compare(
    sealed: &[Member],
    now: &[Member],
    trackers: &BTreeMap<String, ModifiedTime>,
    went_back: bool,
) -> StepChange {
    let now: BTreeMap<&str, FileVersion> =
        now.iter().map(|member| (member.path.as_str(), member.mark)).collect();
    let files: Vec<&Member> = sealed.iter().filter(|member| member.content.is_none()).collect();
    let there = |member: &&&Member| now.contains_key(member.path.as_str());
    if files.iter().filter(there).count() == 0 {
        return StepChange::Missing;
    }
    let changed: Vec<&Member> =
        files.iter().copied().filter(|member| now.get(member.path.as_str()) != Some(&member.mark)).collect();
    let Some(first) = changed.first() else {
        return if now.len() == files.len() { StepChange::Unchanged } else { StepChange::Extended };
    };
    let is_whole_set = files.iter().filter(there).count() == files.len();
    if is_whole_set {
        let newest =
            changed.iter().filter_map(|member| now.get(member.path.as_str())).map(|mark| mark.written).max();
        let reported_again = sealed.iter().filter(|member| member.content.is_some()).any(|member| {
            trackers.get(&member.path).is_some_and(|at| *at > member.mark.written && Some(*at) >= newest)
        });
        // A single file without its own checksum may also be damaged.
        let is_evident = files.len() > 1 || !first.path.ends_with(".safetensors") || went_back;
        if reported_again || (changed.len() == files.len() && is_evident) {
            return StepChange::Rewritten;
        }
    }
    StepChange::Damaged(match now.get(first.path.as_str()) {
        None => format!("{} is missing", first.path),
        Some(mark) if mark.size != first.mark.size => {
            format!("{} has {} bytes and had {} when it was sealed", first.path, mark.size, first.mark.size)
        }
        Some(_) => format!("{} was written to after it was sealed", first.path),
    })
}

/// Whether two names differ in their numbers only, so that they are from the same writer.
pub(super) fn is_alike(a: &str, b: &str) -> bool {
    let without_numbers = |name: &str| {
        let mut text = String::new();
        for letter in name.chars() {
            match letter.is_ascii_digit() {
                true if text.ends_with('#') => {}
                true => text.push('#'),
                false => text.push(letter),
            }
        }
        text
    };
    without_numbers(a) == without_numbers(b)
}

// Detects a trainer whose checkpoints are never sealed, because it changes each of them before the next check.

/// Number of checks, without a sealed step between them, in which the complete step had changed again.
const MAX_CHANGED_CHECKS: u32 = 30;

/// The checks since a step was sealed or was found unchanged.
#[derive(Debug, Default)]
pub(super) struct Unsealed {
    changed: u32,
    name: String,
}

impl Unsealed {
    /// A check found this complete step changed since the check before.
    pub(super) fn changed(&mut self, name: &str) {
        self.changed = self.changed.saturating_add(1);
        name.clone_into(&mut self.name);
    }

    /// A step was sealed, or stays as it is.
    pub(super) fn settled(&mut self) {
        *self = Unsealed::default();
    }

    /// The problem and how to fix it; none after fewer checks.
    pub(super) fn problem(&self, interval: Duration) -> Option<String> {
        (self.changed >= MAX_CHANGED_CHECKS).then(|| {
            format!(
                "{} is not protected: {MAX_CHANGED_CHECKS} checks in a row, {} s apart, found that it had changed again; save less often, or \
                 write each step to a file of its own",
                self.name,
                interval.as_secs_f64()
            )
        })
    }
}

// A copy of files that the next checkpoint overwrites: a writer that is killed while it overwrites them leaves no intact checkpoint.
// The copy is stored next to the notes, as an ordinary shard.

/// The copies of one watched directory.
#[derive(Debug)]
pub(super) struct Copies {
    directory: PathBuf,
    run: String,
}

impl Copies {
    /// Opens the copies and offers existing ones.
    pub(super) fn open(home: &Path, run: &str, service: &Service) -> Copies {
        let copies = Copies { directory: home.join("copies"), run: run.to_owned() };
        if copies.directory.is_dir() {
            service.watch(copies.watched());
        }
        copies
    }

    fn watched(&self) -> WatchedDirectory {
        WatchedDirectory {
            run: self.run.clone(),
            directory: self.directory.clone(),
            user: User::own(),
            pool: None,
        }
    }

    /// Copies a step and removes previous copies.
    ///
    /// # Errors
    /// The step changed while it was copied, or there is no room.
    pub(super) fn keep(&self, service: &Service, pack: &Pack) -> Result<(), PeerError> {
        let local =
            |error: std::io::Error| PeerError::Local(format!("{}: {error}", self.directory.display()));
        fs::create_dir_all(&self.directory).map_err(local)?;
        land(service, &self.directory, &pack.sealed, &pack.content)?;
        let newest = format!("step-{:012}", pack.sealed.shard.key.step);
        for entry in fs::read_dir(&self.directory).map_err(local)?.flatten() {
            if entry.file_name().to_str() != Some(&newest) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        service.watch(self.watched());
        Ok(())
    }
}

#[cfg(test)]
mod compare_tests {
    use super::*;

    fn file(path: &str, size: u64, written: i64) -> Member {
        let mark = FileVersion { ino: 1, size, written: (written, 0) };
        Member { path: path.to_owned(), mode: 0o644, mark, content: None }
    }

    fn tracker(written: i64) -> Member {
        Member { content: Some("10".to_owned()), ..file("latest", 2, written) }
    }

    fn became(sealed: &[Member], now: &[Member], tracker: i64) -> StepChange {
        compare(sealed, now, &BTreeMap::from([("latest".to_owned(), (tracker, 0))]), false)
    }

    #[test]
    fn one_file_that_changed_or_disappeared_is_damage_and_is_named() {
        let sealed = [file("c/model", 9, 10), file("c/state", 5, 11)];
        assert_eq!(became(&sealed, &sealed, 0), StepChange::Unchanged);
        for (now, reported) in [
            (vec![file("c/model", 4, 20), file("c/state", 5, 11)], "c/model has 4 bytes"),
            (vec![file("c/model", 9, 20), file("c/state", 5, 11)], "c/model was written to"),
            (vec![file("c/model", 9, 10), file("c/state", 5, 12)], "c/state was written to"),
            (vec![file("c/model", 9, 10)], "c/state is missing"),
            (vec![file("c/model", 9, 20), file("c/state.tmp", 5, 21)], "c/model was written to"),
        ] {
            let StepChange::Damaged(why) = became(&sealed, &now, 0) else { panic!("{reported}") };
            assert!(why.contains(reported), "{why}");
        }
        assert_eq!(became(&sealed, &[], 0), StepChange::Missing);
        assert_eq!(became(&sealed, &[file("c/other", 1, 1)], 0), StepChange::Missing);
    }

    #[test]
    fn files_that_were_all_written_again_or_named_again_by_their_tracker_are_another_step() {
        let sealed = [file("c/model", 9, 10), file("c/state", 5, 11)];
        assert_eq!(
            became(&sealed, &[file("c/model", 9, 20), file("c/state", 5, 21)], 0),
            StepChange::Rewritten
        );
        let more = [file("c/model", 9, 10), file("c/state", 5, 11), file("c/more", 1, 30)];
        assert_eq!(became(&sealed, &more, 0), StepChange::Extended);
        let sealed = [file("c/model", 9, 10), file("c/state", 5, 10), tracker(11)];
        let now = [file("c/model", 9, 20), file("c/state", 5, 10)];
        assert_eq!(became(&sealed, &now, 21), StepChange::Rewritten);
        assert!(matches!(became(&sealed, &now, 11), StepChange::Damaged(_)), "its tracker is the old one");
    }

    #[test]
    fn a_single_changed_file_without_a_checksum_is_another_step_only_if_the_job_went_back() {
        let (sealed, now) = ([file("m_5.safetensors", 9, 10)], [file("m_5.safetensors", 9, 20)]);
        let none = BTreeMap::new();
        assert!(matches!(compare(&sealed, &now, &none, false), StepChange::Damaged(_)));
        assert_eq!(compare(&sealed, &now, &none, true), StepChange::Rewritten);
        let (sealed, now) = ([file("m_5.pt", 9, 10)], [file("m_5.pt", 9, 20)]);
        assert_eq!(compare(&sealed, &now, &none, false), StepChange::Rewritten, "its checksums are compared");
    }

    #[test]
    fn names_that_differ_in_numbers_only_are_alike() {
        assert!(
            is_alike("checkpoint-9", "checkpoint-120")
                && is_alike("epoch=1-step=5.ckpt", "epoch=10-step=50.ckpt")
        );
        assert!(!is_alike("runs2024", "checkpoint-9"));
    }
}

#[cfg(test)]
mod unsealed_tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_changes_before_each_check_is_reported_until_one_settles() {
        let interval = Duration::from_secs(1);
        let mut unsealed = Unsealed::default();
        for _ in 1..MAX_CHANGED_CHECKS {
            unsealed.changed("ckpt.pt");
            assert_eq!(unsealed.problem(interval), None);
        }
        unsealed.changed("ckpt.pt");
        let problem = unsealed.problem(interval).unwrap();
        testing::snapshot!(
            "messages",
            "watch: a checkpoint that changes before each check is reported until one settles",
            problem
        );
        unsealed.settled();
        unsealed.changed("ckpt.pt");
        assert_eq!(unsealed.problem(interval), None);
    }
}
