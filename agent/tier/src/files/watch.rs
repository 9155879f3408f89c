//! A directory into which a trainer writes checkpoints in its own way. What is complete by its framework's own mark is sealed, offered to
//! peers and durable storage, and given back to a host that has lost it. The trainer's files are read and never changed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FileType;

use mainstay_checkpoint::{Identity, MANIFEST_NAME};
use mainstay_core::checkpoint::files::{
    Complete, Look, Proof, Rule, Seen, Written, complete, proof, rule_of, texts,
};

use super::FilesError;
use super::catalog::{Catalog, Note};
use super::host::{self, AGAIN, Acting, Bell, Place};
use super::pack::{ARCHIVE_NAME, Content};
use super::tree::{self, Mark, Member};
use super::unpack::{Way, unpack};
use crate::beneath::Beneath;
use crate::os::stand_back;
use crate::peer::error::PeerError;
use crate::peer::sealed::Sealed;
use crate::peer::user::{As, User};
use crate::peer::{Progress, Restored, Service};

/// The name of the job to which steps belong that a directory tells of; the run id tells one from another.
const JOB: &str = "files";

/// How many of the newest steps are looked at: older ones were sealed when they were new, or are nobody's hope any more.
const NEWEST: usize = 4;

/// A step that is written again so many seconds after it was sealed is another one; before that its writer was not done.
const ANOTHER: u64 = 120;

/// A tracker is no longer than that.
const LONGEST_TEXT: u64 = 4096;

/// What is watched, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory.
    pub directory: PathBuf,
    /// The run id of what is in it: the same on each host; with its owner where a user asked for it.
    pub run: String,
    /// The user who asked for it, and as whom its files are touched; none for a directory of the configuration: then whose it is when it
    /// is first seen.
    pub user: Option<User>,
    /// How checkpoints are found.
    pub rules: Vec<Rule>,
    /// Files or directories that make a step on one host; 0: as many as there are.
    pub expect: usize,
    /// Seconds without a change that stand in for a mark; 0: never.
    pub quiet: u64,
    /// Which of the hosts this is, and how many hold a part of each step.
    pub part: (u32, u32),
    /// Whether all hosts see the same files; none: as the file system says.
    pub shared: Option<bool>,
    /// Where notes are kept.
    pub home: PathBuf,
    /// Where a step lies until it is unpacked.
    pub spool: PathBuf,
    /// Time from one look to the next.
    pub interval: Duration,
}

/// A directory that is watched until this is dropped.
#[derive(Debug)]
pub struct FileWatch {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    service: Arc<Service>,
    state: Mutex<State>,
    bell: Bell,
    is_shared: bool,
    acting: Acting,
}

#[derive(Debug)]
struct State {
    catalog: Catalog,
    /// The files of steps, and since when they are so.
    before: BTreeMap<u64, (Instant, Vec<Member>)>,
    /// The attempt to which each step belongs: that of the decision under which it was first seen.
    first_seen: BTreeMap<u64, u64>,
    /// Containers that were looked into.
    containers: BTreeMap<String, (Mark, bool)>,
    /// What went wrong last.
    problem: Option<String>,
}

impl FileWatch {
    /// Begins to watch. The directory need not be there yet.
    ///
    /// # Errors
    /// The place for notes or a thread cannot be had.
    pub fn start(service: &Arc<Service>, settings: Settings) -> Result<FileWatch, FilesError> {
        let is_shared = settings.shared.unwrap_or_else(|| tree::is_shared(&settings.directory));
        let catalog = Catalog::open(&settings.home, is_shared)?;
        let first_seen =
            catalog.packs().iter().map(|(step, pack)| (*step, pack.sealed.shard.of.attempt)).collect();
        let before = BTreeMap::new();
        let state = State { catalog, before, first_seen, containers: BTreeMap::new(), problem: None };
        let service = Arc::clone(service);
        let (state, bell, acting) = (Mutex::new(state), Bell::default(), Acting::new(settings.user));
        // A directory of the configuration is its owner's of now, when nobody has had time to exchange it.
        let _ = acting.in_directory(&settings.directory);
        let inner = Arc::new(Inner { settings, service, state, bell, is_shared, acting });
        let working = Arc::clone(&inner);
        host::spawn("ckpt-files", move || working.work())
            .map_err(FilesError::reading(&inner.settings.home))?;
        Ok(FileWatch { inner })
    }

