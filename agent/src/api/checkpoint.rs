//! `mainstay.v1.CheckpointService`: what lies where, and how it comes back. On the Unix socket only, where the kernel says
//! who calls: files are touched with that user's rights.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_core::base::id::JobId;
use mainstay_core::checkpoint::files::Kind;
use mainstay_core::checkpoint::inventory::{newest_whole, steps};
use mainstay_core::checkpoint::owner::{self, owned};
use mainstay_core::view::node::JobView;
use mainstay_durable::Tier;
use mainstay_proto::v1::checkpoint_service_server::CheckpointService;
use mainstay_proto::v1::restore_checkpoint_response::Message;
use mainstay_proto::v1::{
    CollectCheckpointsRequest, CollectCheckpointsResponse, ListCheckpointsRequest, ListCheckpointsResponse,
    RemoveCheckpointRequest, RemoveCheckpointResponse, RestoreCheckpointRequest, RestoreCheckpointResponse,
    RestoreProgress, RestoreResult, WatchCheckpointsRequest, WatchCheckpointsResponse,
};
use mainstay_tier::files::{Begun, FileWatch, Files, FilesError, Wanted, ensure_directory};
use mainstay_tier::peer::{Progress, Service, User, Watched, may_serve};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::convert::checkpoint::{
    Seen, advice_out, durable_out, kept_by, listing, progress_out, put_back_out, result_out, small,
};
use super::homes::{Home, Homes, newest_of_each};
use super::roles::Roles;
use crate::state::StateReader;
use crate::store::kept::Kept;

/// Restores of one user that may run at once.
const RESTORES: usize = 16;

/// Letters of a run id that are shown.
const LONGEST_RUN: usize = 128;

/// The service.
#[derive(Debug)]
pub struct Checkpoints {
    peers: Option<Arc<Service>>,
    durable: Option<Arc<Tier>>,
    files: Option<Arc<Files>>,
    /// The jobs whose advice is told along.
    board: StateReader,
    roles: Roles,
    /// The directories that are watched, over restarts of the agent.
    kept: Arc<Mutex<Kept<Vec<Watched>>>>,
    /// Those into which trainers write in their own way.
    kept_files: Arc<Mutex<Kept<Vec<FilesPlace>>>>,
    /// Which directories runs wrote into.
    homes: Arc<Homes>,
    /// Restores that run, by user.
    running: Arc<Mutex<BTreeMap<u32, usize>>>,
}

impl Checkpoints {
    /// A service over `peers` and durable storage, if the agent has any, that remembers in `state_dir` which directories it watches.
    pub fn new(
        peers: Option<Arc<Service>>,
        durable: Option<Arc<Tier>>,
        files: Option<Arc<Files>>,
        board: StateReader,
        roles: Roles,
        state_dir: &Path,
    ) -> Checkpoints {
        let kept: Kept<Vec<Watched>> = Kept::open(&state_dir.join("checkpoint-directories.json"));
        if let Some(peers) = &peers {
            // One that was written down before runs had owners has its user beside it.
            let owned_place =
                |place: &Watched| Watched { run: owned(place.user.uid, &place.run), ..place.clone() };
            kept.value().into_iter().flatten().for_each(|place| peers.watch(owned_place(place)));
        }
        let kept_files: Kept<Vec<FilesPlace>> = Kept::open(&state_dir.join("checkpoint-trainers.json"));
        for place in kept_files.value().into_iter().flatten() {
            if let (Some(files), Some(wanted)) = (&files, place.wanted())
                && let Err(error) = files.watch(wanted)
            {
                tracing::warn!(directory = %place.directory.display(), %error, "a directory is not watched any more");
            }
        }
        let (kept, kept_files) = (Arc::new(Mutex::new(kept)), Arc::new(Mutex::new(kept_files)));
        let homes = Arc::new(Homes::open(state_dir));
        Checkpoints { peers, durable, files, board, roles, kept, kept_files, homes, running: Arc::default() }
    }

