//! TLS connections between launchers. The launcher provides both configurations: their keys are derived from the
//! job's secret.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::group::streams::{StreamError, Token};

/// The TLS configurations with which both sides encrypt and authenticate each other.
#[derive(Clone)]
pub struct Ends {
    /// For the side that connects.
    pub client: Arc<ClientConfig>,
    /// For the side that accepts.
    pub server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Ends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ends(..)")
    }
}

/// Bytes in both directions.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection, with TLS or plain.
pub(super) type Stream = Box<dyn Duplex>;

/// The follower's side.
pub(super) async fn as_follower(stream: TcpStream, token: &Token) -> Result<Stream, StreamError> {
    let Some(ends) = &token.ends else { return Ok(Box::new(stream)) };
    // The name is not checked: any holder of the key belongs to the job.
    let name = ServerName::try_from("launcher").map_err(io::Error::other)?;
    let connector = TlsConnector::from(Arc::clone(&ends.client));
    Ok(Box::new(connector.connect(name, stream).await.map_err(handshake_error)?))
}

/// The leader's side.
pub(super) async fn as_leader(stream: TcpStream, token: &Token) -> Result<Stream, StreamError> {
    let Some(ends) = &token.ends else { return Ok(Box::new(stream)) };
    let acceptor = TlsAcceptor::from(Arc::clone(&ends.server));
    Ok(Box::new(acceptor.accept(stream).await.map_err(handshake_error)?))
}

/// The meaning of a failed TLS handshake.
fn handshake_error(error: io::Error) -> StreamError {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(
            rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
            | rustls::Error::AlertReceived(rustls::AlertDescription::AccessDenied),
        ) => StreamError::Token,
        Some(rustls::Error::InvalidMessage(_)) => StreamError::NotEncrypted,
        _ => error.into(),
    }
}
