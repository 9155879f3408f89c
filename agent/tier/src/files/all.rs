//! All directories, replicators and caches of trainers' files that one agent manages.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use mainstay_checkpoint::files::Rule;
use mainstay_checkpoint::owner::{name, owner};

use super::FilesError;
use super::cache::Cache;
use super::replicator::Replicator;
use super::watch::{self, FileWatch};
use crate::lock;
use crate::peer::Service;
use crate::peer::user::{Access, User};

/// Directories and the interval of checks.
#[derive(Clone, Debug)]
pub struct FilesSettings {
    /// Directory of the notes.
    pub home: PathBuf,
    /// Directory of restored archives until they are unpacked. Needs as much room as a step of this host.
    pub spool: PathBuf,
    /// The hosts that hold a part of each step, by peer name.
    pub hosts: Vec<String>,
    /// Time between two checks.
    pub interval: Duration,
}

/// What this process keeps for one directory, outside it.
#[derive(Clone, Debug)]
pub(super) struct HostStorage {
    /// Directory of the notes.
    pub(super) home: PathBuf,
    /// Directory of restored archives until they are unpacked.
    pub(super) spool: PathBuf,
    /// Time between two checks.
    pub(super) interval: Duration,
}

impl FilesSettings {
    fn storage(&self, name: &str) -> HostStorage {
        HostStorage { home: self.home.join(name), spool: self.spool.join(name), interval: self.interval }
    }
}

/// A directory to watch.
#[derive(Clone, Debug)]
pub struct WatchRequest {
    /// The directory.
    pub directory: PathBuf,
    /// The run id of what is in it, the same on each host.
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
    /// The hosts that hold a part; empty: those of the plan.
    pub hosts: Vec<String>,
    /// Whether all hosts see the same files; none: derived from the file system.
    pub shared: Option<bool>,
}

/// A cache to be kept.
#[derive(Clone, Debug)]
pub struct CacheRequest {
    /// Its name, the same on all hosts.
    pub name: String,
    /// The directory that compilers write to.
    pub directory: PathBuf,
    /// Maximum number of bytes to keep.
    pub quota: u64,
    /// Seconds without a change before a file is sealed.
    pub quiet: u64,
}

/// All watched directories, replicators and caches of an agent. They stop when it is dropped.
#[derive(Debug)]
pub struct Files {
    service: Arc<Service>,
    plan: FilesSettings,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    watches: Vec<(Arc<FileWatch>, Vec<Rule>)>,
    replicators: Vec<Replicator>,
    caches: Vec<Arc<Cache>>,
}