    fn peers(&self) -> Result<Arc<Service>, Status> {
        self.peers.clone().ok_or_else(|| {
            Status::failed_precondition(
                "this agent keeps no replicas: neither checkpoint.listen nor checkpoint.durable is set in its configuration",
            )
        })
    }

    /// Of which runs a user is told: of one owner's, or of all.
    fn seen_by(&self, user: User, asked: Option<u32>) -> Result<Option<u32>, Status> {
        match asked {
            Some(uid) if uid != user.uid && !self.roles.is_operator(user) => {
                Err(Status::permission_denied(format!("user {} may not see runs of user {uid}", user.uid)))
            }
            Some(uid) => Ok(Some(uid)),
            None if self.roles.is_operator(user) => Ok(None),
            None => Ok(Some(user.uid)),
        }
    }

    /// One more restore of this user, until it is dropped.
    fn restoring(&self, user: User) -> Result<Restoring, Status> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let of_user = running.entry(user.uid).or_insert(0);
        if *of_user >= RESTORES {
            return Err(Status::resource_exhausted(format!(
                "user {} has {RESTORES} restores running, which is the most: wait until one has ended",
                user.uid
            )));
        }
        *of_user += 1;
        Ok(Restoring { running: Arc::clone(&self.running), uid: user.uid })
    }

    fn watching(&self) -> Watching {
        let (files, kept, kept_files) =
            (self.files.clone(), Arc::clone(&self.kept), Arc::clone(&self.kept_files));
        Watching { files, kept, kept_files }
    }
}

/// What is watched, for threads that may block.
struct Watching {
    files: Option<Arc<Files>>,
    kept: Arc<Mutex<Kept<Vec<Watched>>>>,
    kept_files: Arc<Mutex<Kept<Vec<FilesPlace>>>>,
}

impl Watching {
    /// The watch of a directory into which a trainer writes in its own way: one that is there, or that is asked for.
    fn watch_files(&self, place: &Watched, kind: &str) -> Result<Option<Arc<FileWatch>>, Status> {
        let Some(files) = &self.files else { return Ok(None) };
        if kind.is_empty() {
            let known = files.find(&place.directory, &place.run);
            // One of the configuration is for whoever owns the directory.
            let is_theirs = || ensure_directory(&place.directory, place.user).is_ok();
            return Ok(known.filter(|watch| watch.run() == place.run || is_theirs()));
        }
        Kind::parse(kind).map_err(Status::invalid_argument)?;
        // One that is watched already may be away for a moment: another one made in its place would keep it away.
        let is_new = files.find(&place.directory, &place.run).is_none();
        if is_new || place.directory.symlink_metadata().is_ok() {
            ensure_directory(&place.directory, place.user)
                .map_err(|error| Status::permission_denied(error.to_string()))?;
        }
        let known = FilesPlace {
            run: place.run.clone(),
            directory: place.directory.clone(),
            kind: kind.to_owned(),
            user: Some(place.user),
        };
        let gone = || Status::aborted(format!("{} is gone", place.directory.display()));
        let watch = files.watch(known.wanted().ok_or_else(gone)?);
        let watch = watch.map_err(|error| Status::aborted(error.to_string()))?;
        let mut kept = self.kept_files.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.value().cloned().unwrap_or_default();
        let uid_of = |place: &FilesPlace| place.user.map(|user| user.uid);
        all.retain(|other| {
            other.directory != known.directory || uid_of(other).is_some_and(|uid| Some(uid) != uid_of(&known))
        });
        all.push(known);
        let all = newest_of_each(all, uid_of);
        if let Err(error) = kept.keep(&all) {
            tracing::warn!(%error, "the watched directories cannot be written down");
        }
        Ok(Some(watch))
    }

    fn remember(&self, place: &Watched) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.value().cloned().unwrap_or_default();
        all.retain(|other| other.directory != place.directory || other.user.uid != place.user.uid);
        all.push(place.clone());
        let all = newest_of_each(all, |place| Some(place.user.uid));
        if let Err(error) = kept.keep(&all) {
            tracing::warn!(%error, "the watched checkpoint directories cannot be written down");
        }
    }
}