    /// Something was written there.
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

    /// What went wrong last, until something goes right.
    pub fn problem(&self) -> Option<String> {
        self.inner.state().problem.clone()
    }

    /// Decides with the others to which step the job goes back, and brings this host's files of it into the directory. Newer ones
    /// that a trainer would find are set aside, for they are not whole.
    ///
    /// # Errors
    /// No decision came about, or the step cannot be restored.
    pub fn restore(&self, tell: &(dyn Fn(Progress) + Sync)) -> Result<Restored, FilesError> {
        self.inner.restore(tell)
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        self.inner.bell.end();
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        stand_back(5, true);
        loop {
            let mut state = self.state();
            let looked = self.look(&mut state);
            let problem = looked.err().map(|error| error.to_string());
            if let Some(problem) = problem.as_ref().filter(|problem| state.problem.as_ref() != Some(problem))
            {
                tracing::warn!(directory = %self.settings.directory.display(), problem, "a watched directory");
            }
            state.problem = problem;
            drop(state);
            if !self.bell.wait(self.settings.interval) {
                return;
            }
        }
    }

    /// One look: what has changed is withdrawn, and what is complete and was the same at the last look is sealed.
    fn look(&self, state: &mut State) -> Result<(), FilesError> {
        let Settings { directory, run, .. } = &self.settings;
        host::keep_decision(&self.service, run, &state.catalog);
        let Some(place) = self.acting.in_directory(directory) else {
            // Not there, or not there any more.
            let gone: Vec<u64> = state.catalog.packs().keys().copied().collect();
            gone.into_iter().for_each(|step| self.withdraw(state, step));
            self.offer(state);
            return Ok(());
        };
        if self.is_shared && !host::is_first(&self.service, run) {
            host::offer(&self.service, directory, run, Vec::new());
            return Ok(());
        }
        let (look, files) = {
            let _as_user = place.act()?;
            self.see(&place.at, &mut state.containers)?
        };
        let attempt = host::fence(&self.service, run) * AGAIN;
        files.keys().for_each(|step| _ = state.first_seen.entry(*step).or_insert(attempt));
        let changed: Vec<u64> = state
            .catalog
            .packs()
            .iter()
            .filter(|(step, pack)| match files.get(step) {
                Some(now) => !pack.content.members().iter().filter(|of| of.words.is_none()).eq(now),
                None => !pack.content.is_still(),
            })
            .map(|(step, _)| *step)
            .collect();
        changed.into_iter().for_each(|step| self.withdraw(state, step));
        let Settings { rules, expect, quiet, .. } = &self.settings;
        let due = complete(rules, &look, *expect, *quiet).into_iter().find(|of| {
            let is_same = host::is_same(&state.before, of.step, files.get(&of.step), self.settings.interval);
            is_same && !state.catalog.packs().contains_key(&of.step)
        });
        let newest = state.catalog.packs().keys().next_back().copied();
        let due = due.filter(|of| state.catalog.packs().len() < 2 || Some(of.step) > newest);
        let sealed = due.map_or(Ok(()), |due| self.seal(state, &due, files.get(&due.step), place.user));
        state.before = host::since(std::mem::take(&mut state.before), files);
        self.offer(state);
        sealed
    }

    fn offer(&self, state: &State) {
        let packs = state.catalog.packs().values().cloned().collect();
        host::offer(&self.service, &self.settings.directory, &self.settings.run, packs);
    }

