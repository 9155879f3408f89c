//! Connections to endpoints, and the credentials of every request.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint as Transport, Identity};
use tonic::{Code, Request, Status};

use super::{Settings, TlsFiles};
use crate::endpoint::Endpoint;
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;

/// The time limit to connect: a host that is off does not answer at all.
const CONNECT: Duration = Duration::from_millis(1500);
/// The interval of pings. etcd closes connections that send them more often than every five seconds.
const PING: Duration = Duration::from_secs(10);

/// The connections: one slot per endpoint, in the order of the settings.
pub(crate) struct Connections {
    pub(crate) settings: Settings,
    bearer: Option<MetadataValue<Ascii>>,
    channels: Mutex<Vec<Option<Channel>>>,
    /// The endpoint that answered last.
    preferred: AtomicUsize,
    /// The token that etcd issued for user and password.
    user_token: tokio::sync::Mutex<Option<MetadataValue<Ascii>>>,
}

impl Connections {
    pub(crate) fn new(settings: Settings) -> Result<Connections, CoordError> {
        if settings.endpoints.is_empty() {
            return Err(CoordError::Setting {
                what: "endpoints of the coordination store".to_owned(),
                why: "none is given; name at least one as HOST:PORT".to_owned(),
            });
        }
        let bearer = match &settings.token {
            None => None,
            Some(token) => Some(format!("Bearer {token}").parse().map_err(|_| CoordError::Setting {
                what: "token of the job".to_owned(),
                why: "it must be printable ASCII on one line".to_owned(),
            })?),
        };
        for endpoint in &settings.endpoints {
            transport(endpoint, settings.tls.as_ref())?;
        }
        Ok(Connections {
            bearer,
            channels: Mutex::new(vec![None; settings.endpoints.len()]),
            preferred: AtomicUsize::new(0),
            user_token: tokio::sync::Mutex::new(None),
            settings,
        })
    }

    /// The indices of the endpoints in the order in which they are asked.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> {
        let count = self.settings.endpoints.len();
        let first = self.preferred.load(Ordering::Relaxed);
        (0..count).map(move |n| (first + n) % count)
    }

    pub(crate) fn prefer(&self, index: usize) {
        self.preferred.store(index, Ordering::Relaxed);
    }

    pub(crate) fn name(&self, index: usize) -> String {
        self.settings.endpoints[index].to_string()
    }

    /// The connection to an endpoint, opened if there is none.
    pub(crate) async fn channel(&self, index: usize, patience: Duration) -> Result<Channel, String> {
        if let Some(channel) = self.slot(index, |slot| slot.clone()) {
            return Ok(channel);
        }
        let transport = transport(&self.settings.endpoints[index], self.settings.tls.as_ref())
            .map_err(|error| error.to_string())?;
        match tokio::time::timeout(patience.min(CONNECT), transport.connect()).await {
            Ok(Ok(channel)) => {
                self.slot(index, |slot| *slot = Some(channel.clone()));
                Ok(channel)
            }
            Ok(Err(error)) => Err(describe(&error)),
            Err(_) => Err("no connection in time".to_owned()),
        }
    }

    /// Forgets the connection: the next request opens another one.
    pub(crate) fn forget(&self, index: usize) {
        self.slot(index, |slot| *slot = None);
    }

    fn slot<T>(&self, index: usize, with: impl FnOnce(&mut Option<Channel>) -> T) -> T {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        with(&mut channels[index])
    }

    /// The request with its credentials. Gets etcd's token first if user and password are set.
    pub(crate) async fn signed<Q>(&self, channel: &Channel, question: Q) -> Result<Request<Q>, Status> {
        let mut request = Request::new(question);
        self.sign(channel, request.metadata_mut()).await?;
        Ok(request)
    }

    async fn sign(&self, channel: &Channel, metadata: &mut MetadataMap) -> Result<(), Status> {
        if let Some(bearer) = &self.bearer {
            metadata.insert("authorization", bearer.clone());
        }
        let Some(credentials) = &self.settings.user else { return Ok(()) };
        let mut held = self.user_token.lock().await;
        if held.is_none() {
            let mut question = Request::new(pb::AuthenticateRequest {
                name: credentials.user.clone(),
                password: credentials.password.clone(),
            });
            if let Some(bearer) = &self.bearer {
                question.metadata_mut().insert("authorization", bearer.clone());
            }
            let answer = pb::auth_client::AuthClient::new(channel.clone()).authenticate(question).await;
            let token = match answer {
                Ok(answer) => answer.into_inner().token,
                Err(status) if status.code() == Code::FailedPrecondition => {
                    tracing::debug!("the coordination store asks for no user");
                    return Ok(());
                }
                Err(status) => return Err(status),
            };
            let token = token.parse().map_err(|_| Status::internal("the store's token is not ASCII"))?;
            *held = Some(token);
        }
        if let Some(token) = held.as_ref() {
            metadata.insert("token", token.clone());
        }
        Ok(())
    }

    /// Drops a token that the store no longer accepts: the next request gets a new one.
    pub(crate) async fn forget_user_token(&self) {
        *self.user_token.lock().await = None;
    }
}

/// The transport to an endpoint. Files are read here, so that replaced ones apply from the next connection on.
fn transport(endpoint: &Endpoint, tls: Option<&TlsFiles>) -> Result<Transport, CoordError> {
    let unfit = |error: &dyn Error| CoordError::Endpoint { text: endpoint.to_string(), why: describe(error) };
    let transport = Transport::from_shared(endpoint.to_string()).map_err(|error| unfit(&error))?;
    let transport = transport
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    if !endpoint.tls {
        return Ok(transport);
    }
    transport.tls_config(client_tls(tls)?).map_err(|error| unfit(&error))
}

fn client_tls(files: Option<&TlsFiles>) -> Result<ClientTlsConfig, CoordError> {
    let config = ClientTlsConfig::new();
    let Some(files) = files else { return Ok(config.with_native_roots()) };
    let config = match &files.authorities {
        Some(path) => config.ca_certificate(Certificate::from_pem(read_pem(path)?)),
        None => config.with_native_roots(),
    };
    match (&files.certificate, &files.key) {
        (None, None) => Ok(config),
        (Some(certificate), Some(key)) => {
            Ok(config.identity(Identity::from_pem(read_pem(certificate)?, read_pem(key)?)))
        }
        (Some(path), None) => Err(CoordError::file(path, "the certificate has no key: give both or none")),
        (None, Some(path)) => Err(CoordError::file(path, "the key has no certificate: give both or none")),
    }
}

/// The bytes of a PEM file. Only the form is checked here.
pub(crate) fn read_pem(path: &Path) -> Result<Vec<u8>, CoordError> {
    let bytes = fs::read(path).map_err(|error| CoordError::file(path, error))?;
    if !bytes.windows(10).any(|window| window == b"-----BEGIN") {
        return Err(CoordError::file(path, "it must hold PEM (-----BEGIN …)"));
    }
    Ok(bytes)
}

/// An error with its causes, without repetition.
pub(crate) fn describe(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !message.contains(&more) {
            message = format!("{message}: {more}");
        }
        cause = error.source();
    }
    message
}
