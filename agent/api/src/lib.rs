//! The interface for machines: gRPC over a Unix socket and TCP, HTTP for probes and metrics.
//!
//! Every answer comes from memory or from the journal's files: no call reads a device or waits for the node's task,
//! so a hanging driver never delays an answer. The agent and each launcher serve the same API.

pub mod attach;
mod authority;
mod bounds;
mod budget;
mod certificate;
pub mod checkpoint;
mod connection_limits;
mod convert;
mod divergence;
mod encrypted;
mod events;
mod explain;
mod grpc_health;
pub mod handover;
mod health;
mod http;
mod json;
mod leader;
mod listen;
mod local_only;
pub mod metrics;
pub mod nvrx;
pub mod operator;
pub mod orders;
pub mod otlp;
mod pace;
pub mod page;
mod preflight;
pub mod readers;
mod refusal;
mod replicas;
mod restore;
pub mod roles;
mod run_directories;
mod saving;
mod shares;
pub mod stacks;
mod stream;
mod tcp_connections;
mod watching;

use std::sync::Arc;
use std::time::Duration;

use mainstay_health::hardware::catalog::Catalog;
use mainstay_model::health::HealthState;
use mainstay_model::id::{BootId, Pid};
use mainstay_model::time::Stamp;
use mainstay_proto::nvhcd::health_check_service_server::HealthCheckServiceServer;
use mainstay_proto::v1::event_service_server::EventServiceServer;
use mainstay_proto::v1::explain_service_server::ExplainServiceServer;
use mainstay_proto::v1::health_service_server::HealthServiceServer;
use mainstay_proto::{FILE_DESCRIPTOR_SET, grpc_health_v1::health_server::HealthServer};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

pub use listen::{ListenError, UnixSocket, tcp};
pub use preflight::DeepChecks;

use bounds::Bounds;
use encrypted::Encrypting;
use leader::Leader;
use mainstay_journal::state::StateReader;
use mainstay_launcher::group::streams::api::OtherHosts;
use mainstay_node::Input;
use mainstay_tier::peer::tls::Tls;
use pace::Pace;
use readers::Readers;

/// How long open calls may take to end after the stop was requested.
const DRAIN: Duration = Duration::from_secs(2);

/// Calls that one connection may have open.
const MAX_STREAMS_PER_CONNECTION: u32 = 128;

/// Bytes of a call's headers.
const HEADERS: u32 = 16 << 10;

/// Bytes that a call, and a connection, may send before they are read.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;

/// What a server reports about itself.
#[derive(Clone, Debug)]
pub struct ServerInfo {
    /// Name of the host.
    pub hostname: String,
    /// The boot to which monotonic times belong.
    pub boot_id: BootId,
    /// Version of the program.
    pub version: String,
    /// Which program it is.
    pub mode: Mode,
    /// When it started.
    pub started: Stamp,
    /// Its process.
    pub pid: Pid,
}

/// Which program serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The agent of the host.
    Agent,
    /// A launcher, for its own job.
    Launcher,
}

/// Reads the host's clocks; ages in answers are computed against it.
pub type Clock = Arc<dyn Fn() -> Stamp + Send + Sync>;

