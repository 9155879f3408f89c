//! Caches of compiled programs, kept over restarts and passed to hosts that lack files of them. Missing files are added from all
//! caches that other hosts have sealed, the newest first; no file is replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use mainstay_checkpoint::cache::{Cached, chosen, run_of, worth_bringing};
use mainstay_checkpoint::inventory::StepState;
use mainstay_checkpoint_format::{Identity, MANIFEST_NAME};

use super::FilesError;
use super::all::{CacheRequest, HostStorage};
use super::catalog::Catalog;
use super::host::{self, Bell, DirectoryUser, UserDirectory};
use super::pack::{ARCHIVE_NAME, Content};
use super::tree::{self, Member};
use super::unpack::{UnpackMode, unpack};
use crate::lock;
use crate::os::{lower_priority, now_unix_s, spawn};
use crate::peer::error::PeerError;
use crate::peer::user::User;
use crate::peer::{Progress, Service};
use crate::seal::SealedShard;

/// The name of the job of all caches.
const JOB: &str = "cache";

/// A cache that is kept until this value is dropped.
#[derive(Debug)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    request: CacheRequest,
    room: HostStorage,
    service: Arc<Service>,
    catalog: Mutex<Catalog>,
    /// The files of each archive that was added, by its root: it is not fetched again while they exist.
    brought: Mutex<BTreeMap<String, Vec<String>>>,
    bell: Bell,
    acting: DirectoryUser,
}

impl Cache {
    /// Starts to keep a cache.
    pub(super) fn start(
        service: &Arc<Service>,
        request: CacheRequest,
        room: HostStorage,
    ) -> Result<Cache, FilesError> {
        let catalog = Mutex::new(Catalog::open(&room.home, service.users(), false)?);
        let service = Arc::clone(service);
        let acting = DirectoryUser::new(service.users(), None);
        let _ = acting.in_directory(&request.directory);
        let inner = Arc::new(Inner {
            request,
            room,
            service,
            catalog,
            brought: Mutex::default(),
            bell: Bell::default(),
            acting,
        });
        let working = Arc::clone(&inner);
        spawn("ckpt-cache", move || working.work()).map_err(FilesError::reading(&inner.room.home))?;
        Ok(Cache { inner })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.inner.request.name
    }

    /// Adds files that other hosts have compiled and this one lacks. Returns their number. A missing directory is created as `user`'s.
    ///
    /// # Errors
    /// Nothing could be fetched; the compilers run again.
    pub fn pull(&self, user: User) -> Result<usize, FilesError> {
        self.inner.pull(user)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.inner.bell.end();
    }
}

