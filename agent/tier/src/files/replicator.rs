//! The replicator of GKE's multi-tier checkpointing, on the directory in which trainers expect it. The files with which both
//! communicate are in [`mainstay_checkpoint::replicator`].

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::fs::FileType;

use mainstay_checkpoint::inventory::StepKey;
use mainstay_checkpoint::replicator::{
    ERRORS_NAME, FAILED_NAME, PRERESTORE_NAME, REQUEST_NAME, ReplicatorRequest, data_name, parse, prerestore,
    restore_name, stays, step_of,
};
use mainstay_checkpoint_format::{Identity, MANIFEST_NAME};

use super::FilesError;
use super::all::HostStorage;
use super::catalog::Catalog;
use super::host::{self, ATTEMPTS_PER_DECISION, Bell, DirectoryUser, UserDirectory};
use super::pack::{ARCHIVE_NAME, Content};
use super::tree::{self, Member};
use super::unpack::{UnpackMode, unpack};
use crate::aside::write_at_once;
use crate::lock;
use crate::os::{lower_priority, now_unix_s, spawn};
use crate::peer::{Progress, Service};
use crate::seal::SealedShard;

/// Job name of the steps; the run id distinguishes the jobs.
const JOB: &str = "replicator";

/// Maximum number of bytes read of a trainer's request.
const MAX_REQUEST_BYTES: u64 = 64 << 10;

/// Number of tries to restore a step.
const MAX_TRIES: u32 = 3;

/// Name under which all jobs of a directory are offered: it has one job at a time.
const REPLICATED: &str = "";

/// A replicator of one directory. It stops when it is dropped.
#[derive(Debug)]
pub struct Replicator {
    bell: Arc<Bell>,
    directory: PathBuf,
}

impl Replicator {
    /// Starts to serve.
    pub(super) fn start(
        service: &Arc<Service>,
        directory: &Path,
        room: HostStorage,
    ) -> Result<Replicator, FilesError> {
        let bell = Arc::new(Bell::default());
        let directory = directory.to_owned();
        let acting = DirectoryUser::new(service.users(), None);
        let _ = acting.in_directory(&directory);
        let mut work = Work {
            acting,
            directory: directory.clone(),
            room,
            service: Arc::clone(service),
            bell: Arc::clone(&bell),
            job: None,
            before: BTreeMap::new(),
        };
        spawn("ckpt-replicator", move || work.run()).map_err(FilesError::reading(&directory))?;
        Ok(Replicator { bell, directory })
    }

