//! `mainstay.v1.CheckpointService`: where shards are stored, and how they are restored. Served only on the Unix
//! socket, where the kernel reports the caller's user: files are accessed with that user's rights.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use mainstay_checkpoint::inventory::steps;
use mainstay_checkpoint::owner::{self, owned};
use mainstay_durable::Tier;
use mainstay_model::id::JobId;
use mainstay_proto::v1::checkpoint_service_server::CheckpointService;
use mainstay_proto::v1::{
    CollectCheckpointsRequest, CollectCheckpointsResponse, ListCheckpointsRequest, ListCheckpointsResponse,
    RemoveCheckpointRequest, RemoveCheckpointResponse, RestoreCheckpointRequest, RestoreCheckpointResponse,
    WatchCheckpointsRequest, WatchCheckpointsResponse,
};
use mainstay_tier::files::Files;
use mainstay_tier::peer::{Service, User, WatchedDirectory};
use mainstay_view::node::JobView;
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::convert::checkpoint::{RunFilter, advice_out, durable_out, listing, small};
use super::refusal::{Reason, invalid};
use super::restore::{Restore, RestoresByUser, Running};
use super::roles::Roles;
use super::run_directories::{Home, Homes};
use super::watching::{FilesPlace, Watching, problem_of};
use mainstay_journal::state::StateReader;
use mainstay_journal::store::value_file::ValueFile;

/// Letters of a run id that are shown.
const LONGEST_RUN: usize = 128;

/// The service.
#[derive(Debug)]
pub struct Checkpoints {
    peers: Option<Arc<Service>>,
    durable: Option<Arc<Tier>>,
    files: Option<Arc<Files>>,
    /// The jobs, whose save advice is reported too.
    snapshots: StateReader,
    roles: Roles,
    /// The watched directories, kept across restarts of the agent.
    kept: Arc<Mutex<ValueFile<Vec<WatchedDirectory>>>>,
    /// Directories into which trainers write in their own format.
    kept_files: Arc<Mutex<ValueFile<Vec<FilesPlace>>>>,
    /// Which directories runs wrote into.
    homes: Arc<Homes>,
    running: Arc<RestoresByUser>,
}

impl Checkpoints {
    /// A service over `peers` and durable storage, if the agent has any, that remembers in `state_dir` which directories it watches.
    pub fn new(
        peers: Option<Arc<Service>>,
        durable: Option<Arc<Tier>>,
        files: Option<Arc<Files>>,
        snapshots: StateReader,
        roles: Roles,
        state_dir: &Path,
    ) -> Checkpoints {
        let kept: ValueFile<Vec<WatchedDirectory>> =
            ValueFile::open(&state_dir.join("checkpoint-directories.json"));
        if let Some(peers) = &peers {
            // Entries that were stored before runs had owners have the user in a separate field.
            let owned_place = |place: &WatchedDirectory| WatchedDirectory {
                run: owned(place.user.uid, &place.run),
                ..place.clone()
            };
            kept.value().into_iter().flatten().for_each(|place| peers.watch(owned_place(place)));
        }
        let kept_files: ValueFile<Vec<FilesPlace>> =
            ValueFile::open(&state_dir.join("checkpoint-trainers.json"));
        for place in kept_files.value().into_iter().flatten() {
            if let (Some(files), Some(wanted)) = (&files, place.wanted())
                && let Err(error) = files.watch(wanted)
            {
                tracing::warn!(directory = %place.directory.display(), %error, "a directory is no longer watched");
            }
        }
        let (kept, kept_files) = (Arc::new(Mutex::new(kept)), Arc::new(Mutex::new(kept_files)));
        let homes = Arc::new(Homes::open(state_dir));
        Checkpoints {
            peers,
            durable,
            files,
            snapshots,
            roles,
            kept,
            kept_files,
            homes,
            running: Arc::default(),
        }
    }

    fn peers(&self) -> Result<Arc<Service>, Status> {
        self.peers.clone().ok_or_else(|| {
            Reason::NO_REPLICAS.refuse(
                "this agent keeps no replicas: neither checkpoint.listen nor checkpoint.durable is set in its configuration",
            )
        })
    }