/// A directory that a launcher wants watched, for a trainer that writes in its own way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FilesPlace {
    run: String,
    directory: PathBuf,
    kind: String,
    /// Who asked; in what an earlier version wrote down, the directory's owner.
    #[serde(default)]
    user: Option<User>,
}

impl FilesPlace {
    /// None where nobody knows whose it is: it was written down by an earlier version, and the directory is gone.
    fn wanted(&self) -> Option<Wanted> {
        let owner = || {
            let found = std::fs::symlink_metadata(&self.directory).ok().filter(std::fs::Metadata::is_dir)?;
            Some(User { uid: found.uid(), gid: found.gid() })
        };
        let user = self.user.or_else(owner)?;
        Some(Wanted {
            directory: self.directory.clone(),
            run: owned(user.uid, &self.run),
            user: Some(user),
            rules: Kind::parse(&self.kind).unwrap_or(Kind::Auto).rules(),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            shared: None,
        })
    }
}

/// A restore that runs: it counts against its user until it is dropped.
#[derive(Debug)]
struct Restoring {
    running: Arc<Mutex<BTreeMap<u32, usize>>>,
    uid: u32,
}

impl Drop for Restoring {
    fn drop(&mut self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_user) = running.get_mut(&self.uid) {
            *of_user -= 1;
            if *of_user == 0 {
                running.remove(&self.uid);
            }
        }
    }
}

/// A run as agents name it. Some names are not for users.
fn run_of(run: &str, user: User) -> Result<String, Status> {
    let problem = if let Some(problem) = JobId::problem(run) {
        problem
    } else if run == "files" || run.starts_with("cache:") {
        "`files` and names that begin with `cache:` are the agent's own".to_owned()
    } else {
        return Ok(owned(user.uid, run));
    };
    let shown: String = run.chars().take(LONGEST_RUN).filter(|letter| !letter.is_control()).collect();
    Err(Status::invalid_argument(format!("run {shown:?}: {problem}; choose another --rdzv-id")))
}

/// What was compiled elsewhere need not be compiled again.
fn pull_caches(files: &Files, user: User) {
    for (cache, pulled) in files.pull_caches(user) {
        if let Err(error) = pulled {
            tracing::warn!(cache, %error, "a cache could not be brought");
        }
    }
}

/// What this agent cannot do for the user of a directory, and why. What it may only read it restores by way of the user's process.
fn problem_of(place: &Watched) -> Option<String> {
    let directory = place.directory.display();
    let unserved = may_serve(place.user, &place.directory).err()?;
    Some(format!("nothing in {directory} is replicated or restored: {unserved}"))
}

/// Work that may take long and blocks, on a thread of its own.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Status::internal(error.to_string()))
}

fn place(run: String, directory: String, pool: String, user: User) -> Result<Watched, Status> {
    let directory = PathBuf::from(directory);
    let pool = (!pool.is_empty()).then(|| PathBuf::from(pool));
    if run.is_empty() || !directory.is_absolute() || pool.as_ref().is_some_and(|pool| !pool.is_absolute()) {
        return Err(Status::invalid_argument("run: a run id; directory and pool: absolute paths"));
    }
    Ok(Watched { run: run_of(&run, user)?, directory, user, pool })
}

#[tonic::async_trait]
impl CheckpointService for Checkpoints {
    async fn watch_checkpoints(
        &self,
        request: Request<WatchCheckpointsRequest>,
    ) -> Result<Response<WatchCheckpointsResponse>, Status> {
        let caller = self.roles.user(&request, "WatchCheckpoints")?;
        let user = caller.user;
        let WatchCheckpointsRequest { run, directory } = request.into_inner();
        let place = place(run, directory, String::new(), user)?;
        let enabled = self.peers.is_some();
        let mut problem = String::new();
        if let Some(peers) = self.peers.clone() {
            let of = format!("run {} in {}", owner::name(&place.run), place.directory.display());
            let watching = self.watching();
            problem = aside(move || {
                let problem = problem_of(&place).unwrap_or_default();
                watching.remember(&place);
                peers.watch(place);
                problem
            })
            .await?;
            let told = if problem.is_empty() { of } else { format!("{of}: {problem}") };
            self.roles.changes(caller, "WatchCheckpoints", &told);
        }
        Ok(Response::new(WatchCheckpointsResponse { enabled, problem }))
    }