    /// Reports a change in the directory.
    pub fn nudge(&self) {
        self.bell.ring();
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Replicator {
    fn drop(&mut self) {
        self.bell.end();
    }
}

#[derive(Debug)]
struct Work {
    acting: DirectoryUser,
    directory: PathBuf,
    room: HostStorage,
    service: Arc<Service>,
    bell: Arc<Bell>,
    job: Option<Job>,
    /// The files of new steps, and the time since which they are unchanged.
    before: BTreeMap<u64, (Instant, Vec<Member>)>,
}

/// The job of the served trainer.
#[derive(Debug)]
struct Job {
    asked: ReplicatorRequest,
    run: String,
    catalog: Catalog,
}

impl Work {
    fn run(&mut self) {
        lower_priority(5, true);
        self.resume();
        let mut message = String::new();
        loop {
            if let Some(folder) = self.acting.in_directory(&self.directory)
                && let Err(error) = self.look(&folder)
            {
                let text = error.to_string();
                if text != message {
                    tracing::warn!(directory = %self.directory.display(), error = text, "a replicator's directory");
                    let _ = report(&folder, ERRORS_NAME, &format!("{text}\n"));
                }
                message = text;
            }
            if !self.bell.wait(self.room.interval) {
                return;
            }
        }
    }

    /// Continues the job that was served before a restart of the agent. Its trainer does not notice.
    fn resume(&mut self) {
        let asked = fs::read_to_string(self.room.home.join(REQUEST_NAME)).ok();
        if let Some(asked) = asked.and_then(|text| parse(&text).ok()) {
            self.job = self.begin(asked).ok();
        }
    }

    fn begin(&self, asked: ReplicatorRequest) -> Result<Job, FilesError> {
        let run = asked.job.clone();
        let catalog = Catalog::open(&self.room.home.join(&run), self.service.users(), false)?;
        host::keep_decision(&self.service, &run, &catalog);
        Ok(Job { asked, run, catalog })
    }

    fn look(&mut self, folder: &UserDirectory) -> Result<(), FilesError> {
        let text = {
            let _as_user = folder.act()?;
            folder.at.read(Path::new(REQUEST_NAME)).and_then(|file| {
                let mut text = String::new();
                file.take(MAX_REQUEST_BYTES).read_to_string(&mut text).map(|_| text)
            })
        };
        match text {
            Ok(text) if text.is_empty() => remove(folder, REQUEST_NAME),
            Ok(text) => self.take_up(folder, &text),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(FilesError::reading(&self.directory.join(REQUEST_NAME))(error))
            }
            Err(_) => self.serve(folder),
        }
    }

    /// Handles the request of a new trainer: ends the previous job, stores and removes the request, and restores a step.
    fn take_up(&mut self, folder: &UserDirectory, text: &str) -> Result<(), FilesError> {
        let directory = self.directory.clone();
        let asked = match parse(text) {
            Ok(asked) => asked,
            Err(problem) => {
                report(folder, FAILED_NAME, &format!("{REQUEST_NAME}: {problem}\n"))?;
                return remove(folder, REQUEST_NAME);
            }
        };
        for refusal in &asked.refused {
            tracing::warn!(job = asked.job, "a setting of a trainer's replicator.yaml is ignored: {refusal}");
        }
        self.before.clear();
        self.job = None;
        tidy(folder)?;
        fs::create_dir_all(&self.room.home).map_err(FilesError::reading(&self.room.home))?;
        write_at_once(&self.room.home, REQUEST_NAME, text.as_bytes())
            .map_err(FilesError::reading(&self.room.home))?;
        let mut job = self.begin(asked)?;
        let packs = job.catalog.packs().values().cloned().collect();
        host::offer(&self.service, &directory, REPLICATED, packs);
        remove(folder, REQUEST_NAME)?;
        let mut last = None;
        for _ in 0..MAX_TRIES {
            match self.restore(folder, &mut job) {
                Ok(step) => {
                    tracing::info!(
                        run = job.run,
                        node = job.asked.node,
                        step,
                        "a trainer is served as its replicator"
                    );
                    self.offer(&job);
                    self.job = Some(job);
                    return Ok(());
                }
                Err(error) => {
                    report(folder, ERRORS_NAME, &format!("restore: {error}\n"))?;
                    last = Some(error);
                }
            }
        }
        let message = last.map(|error| error.to_string()).unwrap_or_default();
        report(folder, FAILED_NAME, &format!("no step could be restored: {message}\n"))
    }

    /// Decides on a step, fetches this node's part and reports it to the trainer.
    fn restore(&self, folder: &UserDirectory, job: &mut Job) -> Result<Option<u64>, FilesError> {
        let spool = &self.room.spool;
        fs::create_dir_all(spool).map_err(FilesError::reading(spool))?;
        let progress = Mutex::new(None);
        let tell_of = |at: Progress| {
            let mut progress = lock(&progress);
            if progress.replace(at.step) != Some(at.step) {
                let _ = report(folder, PRERESTORE_NAME, &prerestore(Some(at.step)));
            }
        };
        let node = job.asked.node;
        let restored = self.service.restore(&host::spool_of(spool, &job.run), Some(&[node]), &tell_of)?;
        host::keep_decision(&self.service, &job.run, &job.catalog);
        let key = restored.decision.step;
        report(folder, PRERESTORE_NAME, &prerestore(key.as_ref().map(|key| key.step)))?;
        let data = key.as_ref().map(|key| self.land(folder, job, key)).transpose()?;
        let _as_user = folder.act()?;
        for worker in 0..job.asked.workers {
            let link = PathBuf::from(restore_name(&job.asked, key.as_ref().map(|key| key.step), worker));
            let made = match &data {
                Some(data) => folder.at.link_to(Path::new(data), &link),
                None => folder.at.write_whole(&link, &[]),
            };
            made.map_err(FilesError::reading(&folder.at.path().join(link)))?;
        }
        Ok(key.map(|key| key.step))
    }

    /// Unpacks this node's part of a step. Returns the name of its directory.
    fn land(&self, folder: &UserDirectory, job: &mut Job, key: &StepKey) -> Result<String, FilesError> {
        let (directory, spool) = (&self.directory, &self.room.spool);
        let home = host::in_spool(spool, key.step, job.asked.node);
        if let Ok(sealed) =
            SealedShard::read(&home.join(MANIFEST_NAME)).and_then(|sealed| sealed.owned_as(&job.run))
        {
            let data = data_name(&sealed.shard.root);
            let base = directory.join(&data);
            {
                let _as_user = folder.act()?;
                let _ = folder.at.remove_tree(Path::new(&data));
            }
            let way = UnpackMode::Inside(Path::new(&data));
            let members = unpack(&home.join(ARCHIVE_NAME), &sealed, folder, way, &|_, _| true)?;
            job.catalog.insert(sealed.manifest, &base, folder.access.user(), members, false)?;
            let _ = fs::remove_dir_all(spool.join(format!("step-{:012}", key.step)));
            return Ok(data);
        }
        let pack = job.catalog.packs().get(&key.step).filter(|pack| pack.sealed.shard.key == *key);
        let pack = pack.ok_or_else(|| FilesError::Manifest(format!("step {} is not here", key.step)))?;
        Ok(data_name(&pack.sealed.shard.root))
    }

    /// Seals new steps and renames them to their root; deletes old ones when newer ones are safe.
    fn serve(&mut self, folder: &UserDirectory) -> Result<(), FilesError> {
        let Some(mut job) = self.job.take() else { return Ok(()) };
        let served = self.seal_new(folder, &mut job);
        self.collect(folder, &mut job);
        host::keep_decision(&self.service, &job.run, &job.catalog);
        self.offer(&job);
        self.job = Some(job);
        served
    }

    fn offer(&self, job: &Job) {
        host::offer(
            &self.service,
            &self.directory,
            REPLICATED,
            job.catalog.packs().values().cloned().collect(),
        );
    }

    fn seal_new(&mut self, folder: &UserDirectory, job: &mut Job) -> Result<(), FilesError> {
        let directory = self.directory.clone();
        let mut now = BTreeMap::new();
        {
            let _as_user = folder.act()?;
            for (name, kind) in folder.at.list(Path::new("")).map_err(FilesError::reading(&directory))? {
                let step = name.to_str().and_then(step_of);
                // A link is from a restore.
                let Some(step) = step.filter(|_| kind == FileType::Directory) else { continue };
                match folder.at.below(Path::new(&name)).and_then(|at| tree::members(&at, "")) {
                    Ok(members) => _ = now.insert(step, (name, members)),
                    Err(error) => tracing::debug!(step, %error, "a step that cannot be read yet"),
                }
            }
        }
        for (step, (name, members)) in &now {
            if members.is_empty() || !host::is_same(&self.before, *step, Some(members), self.room.interval) {
                continue;
            }
            let from = directory.join(name);
            let content = Content::new(&from, folder.access.clone(), members.clone())?;
            let identity = Identity {
                job: JOB.to_owned(),
                attempt: host::fence(&self.service, &job.run) * ATTEMPTS_PER_DECISION,
                step: *step,
                rank: job.asked.node,
                world_size: job.asked.nodes,
            };
            let manifest = match content.seal(&identity, &job.run, now_unix_s()) {
                Err(FilesError::Changed(_)) => continue,
                sealed => sealed?,
            };
            let sealed = manifest.encode();
            let root = SealedShard::of(sealed.clone())
                .map_err(|error| FilesError::Manifest(error.to_string()))?
                .shard
                .root;
            let data = data_name(&root);
            let base = directory.join(&data);
            {
                let _as_user = folder.act()?;
                let _ = folder.at.remove_tree(Path::new(&data));
                let named = folder.at.rename(Path::new(name), Path::new(&data));
                named.map_err(FilesError::reading(&from))?;
            }
            if let Some(before) = job.catalog.remove(*step) {
                self.service.shared.withdraw(&before.sealed.shard.root);
                self.delete(folder, before.content.base());
            }
            job.catalog.insert(sealed, &base, folder.access.user(), members.clone(), false)?;
            tracing::info!(run = job.run, step, "a step of a trainer was sealed");
        }
        let now = now.into_iter().map(|(step, (_, members))| (step, members)).collect();
        self.before = host::since(std::mem::take(&mut self.before), now);
        Ok(())
    }

    /// Deletes steps that no rule keeps: the volume is memory, and its trainer leaves the cleanup to the replicator.
    fn collect(&self, folder: &UserDirectory, job: &mut Job) {
        let gone = self.service.shared.deletable();
        let of_job = gone.iter().filter(|key| key.run == job.run && key.job == JOB);
        for key in of_job {
            let is_it = job.catalog.packs().get(&key.step).is_some_and(|pack| pack.sealed.shard.key == *key);
            if let Some(pack) = is_it.then(|| job.catalog.remove(key.step)).flatten() {
                self.delete(folder, pack.content.base());
            }
        }
    }

    fn delete(&self, folder: &UserDirectory, base: &Path) {
        let Ok(below) = base.strip_prefix(&self.directory) else { return };
        let Ok(_as_user) = folder.act() else { return };
        let _ = folder.at.remove_tree(below);
    }
}

/// Removes what an earlier trainer left, except sealed steps.
fn tidy(folder: &UserDirectory) -> Result<(), FilesError> {
    let _as_user = folder.act()?;
    for (name, _) in folder.at.list(Path::new("")).map_err(FilesError::reading(folder.at.path()))? {
        if name.to_str().is_none_or(stays) {
            continue;
        }
        let removed = folder.at.remove_tree(Path::new(&name));
        removed.map_err(FilesError::reading(&folder.at.path().join(&name)))?;
    }
    Ok(())
}

fn remove(folder: &UserDirectory, name: &str) -> Result<(), FilesError> {
    let _as_user = folder.act()?;
    folder.at.remove_file(Path::new(name)).map_err(FilesError::reading(&folder.at.path().join(name)))
}

/// Writes a file for the trainer atomically.
fn report(folder: &UserDirectory, name: &str, text: &str) -> Result<(), FilesError> {
    let _as_user = folder.act()?;
    let put = folder.at.write_whole(Path::new(name), text.as_bytes());
    put.map_err(FilesError::reading(&folder.at.path().join(name)))
}