    /// The owner whose runs the user may see: one owner, or all.
    fn seen_by(&self, user: User, asked: Option<u32>) -> Result<Option<u32>, Status> {
        match asked {
            Some(uid) if uid != user.uid && !self.roles.is_operator(user) => Err(Reason::CALLER_NOT_ALLOWED
                .refuse(format!("user {} may not see runs of user {uid}", user.uid))),
            Some(uid) => Ok(Some(uid)),
            None if self.roles.is_operator(user) => Ok(None),
            None => Ok(Some(user.uid)),
        }
    }

    fn one_more_restore(&self, user: User) -> Result<Running, Status> {
        Running::begin(&self.running, user).map_err(|why| Reason::TOO_MANY_RESTORES.refuse(why))
    }

    fn watching(&self) -> Watching {
        let (files, kept, kept_files) =
            (self.files.clone(), Arc::clone(&self.kept), Arc::clone(&self.kept_files));
        Watching { files, kept, kept_files }
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
    Err(invalid("run", format!("{shown:?}: {problem}; choose another --rdzv-id")))
}

/// Runs blocking work on its own thread.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Reason::INTERNAL.refuse(error.to_string()))
}

fn place(run: String, directory: String, pool: String, user: User) -> Result<WatchedDirectory, Status> {
    let directory = PathBuf::from(directory);
    let pool = (!pool.is_empty()).then(|| PathBuf::from(pool));
    if run.is_empty() {
        return Err(invalid("run", "give a run id"));
    }
    let is_relative = |path: &PathBuf| !path.is_absolute();
    for (field, path) in [("directory", Some(&directory)), ("pool", pool.as_ref())] {
        if path.is_some_and(is_relative) {
            return Err(invalid(field, "give an absolute path"));
        }
    }
    Ok(WatchedDirectory { run: run_of(&run, user)?, directory, user, pool })
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
            let subject = format!("run {} in {}", owner::name(&place.run), place.directory.display());
            let watching = self.watching();
            problem = aside(move || {
                let problem = problem_of(&peers, &place).unwrap_or_default();
                watching.remember(&place);
                peers.watch(place);
                problem
            })
            .await?;
            let reported = if problem.is_empty() { subject } else { format!("{subject}: {problem}") };
            self.roles.changes(caller, "WatchCheckpoints", &reported);
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
        let view = self.snapshots.view();
        let ListCheckpointsRequest { run, refresh, owner } = request.into_inner();
        let seen = self.seen_by(user, owner)?;
        aside(move || {
            if refresh {
                peers.refresh();
                let uid = seen.unwrap_or(user.uid);
                run.iter().for_each(|run| peers.refresh_durable(&owned(uid, run)));
            }
            let mut list = listing(&peers, &RunFilter { run: run.as_deref(), owner: seen });
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
        let home = Home::find(&place, &directory_id)?;
        let running = self.one_more_restore(user)?;
        let subject = format!("run {} into {}", owner::name(&place.run), place.directory.display());
        self.roles.changes(caller, "RestoreCheckpoint", &subject);
        let (sender, receiver) = mpsc::channel(64);
        let restore = Restore {
            peers,
            durable: self.durable.clone(),
            files: self.files.clone(),
            watching: self.watching(),
            homes: Arc::clone(&self.homes),
            place,
            home,
            ranks,
            files_kind,
            on_purpose,
            again,
            put_back_token,
            sender,
        };
        tokio::task::spawn_blocking(move || {
            let _running = running;
            restore.answer();
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
            let seen = RunFilter { run: Some(&run), owner: seen };
            copies.retain(|copy| copy.shard.key.step == step && seen.has(&copy.shard.key));
            let found = steps(&copies, None);
            let owners: BTreeSet<Option<u32>> =
                found.iter().map(|state| owner::owner(&state.key.run)).collect();
            if owners.len() > 1 {
                return Err(format!("{} users have a run named {run}: specify the user", owners.len()));
            }
            let runs: BTreeSet<&str> = found.iter().map(|state| owner::name(state.key.run_id())).collect();
            if runs.len() > 1 {
                let runs: Vec<&str> = runs.into_iter().collect();
                return Err(format!("{} runs are named {run}: name one of {}", runs.len(), runs.join(", ")));
            }
            let removed = found.into_iter().map(|state| peers.remove(&state.key)).sum::<Result<usize, _>>();
            removed.map_err(|error| error.to_string())
        });
        let copies = removed.await?.map_err(|why| Reason::NOT_REMOVED.refuse(why))?;
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
