//! One client for all endpoints of a store. It asks the endpoint that answered last, tries the others if that one
//! fails, and has a deadline for every request.

mod ask;
mod cluster;
pub(crate) mod connect;
mod keep;
mod kv;
mod refusal;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use keep::{Lease, LeaseState};
pub use kv::{KeyValue, Listing, Txn, TxnReply};
pub use watch::{Relisted, Watch, WatchEvent};

use crate::endpoint::Endpoint;
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;
use ask::Repeat;
use connect::Connections;

/// The default deadline of a request over all endpoints.
pub const TIMEOUT: Duration = Duration::from_secs(3);

/// The prefix of the version that the built-in store reports; etcd's versions are plain numbers.
pub(crate) const BUILTIN: &str = "mainstay";

/// The configuration of a client.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The endpoints of the store. All of them serve the same data.
    pub endpoints: Vec<Endpoint>,
    /// The job's shared secret for the built-in store, sent in `authorization`.
    pub token: Option<String>,
    /// User and password of etcd.
    pub user: Option<Credentials>,
    /// Certificates for `https` endpoints. None: trust the certificate authorities of the host and present no
    /// certificate.
    pub tls: Option<TlsFiles>,
    /// Deadline of each request, over all endpoints.
    pub timeout: Duration,
}

impl Settings {
    /// Settings without token, user or certificates.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>) -> Settings {
        Settings { endpoints, token: None, user: None, tls: None, timeout: TIMEOUT }
    }
}

/// A user of etcd.
#[derive(Clone)]
pub struct Credentials {
    /// The name.
    pub user: String,
    /// The password.
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Files for TLS with the store in PEM. They are read again for every new connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The trusted certificate authorities; None: those of the host.
    pub authorities: Option<PathBuf>,
    /// This client's certificate chain, up to the authority.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
}

/// A lease of the store; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub i64);

/// The status of the store at one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreStatus {
    /// The endpoint that answered.
    pub endpoint: String,
    /// Its version.
    pub version: String,
    /// Whether it is a launcher's built-in store, which does not survive the loss of its host.
    pub builtin: bool,
    /// The newest revision.
    pub revision: i64,
}

/// A client of the store. Clones share connections.
#[derive(Clone)]
pub struct Client {
    connections: Arc<Connections>,
}

impl Client {
    /// Reads the files that the settings name; opens no connection.
    ///
    /// # Errors
    /// There is no endpoint, or a file or token cannot be used.
    pub fn new(settings: Settings) -> Result<Client, CoordError> {
        Ok(Client { connections: Arc::new(Connections::new(settings)?) })
    }

    /// The settings of the client.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.connections.settings
    }

    /// The endpoints as readable text.
    #[must_use]
    pub fn endpoints(&self) -> String {
        let all: Vec<String> = self.settings().endpoints.iter().map(Endpoint::to_string).collect();
        all.join(", ")
    }

    /// Asks for the status of the store.
    ///
    /// # Errors
    /// No endpoint answered, or this client is refused.
    pub async fn status(&self) -> Result<StoreStatus, CoordError> {
        let (answer, endpoint) = self
            .ask("status", Repeat::Freely, pb::StatusRequest {}, |channel, question| async move {
                pb::maintenance_client::MaintenanceClient::new(channel).status(question).await
            })
            .await?;
        Ok(StoreStatus {
            endpoint,
            builtin: answer.version.starts_with(BUILTIN),
            revision: answer.header.map_or(0, |header| header.revision),
            version: answer.version,
        })
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("endpoints", &self.endpoints()).finish_non_exhaustive()
    }
}
