//! A server under test: snapshots in a temporary directory, served on a Unix socket, gRPC over TCP and HTTP.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper_util::rt::TokioIo;
use mainstay_api::readers::Readers;
use mainstay_api::{
    self as api, DeepChecks, ListenError, Listeners, Mode, ServeError, ServerInfo, UnixSocket,
};
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::journal::{Journal, JournalError, Limits};
use mainstay_model::entry::{Body, Fact, JobSpec, StartedRank};
use mainstay_model::health::{Component, Evidence, HealthChange, HealthState, RecommendedAction};
use mainstay_model::id::{Attempt, BootId, JobId, Pid, Rank};
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_tier::peer::Service;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint};

pub const SECOND: u64 = 1_000_000_000;
/// The wall clock at monotonic zero of these tests: 2026-01-01.
pub const EPOCH: i64 = 1_767_225_600 * SECOND as i64;

pub fn stamp(second: u64) -> Stamp {
    let nanos = second * SECOND;
    Stamp { mono: Mono(nanos), wall: Wall(EPOCH + nanos as i64) }
}

pub struct Server {
    pub snapshots: StateWriter,
    pub socket: PathBuf,
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    clock: Arc<AtomicU64>,
    stop: CancellationToken,
    serving: JoinHandle<Result<(), ServeError>>,
}

impl Server {
    /// Serves the journal in `dir`, which an earlier server may have left.
    pub async fn start(dir: &Path) -> Server {
        Server::start_with(dir, Limits::default(), Routes::default()).await
    }

    /// With active probes for callers on the Unix socket.
    pub async fn with_probes(dir: &Path, probes: DeepChecks) -> Server {
        Server::start_whole(dir, Limits::default(), Routes::default(), Some(probes), None).await
    }

    /// A server of an agent with checkpoints.
    pub async fn with_checkpoints(dir: &Path, checkpoints: Arc<Service>) -> Server {
        Server::start_whole(dir, Limits::default(), Routes::default(), None, Some(checkpoints)).await
    }

    pub async fn start_with(dir: &Path, limits: Limits, local: Routes) -> Server {
        Server::start_whole(dir, limits, local, None, None).await
    }

    async fn start_whole(
        dir: &Path,
        limits: Limits,
        local: Routes,
        deep: Option<DeepChecks>,
        checkpoints: Option<Arc<Service>>,
    ) -> Server {
        let open = || Journal::open(&dir.join("journal"), limits, BootId("boot".into()));
        let journal = once_free(open, |error| matches!(error, JournalError::Locked { .. }));
        let snapshots = StateWriter::open(journal).unwrap();
        let socket = dir.join("api.sock");
        let listeners = Listeners {
            unix: Some(once_free(
                || UnixSocket::bind(&socket, 0o600),
                |error| matches!(error, ListenError::InUse { .. }),
            )),
            grpc: Some(api::tcp("127.0.0.1:0").await.unwrap()),
            http: Some(api::tcp("127.0.0.1:0").await.unwrap()),
            hosts: None,
            tls: None,
            deep,
            checkpoints,
            readers: Readers::default(),
            inputs: None,
            catalog: Some(Arc::new(mainstay_app::catalog::load(&[]).unwrap())),
        };
        let grpc = listeners.grpc.as_ref().unwrap().local_addr().unwrap();
        let http = listeners.http.as_ref().unwrap().local_addr().unwrap();
        let about = ServerInfo {
            hostname: "node-17".into(),
            boot_id: BootId("boot".into()),
            version: "0.1.0".into(),
            mode: Mode::Agent,
            started: stamp(1),
            pid: Pid(812),
        };
        let clock = Arc::new(AtomicU64::new(100));
        let reading = clock.clone();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(api::serve(
            listeners,
            snapshots.reader(),
            about,
            Arc::new(move || stamp(reading.load(Ordering::Relaxed))),
            local,
            stop.clone(),
        ));
        Server { snapshots, socket, grpc, http, clock, stop, serving }
    }

    /// Sets both clocks of the server.
    pub fn at(&self, second: u64) {
        self.clock.store(second, Ordering::Relaxed);
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.serving.await.unwrap().unwrap();
    }

    /// Ends the task that publishes snapshots; the API continues.
    pub fn lose_board(self) -> JoinHandle<Result<(), ServeError>> {
        drop(self.snapshots);
        self.serving
    }

    pub fn record(&mut self, second: u64, job: Option<&str>, body: Body) -> u64 {
        let job = job.map(|job| JobId(job.to_owned()));
        self.snapshots.record(stamp(second), job.as_ref(), None, body).seq
    }

    pub fn fact(&mut self, second: u64, job: &str, fact: Fact) -> u64 {
        self.record(second, Some(job), Body::Fact(fact))
    }

    pub fn health(&mut self, name: &str, state: HealthState) {
        let change = HealthChange { from: None, component: component(name, state) };
        self.record(50, None, Body::Health(change));
    }

    /// A job with two ranks that step.
    pub fn job(&mut self, name: &str) {
        let spec = JobSpec {
            command: vec!["python".into(), "train.py".into()],
            world_size: 2,
            local_world_size: 2,
            max_restarts: 3,
            ..JobSpec::default()
        };
        self.fact(10, name, Fact::JobStarted(spec));
        let started = |rank: u32| StartedRank {
            rank: Rank(rank),
            local_rank: rank,
            pid: Pid(4000 + rank as i32),
            page: None,
            start_ticks: None,
        };
        let ranks = vec![started(0), started(1)];
        self.fact(
            11,
            name,
            Fact::AttemptStarted { attempt: Attempt(0), master_port: 29_500, ranks, hosts: Vec::new() },
        );
        self.fact(
            12,
            name,
            Fact::RanksStepping { attempt: Attempt(0), step: 1, counted: false, restoring: Span::default() },
        );
    }

    pub async fn unix(&self) -> Channel {
        unix(&self.socket).await
    }

    pub async fn tcp(&self) -> Channel {
        Endpoint::from_shared(format!("http://{}", self.grpc)).unwrap().connect().await.unwrap()
    }
}

/// A process that another test starts holds copies of our locks between its fork and its exec.
fn once_free<T, E: std::fmt::Debug>(mut take: impl FnMut() -> Result<T, E>, is_held: fn(&E) -> bool) -> T {
    for _ in 0..100_000 {
        match take() {
            Err(error) if is_held(&error) => std::thread::yield_now(),
            result => return result.unwrap(),
        }
    }
    take().unwrap()
}

pub async fn unix(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connect).await.unwrap()
}

pub fn component(name: &str, state: HealthState) -> Component {
    Component {
        name: name.into(),
        state,
        reason: format!("{name} as read"),
        action: if state == HealthState::Healthy {
            RecommendedAction::None
        } else {
            RecommendedAction::RebootNode
        },
        evidence: vec![Evidence {
            source: "/proc/x".into(),
            reading: "5 %".into(),
            limit: Some("10 %".into()),
            ..Evidence::default()
        }],
        read_at: Some(Mono(90 * SECOND)),
        since: Mono(40 * SECOND),
        ..Component::default()
    }
}