/// Where to listen. Absent listeners are not served.
#[derive(Debug, Default)]
pub struct Listeners {
    /// gRPC and HTTP for local callers.
    pub unix: Option<UnixSocket>,
    /// gRPC and HTTP for remote callers.
    pub grpc: Option<TcpListener>,
    /// HTTP alone: for people, scripts, Prometheus and probes.
    pub http: Option<TcpListener>,
    /// The other launchers of the job: they read here, and the one that leads is read for callers.
    pub hosts: Option<OtherHosts>,
    /// Mutual TLS on both. Without it there is no authentication.
    pub tls: Option<Tls>,
    /// Active probes for callers on the Unix socket; without it no probes are run.
    pub deep: Option<DeepChecks>,
    /// The state of checkpoints, for metrics.
    pub checkpoints: Option<Arc<mainstay_tier::peer::Service>>,
    /// Who may read what the programs of jobs wrote.
    pub readers: Readers,
    /// The node, which records refused callers over TCP.
    pub inputs: Option<mpsc::Sender<Input>>,
    /// What codes of the hardware mean; none if this server does not watch it.
    pub catalog: Option<Arc<Catalog>>,
}

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors that were compiled in cannot be read back.
    #[error("preparing gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A server ended on its own.
    #[error("serving {on}: {source}")]
    Ended {
        /// Which listener.
        on: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// What every service reads from.
#[derive(Clone)]
struct ReadSide {
    snapshots: StateReader,
    about: Arc<ServerInfo>,
    clock: Clock,
    pace: Pace,
    /// Active probes; none for callers who may not run them.
    deep: Option<DeepChecks>,
    /// The state of checkpoints; none if this agent has no peers.
    checkpoints: Option<Arc<mainstay_tier::peer::Service>>,
    readers: Readers,
    catalog: Option<Arc<Catalog>>,
    /// The launchers of the job on other hosts.
    leader: Option<Leader>,
    /// What the callers of this listener may hold.
    bounds: Bounds,
    /// Cancelled when nothing publishes snapshots any longer.
    snapshots_gone: CancellationToken,
    stop: CancellationToken,
}

/// Serves until `stop` is cancelled, then waits for open calls to end, for at most two seconds.
///
/// `local` are additional services for the Unix socket only. They identify the caller through
/// `tonic::transport::server::UdsConnectInfo` in the request's extensions. Their streams should end when `stop` is
/// cancelled.
pub async fn serve(
    listeners: Listeners,
    snapshots: StateReader,
    about: ServerInfo,
    clock: Clock,
    local: Routes,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let (callers, leader) = listeners.hosts.map(|hosts| (hosts.callers, Leader::new(hosts.known))).unzip();
    let read = ReadSide {
        snapshots,
        about: Arc::new(about),
        clock,
        pace: Pace::default(),
        deep: None,
        checkpoints: listeners.checkpoints,
        readers: listeners.readers,
        catalog: listeners.catalog,
        leader,
        bounds: Bounds::default(),
        snapshots_gone: CancellationToken::new(),
        stop: stop.clone(),
    };
    let inputs = listeners.inputs;
    let tls = listeners.tls.map(|tls| Encrypting::new(tls, inputs.clone()));
    let mut servers = JoinSet::new();

    if let Some(socket) = listeners.unix {
        let bounds = Bounds::default();
        let of_socket = ReadSide { deep: listeners.deep, bounds: bounds.clone(), ..read.clone() };
        let routes = routes(&of_socket, local)?;
        let stop = stop.clone();
        servers.spawn(async move {
            let served = grpc(routes, bounds, socket.incoming(stop.clone()), stop).await;
            drop(socket);
            ended("the Unix socket", served)
        });
    }
    if let Some(listener) = listeners.grpc {
        let routes = local_only::refusing(routes(&read, Routes::default())?, inputs);
        let (bounds, stop, tls) = (read.bounds.clone(), stop.clone(), tls.clone());
        servers.spawn(async move {
            let incoming = listen::incoming(listener, tls, stop.clone());
            ended("gRPC over TCP", grpc(routes, bounds, incoming, stop).await)
        });
    }
    if let Some(listener) = listeners.http {
        let bounds = Bounds::default();
        let of_http = ReadSide { bounds: bounds.clone(), ..read.clone() };
        let routes = Routes::from(http::router(of_http).fallback(http::not_found));
        let stop = stop.clone();
        servers.spawn(async move {
            let incoming = listen::incoming(listener, tls, stop.clone());
            ended("HTTP", grpc(routes, bounds, incoming, stop).await)
        });
    }
    if let Some(callers) = callers {
        let bounds = Bounds::default();
        // They know the job's token, and are no users of this host: they read as callers over the network do, and each
        // answers for itself only.
        let readers = Readers::Everyone;
        let of_hosts = ReadSide { readers, leader: None, bounds: bounds.clone(), ..read.clone() };
        let routes = routes(&of_hosts, Routes::default())?;
        let stop = stop.clone();
        // The group may end before the API does.
        let incoming = ReceiverStream::new(callers).map(Ok).chain(tokio_stream::pending());
        servers
            .spawn(async move { ended("the job's other hosts", grpc(routes, bounds, incoming, stop).await) });
    }
    let pace = tokio::spawn(pace::follow(read));

    let result = until_stopped(&mut servers, &stop).await;
    pace.abort();
    let drained = tokio::time::timeout(DRAIN, async { while servers.join_next().await.is_some() {} }).await;
    if drained.is_err() {
        tracing::debug!("clients did not disconnect in time: their connections are closed");
    }
    result
}

/// Serves only NVRx's node health service on a separate socket, until `stop` is cancelled.
///
/// # Errors
/// The server ended by itself.
pub async fn serve_node_health(
    socket: UnixSocket,
    service: nvrx::NodeHealthService,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let routes = Routes::new(HealthCheckServiceServer::new(service));
    let served = grpc(routes, Bounds::default(), socket.incoming(stop.clone()), stop).await;
    drop(socket);
    ended("NVRx's node health service", served)
}

/// Waits for the stop; a server that ends by itself ends the others too.
async fn until_stopped(
    servers: &mut JoinSet<Result<(), ServeError>>,
    stop: &CancellationToken,
) -> Result<(), ServeError> {
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        Some(ended) = servers.join_next() => {
            stop.cancel();
            ended.unwrap_or_else(|crash| Err(ServeError::Ended { on: "the API", source: crash.into() }))
        }
    }
}

