//! The built-in store: the part of etcd's v3 API that launchers use, served from inside one launcher. It is in
//! memory, with a log on disk. It does not survive the loss of its host: for that, use three hosts or an etcd
//! cluster.

mod guard;
pub mod log;
mod service;
pub mod store;
mod store_thread;
mod watchers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use crate::client::connect::{describe, read_pem};
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;
use guard::Guard;
use log::Log;
use service::Services;
use store::{Limits, Store};
use store_thread::{Handle, Job};

/// A client that vanished is noticed within 1.5 times this time.
const PING: Duration = Duration::from_secs(10);
/// The time limit of an orderly stop.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// Open calls of one connection. A launcher has a few.
const MAX_OPEN_CALLS: u32 = 128;

/// The configuration of the built-in store.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address to listen on; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The directory of its log; None: memory only, and a restart loses everything.
    pub directory: Option<PathBuf>,
    /// The job's secret: clients without it are refused. None: anyone who can reach the port has full access.
    pub token: Option<String>,
    /// Certificates; None: plain TCP.
    pub tls: Option<ServerTls>,
    /// Its limits.
    pub limits: Limits,
}

impl ServerOptions {
    /// In memory, without token and TLS.
    #[must_use]
    pub fn new(listen: SocketAddr) -> ServerOptions {
        ServerOptions { listen, directory: None, token: None, tls: None, limits: Limits::default() }
    }
}

/// Files for TLS with clients, in PEM.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// The store's certificate chain, up to the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities of clients: each client must present a certificate of one. None: clients present none.
    pub client_authorities: Option<PathBuf>,
}

/// A running built-in store. It stops when this is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    store: Handle,
    thread: Option<std::thread::JoinHandle<()>>,
    farewell: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
}

impl Server {
    /// Reads the log and starts to serve.
    ///
    /// # Errors
    /// The address is taken, the log or a certificate cannot be used.
    pub async fn start(options: ServerOptions) -> Result<Server, CoordError> {
        let listener = TcpListener::bind(options.listen).await;
        let listener = listener.map_err(|error| {
            CoordError::io(format!("the coordination store on {}", options.listen), error)
        })?;
        let address =
            listener.local_addr().map_err(|error| CoordError::io("the coordination store", error))?;
        let tls = options.tls.as_ref().map(server_tls).transpose()?;
        let epoch = Instant::now();
        let (cluster, limits) = (log::random()?, options.limits.clone());
        let (log, store) = match options.directory.clone() {
            Some(directory) => {
                let opened = tokio::task::spawn_blocking(move || Log::open(&directory, cluster, limits, 0));
                let opened = opened.await.map_err(|error| CoordError::io("the log", error.into()))?;
                opened.map(|(log, store)| (Some(log), store))?
            }
            None => (None, Store::new(cluster, limits)),
        };
        let (handle, thread) = store_thread::start(store, log, epoch)?;
        let (farewell, closed) = oneshot::channel();
        let serving = serve(listener, tls, &options, handle.clone(), closed)?;
        Ok(Server { address, store: handle, thread: Some(thread), farewell: Some(farewell), serving })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops serving and closes the log. Afterwards the directory can be used again.
    pub async fn stop(mut self) {
        self.ask_to_stop();
        let _ = tokio::time::timeout(STOP_TIMEOUT, &mut self.serving).await;
        self.serving.abort();
        if let Some(thread) = self.thread.take() {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }

    fn ask_to_stop(&mut self) {
        if let Some(farewell) = self.farewell.take() {
            let _ = farewell.send(());
        }
        let _ = self.store.send(Job::Stop);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ask_to_stop();
        self.serving.abort();
    }
}

fn serve(
    listener: TcpListener,
    tls: Option<ServerTlsConfig>,
    options: &ServerOptions,
    store: Handle,
    closed: oneshot::Receiver<()>,
) -> Result<JoinHandle<()>, CoordError> {
    let services =
        Services { store, streams: Arc::new(AtomicUsize::new(0)), most_streams: options.limits.watches };
    let mut server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING / 2))
        .max_concurrent_streams(Some(MAX_OPEN_CALLS));
    if let Some(tls) = tls {
        server = server.tls_config(tls).map_err(|error| CoordError::Setting {
            what: "certificates of the coordination store".to_owned(),
            why: describe(&error),
        })?;
    }
    // A request that is slightly too large is refused with etcd's message, not by the gRPC limit.
    let largest = options.limits.request + 512 * 1024;
    let kv = pb::kv_server::KvServer::new(services.clone())
        .max_decoding_message_size(largest)
        .max_encoding_message_size(usize::MAX);
    let watch = pb::watch_server::WatchServer::new(services.clone()).max_decoding_message_size(largest);
    let lease = pb::lease_server::LeaseServer::new(services.clone());
    let auth = pb::auth_server::AuthServer::new(services.clone());
    let maintenance = pb::maintenance_server::MaintenanceServer::new(services);
    let router = server
        .layer(Guard::new(options.token.as_deref()))
        .add_service(kv)
        .add_service(watch)
        .add_service(lease)
        .add_service(auth)
        .add_service(maintenance);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Ok(tokio::spawn(async move {
        let served = router.serve_with_incoming_shutdown(incoming, async {
            let _ = closed.await;
        });
        if let Err(error) = served.await {
            tracing::error!(error = describe(&error), "the built-in coordination store stopped serving");
        }
    }))
}

fn server_tls(files: &ServerTls) -> Result<ServerTlsConfig, CoordError> {
    let identity = Identity::from_pem(read_pem(&files.certificate)?, read_pem(&files.key)?);
    let config = ServerTlsConfig::new().identity(identity);
    Ok(match &files.client_authorities {
        Some(path) => config.client_ca_root(Certificate::from_pem(read_pem(path)?)),
        None => config,
    })
}