    /// The directory as it is now, and the files of its newest steps.
    fn see(
        &self,
        at: &Beneath,
        containers: &mut BTreeMap<String, (Mark, bool)>,
    ) -> Result<(Look, BTreeMap<u64, Vec<Member>>), FilesError> {
        let Settings { directory, rules, .. } = &self.settings;
        let reading = FilesError::reading;
        let mut look = Look { now: i64::try_from(host::now_unix_s()).unwrap_or(0), ..Look::default() };
        let mut steps: BTreeMap<u64, Vec<(String, bool)>> = BTreeMap::new();
        let wanted = texts(rules);
        for (name, kind) in at.list(Path::new("")).map_err(reading(directory))? {
            let Ok(name) = name.into_string() else { continue };
            let is_directory = kind == FileType::Directory;
            if let Some((_, step)) =
                rule_of(rules, &name, is_directory).filter(|_| is_directory || kind == FileType::RegularFile)
            {
                steps.entry(step).or_default().push((name, is_directory));
            } else if wanted.contains(name.as_str())
                && let Some(text) = read_text(at, &name)
            {
                look.texts.insert(name, text);
            } else if rules.iter().any(|rule| matches!(rule.proof, Proof::NoneBeside(_))) {
                look.texts.insert(name, Default::default());
            }
        }
        let mut files = BTreeMap::new();
        for (step, names) in steps.into_iter().rev().take(NEWEST) {
            let mut of_step = Vec::new();
            for (name, is_directory) in names {
                // One that goes away while it is looked at is looked at the next time.
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

    fn seal(
        &self,
        state: &mut State,
        of: &Complete,
        files: Option<&Vec<Member>>,
        user: User,
    ) -> Result<(), FilesError> {
        let Some(mut members) = files.cloned().filter(|files| !files.is_empty()) else { return Ok(()) };
        let Settings { directory, run, part, .. } = &self.settings;
        let trackers = of.trackers.iter().map(|(name, words)| Member {
            path: name.clone(),
            mode: 0o644,
            mark: Mark::default(),
            words: Some(words.clone()),
        });
        members.extend(trackers);
        let (rank, world_size) = if self.is_shared { (0, 1) } else { *part };
        let attempt = state.first_seen.get(&of.step).copied().unwrap_or(0);
        let identity = Identity { job: JOB.to_owned(), attempt, step: of.step, rank, world_size };
        let content = Content::of(directory, user, members)?;
        let manifest = match content.seal(&identity, run, host::now_unix_s()) {
            // The next look tells.
            Err(FilesError::Changed(_)) => return Ok(()),
            sealed => sealed?,
        };
        let manifest =
            String::from_utf8(manifest.encode()).map_err(|error| FilesError::Manifest(error.to_string()))?;
        let members = content.members().to_vec();
        let note = Note { manifest, base: directory.clone(), user, members };
        state.catalog.insert(note, self.is_shared)?;
        tracing::info!(run, step = of.step, directory = %directory.display(), "a step was sealed as its trainer wrote it");
        Ok(())
    }

    /// A step is not what was sealed any more: it is offered no more, here or at peers.
    fn withdraw(&self, state: &mut State, step: u64) {
        let Some(pack) = state.catalog.remove(step) else { return };
        state.before.remove(&step);
        let shard = &pack.sealed.shard;
        let is_gone =
            pack.content.members().iter().all(|of| of.words.is_some() || !pack.content.has(&of.path));
        if is_gone {
            // Its trainer has deleted it; copies of it are as good as before.
            state.first_seen.remove(&step);
            return;
        }
        let age = host::now_unix_s().saturating_sub(shard.created.max(0).unsigned_abs());
        if age > ANOTHER {
            // Written anew, by a trainer that went back: never to be joined with what others had of it before.
            state.first_seen.insert(step, shard.of.attempt + 1);
        }
        self.service.shared.own.forget_pack(&shard.root);
        self.service.shared.withdraw(&shard.root);
        tracing::info!(
            run = shard.of.run,
            step,
            "a step was written to after it was sealed: it is offered no more"
        );
    }

    fn restore(&self, tell: &(dyn Fn(Progress) + Sync)) -> Result<Restored, FilesError> {
        let Settings { directory, run, part, spool, rules, .. } = &self.settings;
        fs::create_dir_all(spool).map_err(FilesError::reading(spool))?;
        let place = self.place_for_restore()?;
        let mut state = self.state();
        host::keep_decision(&self.service, run, &state.catalog);
        let rank = if self.is_shared { 0 } else { part.0 };
        // Where all hosts see the same files, one of them brings them back.
        let ranks: &[u32] = if self.is_shared && !host::is_first(&self.service, run) { &[] } else { &[rank] };
        let restored = self.service.restore(&host::spool_of(spool, run), Some(ranks), tell)?;
        host::keep_decision(&self.service, run, &state.catalog);
        let Some(key) = &restored.decision.step else { return Ok(restored) };
        let home = host::in_spool(spool, key.step, rank);
        if let Ok(sealed) = Sealed::read(&home.join(MANIFEST_NAME)).and_then(|sealed| sealed.owned_as(run)) {
            let trackers = texts(rules);
            let is_of_rules = |name: &str, is_directory: bool| {
                rule_of(rules, name, is_directory).is_some() || (!is_directory && trackers.contains(name))
            };
            let archive = home.join(ARCHIVE_NAME);
            let mut members = unpack(&archive, &sealed, &place, Way::Replace, &is_of_rules)?;
            let _as_user = place.act()?;
            for member in members.iter_mut().filter(|of| trackers.contains(of.path.as_str())) {
                member.words = read_text(&place.at, &member.path).map(|(text, _)| text);
            }
            let manifest = String::from_utf8(sealed.manifest.clone());
            let manifest = manifest.map_err(|error| FilesError::Manifest(error.to_string()))?;
            drop(_as_user);
            state.first_seen.insert(key.step, key.attempt);
            let note = Note { manifest, base: directory.clone(), user: place.user, members };
            state.catalog.insert(note, self.is_shared)?;
        } else if let Some(pack) = state.catalog.packs().get(&key.step) {
            // It is here; its tracker may name a newer one that is not whole.
            let _as_user = place.act()?;
            for member in pack.content.members() {
                if let Some(words) = &member.words {
                    let put = place.at.write_whole(Path::new(&member.path), words.as_bytes());
                    put.map_err(FilesError::reading(directory))?;
                }
            }
        }
        let _ = fs::remove_dir_all(spool.join(format!("step-{:012}", key.step)));
        self.set_aside(key.step, &place)?;
        self.offer(&state);
        Ok(restored)
    }

    /// As whom files are brought back. A directory that is gone is made with that user's rights, never with this process's.
    fn place_for_restore(&self) -> Result<Place, FilesError> {
        let directory = &self.settings.directory;
        if let Some(place) = self.acting.in_directory(directory) {
            return Ok(place);
        }
        let own = User::own();
        let maker = self.acting.known().or_else(|| (own.uid != 0).then_some(own));
        if let Some(maker) = maker {
            let _as_user = As::to_write(maker).map_err(FilesError::reading(directory))?;
            fs::create_dir_all(directory).map_err(FilesError::reading(directory))?;
        }
        let refused = || {
            PeerError::Local(format!(
                "{} is no directory of the user whose it was when it was registered (it is a link, or another user's): nothing is \
                 written there",
                directory.display()
            ))
        };
        Ok(self.acting.in_directory(directory).ok_or_else(refused)?)
    }

    /// Trainers that take the newest name that they find must not find what only this host has.
    fn set_aside(&self, step: u64, place: &Place) -> Result<(), FilesError> {
        let Settings { directory, rules, .. } = &self.settings;
        let _as_user = place.act()?;
        for (name, kind) in place.at.list(Path::new("")).map_err(FilesError::reading(directory))? {
            let Ok(name) = name.into_string() else { continue };
            let newer = rule_of(rules, &name, kind == FileType::Directory).filter(|(_, of)| *of > step);
            if newer.is_some_and(|(rule, _)| !matches!(rule.proof, Proof::Tracker(_))) {
                let aside = PathBuf::from(format!(".{name}.not-whole"));
                let _ = place.at.remove_tree(&aside);
                place.at.rename(Path::new(&name), &aside).map_err(FilesError::reading(directory))?;
                tracing::warn!(name, step, directory = %directory.display(), "set aside: no other host has it whole");
            }
        }
        Ok(())
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

fn read_text(at: &Beneath, name: &str) -> Option<(String, Written)> {
    let file = at.read(Path::new(name)).ok()?;
    let written = Mark::of(&file.metadata().ok()?).written;
    let mut text = String::new();
    file.take(LONGEST_TEXT).read_to_string(&mut text).ok()?;
    Some((text, written))
}