    async fn list_checkpoints(
        &self,
        request: Request<ListCheckpointsRequest>,
    ) -> Result<Response<ListCheckpointsResponse>, Status> {
        let caller = self.roles.user(&request, "ListCheckpoints")?;
        let user = caller.user;
        let peers = self.peers()?;
        let durable = self.durable.clone();
        let view = self.board.view();
        let ListCheckpointsRequest { run, refresh, owner } = request.into_inner();
        let seen = self.seen_by(user, owner)?;
        aside(move || {
            if refresh {
                peers.refresh();
                let uid = seen.unwrap_or(user.uid);
                run.iter().for_each(|run| peers.refresh_durable(&owned(uid, run)));
            }
            let mut list = listing(&peers, &Seen { run: run.as_deref(), owner: seen });
            list.peers.extend(durable.map(|tier| durable_out(&tier)));
            let of_seen = |job: &&JobView| seen.is_none_or(|uid| job.spec.uid == uid);
            list.advice =
                view.jobs.values().filter(of_seen).flat_map(|job| advice_out(job, &peers)).collect();
            Response::new(list)
        })
        .await
    }

    type RestoreCheckpointStream =
        Pin<Box<dyn Stream<Item = Result<RestoreCheckpointResponse, Status>> + Send>>;

    async fn restore_checkpoint(
        &self,
        request: Request<RestoreCheckpointRequest>,
    ) -> Result<Response<Self::RestoreCheckpointStream>, Status> {
        let caller = self.roles.user(&request, "RestoreCheckpoint")?;
        let user = caller.user;
        let peers = self.peers()?;
        let RestoreCheckpointRequest {
            run,
            directory,
            ranks,
            pool,
            files_kind,
            directory_id,
            on_purpose,
            again,
            put_back_token,
        } = request.into_inner();
        let place = place(run, directory, pool, user)?;
        let home = Home::of(&place, &directory_id)?;
        let restoring = self.restoring(user)?;
        let of = format!("run {} into {}", owner::name(&place.run), place.directory.display());
        self.roles.changes(caller, "RestoreCheckpoint", &of);
        let (files, durable) = (self.files.clone(), self.durable.clone());
        let watching = self.watching();
        let homes = Arc::clone(&self.homes);
        let (sender, receiver) = mpsc::channel(64);
        tokio::task::spawn_blocking(move || {
            let _restoring = restoring;
            if !put_back_token.is_empty() {
                let watch = files.as_ref().and_then(|files| files.find(&place.directory, &place.run));
                let gone = || Status::aborted(format!("{} is not watched", place.directory.display()));
                let ended = watch
                    .ok_or_else(gone)
                    .and_then(|watch| watch.end_restore(&put_back_token).map_err(refused));
                let kept_by = kept_by(&peers, durable.as_deref());
                let result = ended.map(|restored| RestoreResult { kept_by, ..result_out(restored) });
                let last =
                    result.map(|result| RestoreCheckpointResponse { message: Some(Message::Result(result)) });
                return drop(sender.blocking_send(last));
            }
            if let Some(home) = home {
                let newest = || {
                    peers.refresh();
                    peers.refresh_durable(&home.run);
                    newest_whole(&peers.copies(), &home.run).map(|state| state.key.step)
                };
                if let Err(refused) = homes.enter(&home, on_purpose, newest) {
                    return drop(sender.blocking_send(Err(Status::already_exists(refused))));
                }
            }
            // A directory on a file system that does not answer holds up this thread and nothing else.
            let watch = match watching.watch_files(&place, &files_kind) {
                Ok(watch) => watch,
                Err(refused) => return drop(sender.blocking_send(Err(refused))),
            };
            if watch.is_none() {
                watching.remember(&place);
            }
            files.iter().for_each(|files| pull_caches(files, user));
            let ranks = (!ranks.is_empty()).then_some(ranks.as_slice());
            if let Some(told) = watch.as_ref().and_then(|_| problem_of(&place)) {
                tracing::warn!("{told}");
                let told = Message::Progress(RestoreProgress { told, ..RestoreProgress::default() });
                let _ = sender.blocking_send(Ok(RestoreCheckpointResponse { message: Some(told) }));
            }
            let progress = |at: Progress| {
                let waits = at.files_wanted > 0;
                let message =
                    Ok(RestoreCheckpointResponse { message: Some(Message::Progress(progress_out(at))) });
                // Counts that nobody has read yet are not waited for.
                let _ =
                    if waits { sender.blocking_send(message).ok() } else { sender.try_send(message).ok() };
            };
            let result = match watch {
                Some(watch) => {
                    watch.begin_restore(again, &progress).map_err(refused).map(|begun| match begun {
                        Begun::Done(restored) => result_out(restored),
                        Begun::Left(left) => put_back_out(left),
                    })
                }
                None => peers
                    .restore(&place, ranks, &progress)
                    .map(result_out)
                    .map_err(|error| Status::aborted(error.to_string())),
            };
            let kept_by = kept_by(&peers, durable.as_deref());
            let last = result.map(|result| {
                let result = RestoreResult { kept_by, ..result };
                RestoreCheckpointResponse { message: Some(Message::Result(result)) }
            });
            let _ = sender.blocking_send(last);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn remove_checkpoint(
        &self,
        request: Request<RemoveCheckpointRequest>,
    ) -> Result<Response<RemoveCheckpointResponse>, Status> {
        let caller = self.roles.user(&request, "RemoveCheckpoint")?;
        let user = caller.user;
        let peers = self.peers()?;
        let RemoveCheckpointRequest { run, step, owner } = request.into_inner();
        let seen = self.seen_by(user, owner)?;
        self.roles.changes(caller, "RemoveCheckpoint", &format!("step {step} of run {run}"));
        let removed = aside(move || {
            let mut copies = peers.copies();
            let seen = Seen { run: Some(&run), owner: seen };
            copies.retain(|copy| copy.shard.of.step == step && seen.has(&copy.shard.of));
            let found = steps(&copies, None);
            let owners: BTreeSet<Option<u32>> =
                found.iter().map(|state| owner::owner(&state.key.run)).collect();
            if owners.len() > 1 {
                return Err(format!("{} users have a run named {run}: say whose is meant", owners.len()));
            }
            let runs: BTreeSet<&str> = found.iter().map(|state| owner::name(state.key.run_id())).collect();
            if runs.len() > 1 {
                let runs: Vec<&str> = runs.into_iter().collect();
                return Err(format!("{} runs are named {run}: name one of {}", runs.len(), runs.join(", ")));
            }
            let removed = found.into_iter().map(|state| peers.remove(&state.key)).sum::<Result<usize, _>>();
            removed.map_err(|error| error.to_string())
        });
        let copies = removed.await?.map_err(Status::aborted)?;
        Ok(Response::new(RemoveCheckpointResponse { copies: small(copies) }))
    }

    async fn collect_checkpoints(
        &self,
        request: Request<CollectCheckpointsRequest>,
    ) -> Result<Response<CollectCheckpointsResponse>, Status> {
        let caller = self.roles.operator(&request, "CollectCheckpoints")?;
        self.roles.changes(caller, "CollectCheckpoints", "replicas that nothing keeps");
        let peers = self.peers()?;
        let replicas = aside(move || peers.collect()).await?;
        Ok(Response::new(CollectCheckpointsResponse { replicas: small(replicas) }))
    }
}

/// What is lost for good is told apart: nothing may be started over it.
fn refused(error: FilesError) -> Status {
    match error {
        FilesError::Lost(words) => Status::data_loss(words),
        error => Status::aborted(error.to_string()),
    }
}
