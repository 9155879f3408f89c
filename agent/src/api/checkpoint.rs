//! `mainstay.v1.CheckpointService`: what lies where, and how it comes back. On the Unix socket only, where the kernel says
//! who calls: files are touched with that user's rights.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_core::checkpoint::files::Kind;
use mainstay_core::checkpoint::inventory::{Medium, StepState, steps};
use mainstay_core::id::Pid;
use mainstay_core::view::JobView;
use mainstay_durable::Tier;
use mainstay_proto::v1::checkpoint_service_server::CheckpointService;
use mainstay_proto::v1::restore_checkpoint_response::Message;
use mainstay_proto::v1::{
    CheckpointAdvice, CheckpointCopy, CheckpointCounts, CheckpointPeer, CheckpointStep,
    CollectCheckpointsRequest, CollectCheckpointsResponse, ListCheckpointsRequest, ListCheckpointsResponse,
    RemoveCheckpointRequest, RemoveCheckpointResponse, RestoreCheckpointRequest, RestoreCheckpointResponse,
    RestoreProgress, RestoreResult, WatchCheckpointsRequest, WatchCheckpointsResponse,
};
use mainstay_tier::files::{FileWatch, Files, Wanted, ensure_directory};
use mainstay_tier::peer::{Peer, Progress, Restored, Service, User, Watched};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use super::attach::Allowed;
use super::{saving, unlike};
use crate::board::BoardReader;
use crate::store::kept::Kept;

/// Ranks without a copy that are named at most.
const MISSING: usize = 64;

/// Directories that are remembered: the newest.
const REMEMBERED: usize = 64;

/// The service.
#[derive(Debug)]
pub struct Checkpoints {
    peers: Option<Arc<Service>>,
    durable: Option<Arc<Tier>>,
    files: Option<Arc<Files>>,
    /// The jobs whose advice is told along.
    board: BoardReader,
    allowed: Allowed,
    operators: Vec<u32>,
    /// The directories that are watched, over restarts of the agent.
    kept: Mutex<Kept<Vec<Watched>>>,
    /// Those into which trainers write in their own way.
    kept_files: Mutex<Kept<Vec<FilesPlace>>>,
}

impl Checkpoints {
    /// A service over `peers` and durable storage, if the agent has any, that remembers in `state_dir` which directories it watches.
    pub fn new(
        peers: Option<Arc<Service>>,
        durable: Option<Arc<Tier>>,
        files: Option<Arc<Files>>,
        board: BoardReader,
        allowed: Allowed,
        operators: Vec<u32>,
        state_dir: &Path,
    ) -> Checkpoints {
        let kept: Kept<Vec<Watched>> = Kept::open(&state_dir.join("checkpoint-directories.json"));
        if let Some(peers) = &peers {
            kept.value().into_iter().flatten().for_each(|place| peers.watch(place.clone()));
        }
        let kept_files: Kept<Vec<FilesPlace>> = Kept::open(&state_dir.join("checkpoint-trainers.json"));
        for place in kept_files.value().into_iter().flatten() {
            if let Some(files) = &files
                && let Err(error) = files.watch(place.wanted())
            {
                tracing::warn!(directory = %place.directory.display(), %error, "a directory is not watched any more");
            }
        }
        let (kept, kept_files) = (Mutex::new(kept), Mutex::new(kept_files));
        Checkpoints { peers, durable, files, board, allowed, operators, kept, kept_files }
    }

    fn peers(&self) -> Result<Arc<Service>, Status> {
        self.peers.clone().ok_or_else(|| {
            Status::failed_precondition(
                "this agent keeps no replicas: neither checkpoint.listen nor checkpoint.durable is set in its configuration",
            )
        })
    }

    fn caller<T>(&self, request: &Request<T>) -> Result<User, Status> {
        let connection = request.extensions().get::<UdsConnectInfo>();
        let credentials = connection
            .and_then(|connection| connection.peer_cred)
            .ok_or_else(|| Status::permission_denied("checkpoints are asked for on the Unix socket only"))?;
        let (uid, gid, pid) = (credentials.uid(), credentials.gid(), Pid(credentials.pid().unwrap_or(0)));
        if !self.allowed.admits(uid, gid, pid) {
            return Err(Status::permission_denied(format!(
                "user {uid} (group {gid}) may not use this agent: put the user into the agent's group, or into \
                 allow_uids or allow_gids of the agent's configuration"
            )));
        }
        Ok(User { uid, gid })
    }