impl Inner {
    fn catalog(&self) -> MutexGuard<'_, Catalog> {
        lock(&self.catalog)
    }

    fn brought(&self) -> MutexGuard<'_, BTreeMap<String, Vec<String>>> {
        lock(&self.brought)
    }

    fn run_id(&self) -> String {
        run_of(&self.request.name, self.service.name())
    }

    fn work(&self) {
        lower_priority(15, true);
        let mut message = String::new();
        loop {
            if let Err(error) = self.look() {
                let text = error.to_string();
                if text != message {
                    tracing::warn!(cache = self.request.name, error = text, "a cache");
                }
                message = text;
            }
            if !self.bell.wait(self.room.interval) {
                return;
            }
        }
    }

    fn look(&self) -> Result<(), FilesError> {
        let CacheRequest { directory, quota, quiet, .. } = &self.request;
        let Some(folder) = self.acting.in_directory(directory) else { return Ok(()) };
        let user = folder.access.user();
        let members = {
            let _as_user = folder.act()?;
            tree::plain(&folder.at)
        };
        let now = now_unix_s();
        let cached: Vec<Cached> = members
            .iter()
            .map(|member| Cached {
                path: member.path.clone(),
                size: member.mark.size,
                written: member.mark.written.0,
            })
            .collect();
        let (signed_now, quiet) =
            (i64::try_from(now).unwrap_or(0), i64::try_from(*quiet).unwrap_or(i64::MAX));
        let kept: BTreeSet<&str> =
            chosen(&cached, signed_now, quiet, *quota).iter().map(|file| file.path.as_str()).collect();
        let kept: Vec<Member> =
            members.iter().filter(|member| kept.contains(member.path.as_str())).cloned().collect();
        let mut catalog = self.catalog();
        let before = catalog.packs().values().next_back().cloned();
        if kept.is_empty() || before.as_ref().is_some_and(|pack| pack.content.members() == kept) {
            let packs = catalog.packs().values().cloned().collect();
            host::offer(&self.service, directory, &self.run_id(), packs);
            return Ok(());
        }
        let content = Content::new(directory, folder.access, kept)?;
        // Steps increase with time, also if the clock was set back.
        let step = before.as_ref().map_or(now, |before| now.max(before.sealed.shard.key.step + 1));
        let identity = Identity { job: JOB.to_owned(), attempt: 0, step, rank: 0, world_size: 1 };
        let manifest = match content.seal(&identity, &self.run_id(), now) {
            Err(FilesError::Changed(_)) => return Ok(()),
            sealed => sealed?,
        };
        let members = content.members().to_vec();
        let files = members.len();
        catalog.insert(manifest.encode(), directory, user, members, false)?;
        if let Some(before) = before {
            catalog.remove(before.sealed.shard.key.step);
        }
        host::offer(&self.service, directory, &self.run_id(), catalog.packs().values().cloned().collect());
        tracing::info!(cache = self.request.name, files, "a cache was sealed");
        Ok(())
    }

    fn pull(&self, user: User) -> Result<usize, FilesError> {
        let (directory, spool) = (&self.request.directory, &self.room.spool);
        fs::create_dir_all(spool).map_err(FilesError::reading(spool))?;
        {
            let _as_user =
                self.service.users().access(user).act_to_write().map_err(FilesError::reading(directory))?;
            fs::create_dir_all(directory).map_err(FilesError::reading(directory))?;
        }
        let folder = self
            .acting
            .in_directory(directory)
            .ok_or_else(|| PeerError::Local(format!("{} is not a directory", directory.display())))?;
        // No other check while it is unpacked: it would seal a part.
        let _catalog = self.catalog();
        self.service.refresh();
        self.service.refresh_durable(&self.run_id());
        let sources = worth_bringing(
            &self.service.copies(),
            &self.request.name,
            self.service.name(),
            self.request.quota,
        );
        let roots: BTreeSet<&str> = sources.iter().flat_map(StepState::roots).collect();
        self.brought().retain(|root, _| roots.contains(root.as_str()));
        let (mut added, mut failed) = (0, None);
        for source in sources.iter().filter(|source| !self.is_here(source, &folder)) {
            match self.restore(source, &folder) {
                Ok(files) => added += files,
                // Other hosts may have compiled the same files.
                Err(error) => {
                    tracing::warn!(cache = self.request.name, run = %source.key.run, %error, "a cache was not brought");
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if added == 0 => Err(error),
            _ => Ok(added),
        }
    }

    /// Whether all of it was added before and still exists.
    fn is_here(&self, source: &StepState, folder: &UserDirectory) -> bool {
        let brought = self.brought();
        let files = source.roots().find_map(|root| brought.get(root));
        let Ok(_as_user) = folder.act() else { return false };
        files.is_some_and(|files| files.iter().all(|file| folder.at.is_there(Path::new(file))))
    }

    /// Adds the files that one host has sealed. Returns how many were missing.
    fn restore(&self, source: &StepState, folder: &UserDirectory) -> Result<usize, FilesError> {
        let (name, spool) = (&self.request.name, &self.room.spool);
        let run = source.key.run_id();
        let silent = |_: Progress| {};
        let restored = self.service.restore(&host::spool_of(spool, run), Some(&[0]), &silent)?;
        let Some(key) = restored.decision.step else { return Ok(0) };
        let home = host::in_spool(spool, key.step, 0);
        // This host's own archive was not fetched.
        let Ok(sealed) = SealedShard::read(&home.join(MANIFEST_NAME)) else { return Ok(0) };
        let before: BTreeSet<String> = {
            let _as_user = folder.act()?;
            tree::plain(&folder.at).into_iter().map(|member| member.path).collect()
        };
        // Any file may be written by a compiler.
        let members = unpack(&home.join(ARCHIVE_NAME), &sealed, folder, UnpackMode::Add, &|_, _| true);
        let _ = fs::remove_dir_all(spool.join(format!("step-{:012}", key.step)));
        let files: Vec<String> = members?.into_iter().map(|member| member.path).collect();
        let added = files.iter().filter(|file| !before.contains(*file)).count();
        tracing::info!(cache = name, run, files = added, "a cache came from another host");
        self.brought().insert(sealed.shard.root, files);
        Ok(added)
    }
}
