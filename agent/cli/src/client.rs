//! The client side of the API: the only file of the command line that uses gRPC.

use std::future::Future;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hyper_util::rt::TokioIo;
use mainstay_proto::v1::checkpoint_service_client::CheckpointServiceClient;
use mainstay_proto::v1::event_service_client::EventServiceClient;
use mainstay_proto::v1::explain_request::Target;
use mainstay_proto::v1::explain_response::Report;
use mainstay_proto::v1::explain_service_client::ExplainServiceClient;
use mainstay_proto::v1::health_service_client::HealthServiceClient;
use mainstay_proto::v1::job_order_service_client::JobOrderServiceClient;
use mainstay_proto::v1::operator_service_client::OperatorServiceClient;
use mainstay_proto::v1::run_preflight_response::Item as PreflightItem;
use mainstay_proto::v1::watch_events_response::Item;
use mainstay_proto::v1::{
    AcknowledgeRequest, CollectCheckpointsRequest, Component, EventFilter, ExcludeRankRequest,
    ExplainRequest, GetNodeRequest, HostStacks, InjectFaultRequest, Job, ListCheckpointsRequest,
    ListCheckpointsResponse, ListDevicesRequest, ListDevicesResponse, ListEventsRequest, ListEventsResponse,
    ListJobsRequest, Node, PreflightCheck, RemoveCheckpointRequest, ResetGpuRequest, RestartJobRequest,
    RestoreCheckpointRequest, RestoreCheckpointResponse, RunPreflightRequest, RunPreflightResponse, Server,
    SilenceComponentRequest, StopJobRequest, TakeStacksRequest, UnsilenceComponentRequest,
    WatchCheckpointsRequest, WatchEventsRequest, WatchEventsResponse,
};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint, Error, Uri};
use tonic::{Code, Response, Status, Streaming};

use super::output::in_full;
use mainstay_launcher::agent_link::handover;
use mainstay_tier::peer::tls::{Tls, TlsFiles};

/// How long a server may take before the user is informed that it does not answer.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);
/// How long a launcher may take to get the stacks of other hosts.
const STACKS_WITHIN: Duration = Duration::from_secs(10);
/// A list of events with long tracebacks exceeds gRPC's default of 4 MiB.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The variable that names the directory with the certificate of a caller.
pub(super) const TLS: &str = "MAINSTAY_TLS";

/// The prefix of an address with TLS.
const BY_TLS: &str = "https://";

/// Connects to `HOST:PORT` with the certificate that the environment names.
async fn encrypted(address: &str) -> anyhow::Result<Channel> {
    let directory = std::env::var_os(TLS).filter(|path| !path.is_empty());
    let directory = directory.with_context(|| format!("{TLS}: it must name a directory (mainstay certs)"))?;
    let tls = Tls::read(TlsFiles::of(Path::new(&directory)))?;
    let mut config = (*tls.configurations().0).clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let (address, host) = (address.trim_end_matches('/').to_owned(), host_of(address));
    let name = ServerName::try_from(host).context("the address of the agent")?;
    let connect = tower::service_fn(move |_: Uri| {
        let (address, name, connector) = (address.clone(), name.clone(), connector.clone());
        async move {
            let stream = TcpStream::connect(address).await?;
            connector.connect(name, stream).await.map(TokioIo::new)
        }
    });
    // The address is never resolved: the connector uses its own.
    Ok(Endpoint::from_static("http://localhost").connect_with_connector(connect).await?)
}

/// `HOST` of `HOST:PORT`, without the brackets of IPv6.
fn host_of(address: &str) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']').to_owned()
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// There is no such socket.
    #[error("no socket at {}", .0.display())]
    Missing(PathBuf),
    /// The socket's process is gone.
    #[error("nothing listens on {}: its process is gone", .0.display())]
    Dead(PathBuf),
    /// The socket is not for this user.
    #[error("this user may not connect to {}; ask as its owner, as a member of its group, or as root", .0.display())]
    Denied(PathBuf),
    /// It accepts but does not answer.
    #[error("no answer from {} within {} s: its process is stopped or hangs", .0.display(), DEADLINE.as_secs())]
    Silent(PathBuf),
    /// The cursor belongs to another journal.
    #[error("{0}")]
    CursorAhead(String),
    /// Anything else.
    #[error("{}: {reason}", socket.display())]
    Other {
        /// The socket.
        socket: PathBuf,
        /// What went wrong.
        reason: String,
    },
}