    fn operator<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let uid = self.caller(request)?.uid;
        if uid == 0 || uid == nix::unistd::geteuid().as_raw() || self.operators.contains(&uid) {
            return Ok(());
        }
        Err(Status::permission_denied(format!("user {uid} may not delete checkpoints of this agent")))
    }

    /// The watch of a directory into which a trainer writes in its own way: one that is there, or that is asked for.
    fn watch_files(&self, place: &Watched, kind: &str) -> Result<Option<Arc<FileWatch>>, Status> {
        let Some(files) = &self.files else { return Ok(None) };
        if kind.is_empty() {
            let known = files.find(&place.directory).filter(|watch| watch.run() == place.run);
            return Ok(known);
        }
        Kind::parse(kind).map_err(Status::invalid_argument)?;
        ensure_directory(&place.directory, place.user)
            .map_err(|error| Status::permission_denied(error.to_string()))?;
        let known =
            FilesPlace { run: place.run.clone(), directory: place.directory.clone(), kind: kind.to_owned() };
        let watch = files.watch(known.wanted()).map_err(|error| Status::aborted(error.to_string()))?;
        let mut kept = self.kept_files.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.value().cloned().unwrap_or_default();
        all.retain(|other| other.directory != known.directory);
        all.push(known);
        let all = all.split_off(all.len().saturating_sub(REMEMBERED));
        if let Err(error) = kept.keep(&all) {
            tracing::warn!(%error, "the watched directories cannot be written down");
        }
        Ok(Some(watch))
    }

    fn remember(&self, place: &Watched) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.value().cloned().unwrap_or_default();
        all.retain(|other| other.directory != place.directory);
        all.push(place.clone());
        let all = all.split_off(all.len().saturating_sub(REMEMBERED));
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
}

impl FilesPlace {
    fn wanted(&self) -> Wanted {
        Wanted {
            directory: self.directory.clone(),
            run: self.run.clone(),
            rules: Kind::parse(&self.kind).unwrap_or(Kind::Auto).rules(),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            shared: None,
        }
    }
}

/// What was compiled elsewhere need not be compiled again.
fn pull_caches(files: &Files, user: User) {
    for (cache, pulled) in files.pull_caches(user) {
        if let Err(error) = pulled {
            tracing::warn!(cache, %error, "a cache could not be brought");
        }
    }
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
    Ok(Watched { run, directory, user, pool })
}

#[tonic::async_trait]
impl CheckpointService for Checkpoints {
    async fn watch_checkpoints(
        &self,
        request: Request<WatchCheckpointsRequest>,
    ) -> Result<Response<WatchCheckpointsResponse>, Status> {
        let user = self.caller(&request)?;
        let WatchCheckpointsRequest { run, directory } = request.into_inner();
        let place = place(run, directory, String::new(), user)?;
        if let Some(peers) = &self.peers {
            self.remember(&place);
            peers.watch(place);
        }
        Ok(Response::new(WatchCheckpointsResponse { enabled: self.peers.is_some() }))
    }