impl Files {
    /// Creates an empty set.
    pub fn new(service: Arc<Service>, plan: FilesSettings) -> Files {
        Files { service, plan, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Ensures that a directory exists and belongs to this user; creates it with the user's rights.
    pub fn ensure_directory(&self, directory: &Path, user: User) -> io::Result<()> {
        ensure_directory(directory, &self.service.users().access(user))
    }

    /// Starts to watch a directory. An existing watch continues.
    ///
    /// # Errors
    /// This host is not one of those that hold a part, or the directory of notes cannot be created.
    pub fn watch(&self, request: WatchRequest) -> Result<Arc<FileWatch>, FilesError> {
        let mut inner = self.inner();
        // A request of another user for a directory of the same name is a separate watch.
        let is_it = |known: &FileWatch| {
            known.directory() == request.directory && owner(known.run()) == owner(&request.run)
        };
        let same = inner.watches.iter().find(|(known, _)| is_it(known));
        if let Some((known, _)) =
            same.filter(|(known, rules)| known.run() == request.run && *rules == request.rules)
        {
            return Ok(Arc::clone(known));
        }
        inner.watches.retain(|(known, _)| !is_it(known));
        let part = self.part(&request.hosts)?;
        let rules = request.rules.clone();
        let room = self.plan.storage(&name_for_run(&request.directory, &request.run));
        let settings = watch::Settings { request, part, storage: room };
        let watch = Arc::new(FileWatch::start(&self.service, settings)?);
        inner.watches.push((Arc::clone(&watch), rules));
        Ok(watch)
    }

    /// The part of each step that this host holds, and the number of parts.
    fn part(&self, hosts: &[String]) -> Result<(u32, u32), FilesError> {
        let mut hosts = if hosts.is_empty() { self.plan.hosts.clone() } else { hosts.to_vec() };
        hosts.sort();
        hosts.dedup();
        if hosts.is_empty() {
            return Ok((0, 1));
        }
        let me = self.service.name();
        let at = hosts.iter().position(|host| host == me);
        let at = at
            .ok_or_else(|| FilesError::Manifest(format!("{me} is none of the hosts {}", hosts.join(", "))))?;
        Ok((u32::try_from(at).unwrap_or(0), u32::try_from(hosts.len()).unwrap_or(u32::MAX)))
    }

    /// The watch of a directory for this run of a user: the user's own, or one of the configuration under the same name.
    pub fn find(&self, directory: &Path, run: &str) -> Option<Arc<FileWatch>> {
        let inner = self.inner();
        let named = |run: &str| {
            let of_run = |(watch, _): &&(Arc<FileWatch>, Vec<Rule>)| {
                watch.directory() == directory && watch.run() == run
            };
            inner.watches.iter().find(of_run).map(|(watch, _)| Arc::clone(watch))
        };
        named(run).or_else(|| named(name(run)))
    }

    /// Serves a directory with the protocol of GKE's replicator.
    pub fn replicate(&self, directory: &Path) -> Result<(), FilesError> {
        let room = self.plan.storage(&name_of_directory(directory));
        let replicator = Replicator::start(&self.service, directory, room)?;
        self.inner().replicators.push(replicator);
        Ok(())
    }

    /// Starts to keep a cache.
    pub fn cache(&self, request: CacheRequest) -> Result<(), FilesError> {
        let room = self.plan.storage(&name_of_directory(&request.directory));
        let cache = Arc::new(Cache::start(&self.service, request, room)?);
        self.inner().caches.push(cache);
        Ok(())
    }

    /// Adds to each cache the files that this host lacks of those sealed on other hosts. Returns the result for each cache, by name.
    pub fn pull_caches(&self, user: User) -> Vec<(String, Result<usize, FilesError>)> {
        let caches = self.inner().caches.clone();
        caches.into_iter().map(|cache| (cache.name().to_owned(), cache.pull(user))).collect()
    }

    /// All directories to monitor for changes.
    pub fn directories(&self) -> Vec<PathBuf> {
        let inner = self.inner();
        let watched = inner.watches.iter().map(|(watch, _)| watch.directory());
        let replicated = inner.replicators.iter().map(Replicator::directory);
        watched.chain(replicated).map(Path::to_owned).collect()
    }

    /// Reports a change in one of the directories.
    pub fn nudge(&self, directory: &Path) {
        let inner = self.inner();
        inner
            .watches
            .iter()
            .filter(|(item, _)| item.directory() == directory)
            .for_each(|(item, _)| item.nudge());
        inner.replicators.iter().filter(|item| item.directory() == directory).for_each(Replicator::nudge);
    }
}

/// Name of the notes of a directory.
fn name_of_directory(directory: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    blake3::hash(directory.as_os_str().as_bytes()).to_hex()[..16].to_owned()
}

/// Name of the notes of a directory for one owner's run: notes of two users are never shared.
fn name_for_run(directory: &Path, run: &str) -> String {
    let name = name_of_directory(directory);
    owner(run).map_or(name.clone(), |uid| format!("{name}-{uid}"))
}

fn ensure_directory(directory: &Path, access: &Access) -> io::Result<()> {
    let user = access.user();
    let _as_user = match access.act_to_write() {
        Ok(as_user) => as_user,
        // A directory that was handed over belongs to its user. The user followed the links in its name; they are not followed again.
        Err(error) => return access.act()?.open(directory).map(drop).map_err(|_| error),
    };
    fs::create_dir_all(directory)?;
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() {
        let problem = format!(
            "{} is a link or no directory: name the directory itself, for a link may lead elsewhere later",
            directory.display()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    let owner = found.uid();
    if user.uid != 0 && owner != user.uid {
        let problem = format!("{} is of user {owner}, not of user {}", directory.display(), user.uid);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    Ok(())
}