/// A connection to one server.
#[derive(Clone, Debug)]
pub(super) struct Client {
    socket: PathBuf,
    channel: Channel,
}

/// The whole state of a server at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) server: Server,
    pub(super) node: Node,
    pub(super) jobs: Vec<Job>,
}

impl Client {
    /// Connects, within the deadline: to a socket, or over TCP to `http://HOST:PORT` or `https://HOST:PORT`.
    pub(super) async fn connect(socket: &Path) -> Result<Client, AskError> {
        let failed =
            |error: Error| AskError::Other { socket: socket.to_owned(), reason: in_full(&error.into()) };
        let over_tcp = socket.to_str().filter(|address| address.starts_with("http://"));
        let channel = within(socket, async {
            if let Some(address) = socket.to_str().and_then(|address| address.strip_prefix(BY_TLS)) {
                return encrypted(address)
                    .await
                    .map_err(|error| AskError::Other { socket: socket.to_owned(), reason: in_full(&error) });
            }
            if let Some(address) = over_tcp {
                let endpoint = Endpoint::from_shared(address.to_owned()).map_err(failed)?;
                return endpoint.connect().await.map_err(failed);
            }
            // gRPC hides the reason why a socket refuses, so this connects to it first.
            UnixStream::connect(socket).await.map_err(|error| refused(socket, &error))?;
            let path = socket.to_owned();
            let connector = tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            // The address is never resolved: the connector uses the socket.
            Endpoint::from_static("http://localhost").connect_with_connector(connector).await.map_err(failed)
        })
        .await?;
        Ok(Client { socket: socket.to_owned(), channel })
    }

    /// The answer to a request.
    async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AskError> {
        call.await.map(Response::into_inner).map_err(|status| self.failed(&status))
    }

    /// The same, within the deadline.
    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AskError> {
        within(&self.socket, self.answer(call)).await
    }