    async fn list_checkpoints(
        &self,
        request: Request<ListCheckpointsRequest>,
    ) -> Result<Response<ListCheckpointsResponse>, Status> {
        self.caller(&request)?;
        let peers = self.peers()?;
        let durable = self.durable.clone();
        let view = self.board.view();
        let ListCheckpointsRequest { run, refresh } = request.into_inner();
        aside(move || {
            if refresh {
                peers.refresh();
                run.iter().for_each(|run| peers.refresh_durable(run));
            }
            let mut list = listing(&peers, run.as_deref());
            list.peers.extend(durable.map(|tier| durable_out(&tier)));
            list.advice = view.jobs.values().flat_map(|job| advice_out(job, &peers)).collect();
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
        let user = self.caller(&request)?;
        let peers = self.peers()?;
        let RestoreCheckpointRequest { run, directory, ranks, pool, files_kind } = request.into_inner();
        let place = place(run, directory, pool, user)?;
        let watch = self.watch_files(&place, &files_kind)?;
        if watch.is_none() {
            self.remember(&place);
        }
        let files = self.files.clone();
        let (sender, receiver) = mpsc::channel(64);
        tokio::task::spawn_blocking(move || {
            files.iter().for_each(|files| pull_caches(files, user));
            let ranks = (!ranks.is_empty()).then_some(ranks.as_slice());
            let progress = |at: Progress| {
                let message = Message::Progress(progress_out(at));
                // Counts that nobody has read yet are not waited for.
                let _ = sender.try_send(Ok(RestoreCheckpointResponse { message: Some(message) }));
            };
            let restored = match watch {
                Some(watch) => watch.restore(&progress).map_err(|error| error.to_string()),
                None => peers.restore(&place, ranks, &progress).map_err(|error| error.to_string()),
            };
            let last = match restored {
                Ok(restored) => {
                    Ok(RestoreCheckpointResponse { message: Some(Message::Result(result_out(restored))) })
                }
                Err(error) => Err(Status::aborted(error)),
            };
            let _ = sender.blocking_send(last);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn remove_checkpoint(
        &self,
        request: Request<RemoveCheckpointRequest>,
    ) -> Result<Response<RemoveCheckpointResponse>, Status> {
        self.operator(&request)?;
        let peers = self.peers()?;
        let RemoveCheckpointRequest { run, step } = request.into_inner();
        let removed = aside(move || {
            let of_step =
                steps(&peers.copies(), Some(&run)).into_iter().filter(|state| state.key.step == step);
            of_step.map(|state| peers.remove(&state.key)).sum::<Result<usize, _>>()
        });
        let copies = removed.await?.map_err(|error| Status::aborted(error.to_string()))?;
        Ok(Response::new(RemoveCheckpointResponse { copies: small(copies) }))
    }

    async fn collect_checkpoints(
        &self,
        request: Request<CollectCheckpointsRequest>,
    ) -> Result<Response<CollectCheckpointsResponse>, Status> {
        self.operator(&request)?;
        let peers = self.peers()?;
        let replicas = aside(move || peers.collect()).await?;
        Ok(Response::new(CollectCheckpointsResponse { replicas: small(replicas) }))
    }
}

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn listing(peers: &Service, run: Option<&str>) -> ListCheckpointsResponse {
    let copies = peers.copies();
    let (store_used, store_quota) = peers.usage();
    let counts = peers.counts();
    ListCheckpointsResponse {
        steps: steps(&copies, run).iter().map(step_out).collect(),
        peers: peers.peers().into_iter().map(|(name, peer)| peer_out(name, peer)).collect(),
        name: peers.name().to_owned(),
        store_used,
        store_quota,
        counts: Some(CheckpointCounts {
            shards_sent: counts.shards_sent,
            bytes_sent: counts.bytes_sent,
            shards_taken: counts.shards_taken,
            bytes_taken: counts.bytes_taken,
            failures: counts.failures,
            damaged: counts.damaged,
        }),
        redundancy: small(peers.redundancy()),
        parity: peers.parity().map_or_else(String::new, |parity| parity.to_string()),
        advice: Vec::new(),
        unlike: peers
            .unlike()
            .iter()
            .filter(|of| run.is_none_or(|run| of.of.run_id() == run))
            .map(unlike::out)
            .collect(),
        excluded: peers.standing().excluded,
    }
}

fn advice_out(job: &JobView, peers: &Service) -> Vec<CheckpointAdvice> {
    let was_s = job.saving.map_or(0.0, |advised| advised.was);
    let tiers = saving::by_tier(job, Some(peers)).into_iter();
    tiers
        .map(|(tier, every_s)| CheckpointAdvice {
            job: job.id.0.clone(),
            tier: tier.word().to_owned(),
            every_s,
            was_s,
        })
        .collect()
}

fn step_out(state: &StepState) -> CheckpointStep {
    let all = state.ranks.iter().chain(&state.pieces);
    let mut copies: Vec<_> = all.flat_map(|(rank, copies)| copies.iter().map(|copy| (*rank, copy))).collect();
    copies.sort_by_key(|(rank, copy)| (*rank, copy.shard.piece.as_ref().map(|piece| piece.index)));
    let copies = copies.into_iter().map(|(rank, copy)| CheckpointCopy {
        rank,
        holder: copy.holder.clone(),
        medium: match copy.medium {
            Medium::Memory => "memory",
            Medium::Disk => "disk",
            Medium::Durable => "durable",
        }
        .to_owned(),
        own: copy.own,
        root: copy.shard.root.clone(),
        bytes: copy.shard.bytes,
        piece: copy.shard.piece.as_ref().map_or_else(String::new, |of| format!("{} of {}", of.index, of.of)),
    });
    CheckpointStep {
        run: state.key.run.clone(),
        job: state.key.job.clone(),
        attempt: state.key.attempt,
        step: state.key.step,
        world_size: state.key.world,
        created: Some(prost_types::Timestamp { seconds: state.created, nanos: 0 }),
        bytes: state.bytes(),
        whole: state.is_whole(),
        missing_ranks: state.missing(MISSING),
        least_copies: small(state.least_copies()),
        copies: copies.collect(),
    }
}

fn peer_out(name: String, peer: Peer) -> CheckpointPeer {
    CheckpointPeer {
        name,
        alive: peer.alive,
        error: peer.error,
        domain: peer.inventory.domain,
        version: peer.inventory.software,
        store_used: peer.inventory.used,
        store_quota: peer.inventory.quota,
        rate: peer.rate,
        failures: u32::try_from(peer.inventory.failures.len()).unwrap_or(u32::MAX),
        excluded: peer.inventory.standing.excluded,
    }
}

/// Durable storage as a peer that keeps everything: who looks for what is wrong finds it among them.
fn durable_out(tier: &Tier) -> CheckpointPeer {
    let error = tier.status().error;
    CheckpointPeer { name: tier.url().to_owned(), alive: error.is_none(), error, ..CheckpointPeer::default() }
}

fn progress_out(at: Progress) -> RestoreProgress {
    RestoreProgress {
        step: at.step,
        shards_done: small(at.shards.0),
        shards: small(at.shards.1),
        bytes_done: at.bytes.0,
        bytes: at.bytes.1,
        told: at.told,
    }
}

fn result_out(restored: Restored) -> RestoreResult {
    RestoreResult {
        step: restored.decision.step.map(|key| key.step),
        fence: restored.decision.fence,
        decided_by: restored.decision.by,
        bytes_fetched: restored.bytes,
        shards_fetched: small(restored.fetched),
        shards_here: small(restored.here),
        seconds: restored.seconds,
    }
}