fn ended<E>(on: &'static str, result: Result<(), E>) -> Result<(), ServeError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    result.map_err(|source| ServeError::Ended { on, source: source.into() })
}

impl ReadSide {
    /// Whether work may be sent to this node: someone watches it, and it is not unhealthy.
    fn is_ready(&self) -> bool {
        !self.snapshots_gone.is_cancelled() && self.snapshots.view().state() != HealthState::Unhealthy
    }
}

/// All gRPC services and the HTTP routes: one socket serves both.
fn routes(read: &ReadSide, further: Routes) -> Result<Routes, ServeError> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
    };
    let grpc = further
        .add_service(HealthServiceServer::new(health::Health(read.clone())))
        .add_service(EventServiceServer::new(events::Events(read.clone())))
        .add_service(ExplainServiceServer::new(explain::Explain(read.clone())))
        .add_service(HealthServer::new(grpc_health::GrpcHealth(read.clone())))
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    Ok(grpc.into_axum_router().merge(http::router(read.clone())).fallback(not_served).into())
}

/// Answers calls of methods that this listener does not have: some are for callers on the Unix socket only.
async fn not_served(request: axum::extract::Request) -> axum::response::Response {
    if !bounds::is_grpc(&request) {
        return http::not_found(request.uri().clone()).await;
    }
    let path = request.uri().path();
    let why = format!("{path} is not served here: methods that change something are on the Unix socket only");
    refusal::Reason::NOT_SERVED_HERE.refuse(why).into_http()
}

/// Serves gRPC and HTTP, or what the routes have of them.
async fn grpc<I, IO>(
    routes: Routes,
    bounds: Bounds,
    incoming: I,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error>
where
    I: tokio_stream::Stream<Item = std::io::Result<IO>>,
    IO: tokio::io::AsyncRead
        + tokio::io::AsyncWrite
        + tonic::transport::server::Connected
        + Unpin
        + Send
        + 'static,
{
    let giving_back = tokio::spawn(bounds.clone().give_back_memory());
    let served = tonic::transport::Server::builder()
        .accept_http1(true)
        // Limit for one connection: `places` limits the connections of a source.
        .max_concurrent_streams(Some(MAX_STREAMS_PER_CONNECTION))
        .http2_max_header_list_size(Some(HEADERS))
        // What arrives before it is read: messages are small.
        .initial_stream_window_size(Some(STREAM_WINDOW))
        .initial_connection_window_size(Some(CONNECTION_WINDOW))
        // Detects callers that vanished and frees their streams.
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .layer(bounds)
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await;
    giving_back.abort();
    served
}