    fn health(&self) -> HealthServiceClient<Channel> {
        HealthServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    fn operator(&self) -> OperatorServiceClient<Channel> {
        OperatorServiceClient::new(self.channel.clone())
    }

    fn orders(&self) -> JobOrderServiceClient<Channel> {
        JobOrderServiceClient::new(self.channel.clone())
    }

    fn events(&self) -> EventServiceClient<Channel> {
        EventServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    fn checkpoints(&self) -> CheckpointServiceClient<Channel> {
        CheckpointServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// The node and its jobs, within the deadline.
    pub(super) async fn snapshot(&self) -> Result<Snapshot, AskError> {
        let mut health = self.health();
        within(&self.socket, async {
            let node = self.answer(health.get_node(GetNodeRequest {})).await?;
            let jobs = self.answer(health.list_jobs(ListJobsRequest::default())).await?;
            Ok(Snapshot {
                server: node.server.unwrap_or_default(),
                node: node.node.unwrap_or_default(),
                jobs: jobs.jobs,
            })
        })
        .await
    }

    /// The components of the host, within the deadline.
    pub(super) async fn components(&self) -> Result<Vec<Component>, AskError> {
        let node = self.in_time(self.health().get_node(GetNodeRequest {})).await?.node;
        Ok(node.map(|node| node.components).unwrap_or_default())
    }

    /// The checks before a start and their summary. Waits as long as the checks may take.
    pub(super) async fn preflight(
        &self,
        request: RunPreflightRequest,
        longest: Duration,
    ) -> Result<Vec<PreflightCheck>, AskError> {
        let asking = async {
            let failed = |status| self.failed(&status);
            let mut stream = self.answer(self.health().run_preflight(request)).await?;
            let mut checks = Vec::new();
            while let Some(RunPreflightResponse { item }) = stream.message().await.map_err(failed)? {
                match item {
                    Some(PreflightItem::Check(check)) => checks.push(check),
                    Some(PreflightItem::Summary(_)) => return Ok(checks),
                    // An item of a kind that only a newer server knows.
                    None => {}
                }
            }
            Err(self.failed(&Status::unavailable(
                "the server ended the stream before it had reported all checks",
            )))
        };
        match tokio::time::timeout(longest, asking).await {
            Ok(answer) => answer,
            Err(_) => Err(AskError::Silent(self.socket.clone())),
        }
    }

    /// The devices, within the deadline.
    pub(super) async fn devices(&self) -> Result<ListDevicesResponse, AskError> {
        self.in_time(self.health().list_devices(ListDevicesRequest {})).await
    }

    /// The stacks of the ranks on the other hosts of a launcher's job. Waits as long as they may take.
    pub(super) async fn stacks_elsewhere(&self, native: bool) -> Result<Vec<HostStacks>, AskError> {
        let request = TakeStacksRequest { native, elsewhere: true };
        match tokio::time::timeout(STACKS_WITHIN, self.answer(self.health().take_stacks(request))).await {
            Ok(answer) => Ok(answer?.hosts),
            Err(_) => Err(AskError::Silent(self.socket.clone())),
        }
    }

    /// Acknowledges the fault of a component, within the deadline.
    pub(super) async fn acknowledge(&self, component: &str, reason: &str) -> Result<(), AskError> {
        let request = AcknowledgeRequest { component: component.to_owned(), reason: reason.to_owned() };
        self.in_time(self.operator().acknowledge(request)).await.map(drop)
    }

    /// Silences a component, within the deadline.
    pub(super) async fn silence(
        &self,
        component: &str,
        reason: &str,
        duration: prost_types::Duration,
    ) -> Result<(), AskError> {
        let (component, reason) = (component.to_owned(), reason.to_owned());
        let request = SilenceComponentRequest { component, reason, duration: Some(duration) };
        self.in_time(self.operator().silence_component(request)).await.map(drop)
    }

    /// Resets a GPU, and waits until that is done: the agent has a deadline for it.
    pub(super) async fn reset_gpu(&self, gpu: &str, reason: &str) -> Result<(), AskError> {
        let request = ResetGpuRequest { gpu: gpu.to_owned(), reason: reason.to_owned() };
        self.answer(self.operator().reset_gpu(request)).await.map(drop)
    }

    /// Ends the silence of a component, within the deadline.
    pub(super) async fn unsilence(&self, component: &str) -> Result<(), AskError> {
        let request = UnsilenceComponentRequest { component: component.to_owned() };
        self.in_time(self.operator().unsilence_component(request)).await.map(drop)
    }

    /// Restarts all ranks of the job.
    pub(super) async fn restart_job(&self, reason: &str) -> Result<(), AskError> {
        let request = RestartJobRequest { reason: reason.to_owned() };
        self.in_time(self.orders().restart_job(request)).await.map(drop)
    }

    /// Ends the job.
    pub(super) async fn stop_job(&self, reason: &str) -> Result<(), AskError> {
        let request = StopJobRequest { reason: reason.to_owned() };
        self.in_time(self.orders().stop_job(request)).await.map(drop)
    }

    /// Restarts all ranks without the GPU of one.
    pub(super) async fn exclude_rank(&self, rank: u32, reason: &str) -> Result<(), AskError> {
        let request = ExcludeRankRequest { rank, reason: reason.to_owned() };
        self.in_time(self.orders().exclude_rank(request)).await.map(drop)
    }

    /// Injects a fault into a rank, for a drill.
    pub(super) async fn inject_fault(&self, request: InjectFaultRequest) -> Result<(), AskError> {
        self.in_time(self.orders().inject_fault(request)).await.map(drop)
    }

    /// Some events after a cursor, within the deadline.
    pub(super) async fn list_events(
        &self,
        after_cursor: u64,
        filter: EventFilter,
    ) -> Result<ListEventsResponse, AskError> {
        let filter = Some(filter);
        let request = ListEventsRequest { after_cursor, limit: 1000, filter, ..ListEventsRequest::default() };
        self.in_time(self.events().list_events(request)).await
    }

    /// The report on something, within the deadline; none if the server does not know it.
    pub(super) async fn explain(&self, target: Target) -> Result<Option<Report>, AskError> {
        let request = ExplainRequest { target: Some(target) };
        let mut server =
            ExplainServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        within(&self.socket, async {
            match server.explain(request).await {
                Ok(answer) => Ok(answer.into_inner().report),
                // A server that is too old for this request knows nothing either.
                Err(status) if matches!(status.code(), Code::NotFound | Code::Unimplemented) => Ok(None),
                Err(status) => Err(self.failed(&status)),
            }
        })
        .await
    }

    /// All events after a cursor as they happen.
    pub(super) async fn watch_events(
        &self,
        after_cursor: u64,
        filter: EventFilter,
    ) -> Result<Events, AskError> {
        let request = WatchEventsRequest { after_cursor: Some(after_cursor), filter: Some(filter) };
        let stream = self.in_time(self.events().watch_events(request)).await?;
        Ok(Events { client: self.clone(), stream })
    }

    /// The steps that the agent and its peers have. Waits for slow peers.
    pub(super) async fn list_checkpoints(
        &self,
        run: Option<String>,
        refresh: bool,
    ) -> Result<ListCheckpointsResponse, AskError> {
        let request = ListCheckpointsRequest { run, refresh, owner: None };
        self.answer(self.checkpoints().list_checkpoints(request)).await
    }

    /// Starts replication of a directory's steps, within the deadline. Returns whether the agent has peers, and
    /// what it cannot do.
    pub(super) async fn watch_checkpoints(
        &self,
        run: String,
        directory: &Path,
    ) -> Result<(bool, String), AskError> {
        let (socket, directories) = (self.socket.clone(), vec![directory.to_owned()]);
        // An agent of an earlier version accepts none, and reports what it cannot do in another way.
        let _ = tokio::task::spawn_blocking(move || handover::hand_over(&socket, &directories)).await;
        let request = WatchCheckpointsRequest { run, directory: directory.display().to_string() };
        let answer = self.in_time(self.checkpoints().watch_checkpoints(request)).await?;
        Ok((answer.enabled, answer.problem))
    }

    /// The server's socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Restores the newest whole step into a directory. `put_back_token`: confirms that the request of the server
    /// with this token was done; empty at first.
    pub(super) async fn restore_checkpoint(
        &self,
        run: String,
        directory: &Path,
        ranks: Vec<u32>,
        put_back_token: String,
    ) -> Result<Streaming<RestoreCheckpointResponse>, AskError> {
        let directory = directory.display().to_string();
        let request = RestoreCheckpointRequest {
            run,
            directory,
            ranks,
            put_back_token,
            ..RestoreCheckpointRequest::default()
        };
        self.answer(self.checkpoints().restore_checkpoint(request)).await
    }

    /// Deletes all copies of a step; returns their number.
    pub(super) async fn remove_checkpoint(&self, run: String, step: u64) -> Result<u32, AskError> {
        let request = RemoveCheckpointRequest { run, step, owner: None };
        Ok(self.answer(self.checkpoints().remove_checkpoint(request)).await?.copies)
    }

    /// Deletes replicas that no rule keeps; returns their number.
    pub(super) async fn collect_checkpoints(&self) -> Result<u32, AskError> {
        Ok(self.answer(self.checkpoints().collect_checkpoints(CollectCheckpointsRequest {})).await?.replicas)
    }

    fn failed(&self, status: &Status) -> AskError {
        match status.code() {
            Code::OutOfRange => AskError::CursorAhead(status.message().to_owned()),
            code => AskError::Other {
                socket: self.socket.clone(),
                reason: match status.message() {
                    "" => code.description().to_owned(),
                    message => message.to_owned(),
                },
            },
        }
    }
}

/// A stream of events.
pub(super) struct Events {
    client: Client,
    stream: Streaming<WatchEventsResponse>,
}

impl Events {
    /// The next item, however long it takes; an error when the connection is lost.
    pub(super) async fn next(&mut self) -> Result<Item, AskError> {
        loop {
            match self.stream.message().await {
                Ok(Some(WatchEventsResponse { item: Some(item) })) => return Ok(item),
                // An item of a kind that only a newer server knows.
                Ok(Some(WatchEventsResponse { item: None })) => {}
                Ok(None) => {
                    return Err(self.client.failed(&Status::unavailable("the server ended the stream")));
                }
                Err(status) => return Err(self.client.failed(&status)),
            }
        }
    }
}

async fn within<T>(socket: &Path, answer: impl Future<Output = Result<T, AskError>>) -> Result<T, AskError> {
    match tokio::time::timeout(DEADLINE, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(AskError::Silent(socket.to_owned())),
    }
}

fn refused(socket: &Path, error: &std::io::Error) -> AskError {
    let socket = socket.to_owned();
    match error.kind() {
        ErrorKind::NotFound => AskError::Missing(socket),
        ErrorKind::ConnectionRefused => AskError::Dead(socket),
        ErrorKind::PermissionDenied => AskError::Denied(socket),
        // The queue of a stopped process is full.
        ErrorKind::WouldBlock => AskError::Silent(socket),
        _ => AskError::Other { socket, reason: error.to_string() },
    }
}
