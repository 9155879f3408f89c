//! Finds out why a store closed a TLS connection.
//!
//! In TLS 1.3 a client may send its request before the store has checked the client's certificate. The store's alert
//! then arrives while no request reads the connection, and the transport reports only that the connection was closed.
//! One more handshake, which waits for the store's first bytes, shows the alert.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::TlsFiles;
use super::ask::is_about_certificates;
use super::connect::describe;
use crate::endpoint::Endpoint;

/// The time limit of the handshake. A store that accepts the certificate sends its HTTP/2 settings at once.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(500);

/// The complaint of the store or of this client about the other's certificate; none if both accept, or if the
/// endpoint does not answer in time.
pub(super) async fn of_certificate(endpoint: &Endpoint, files: Option<&TlsFiles>) -> Option<String> {
    let why = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(endpoint, files)).await.ok()??;
    is_about_certificates(&why).then_some(why)
}

/// The error of a handshake and of the read after it, if any.
async fn handshake(endpoint: &Endpoint, files: Option<&TlsFiles>) -> Option<String> {
    let config = config(files)?;
    let name = ServerName::try_from(endpoint.host.clone()).ok()?;
    let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await.ok()?;
    match TlsConnector::from(Arc::new(config)).connect(name, stream).await {
        Err(error) => Some(describe(&error)),
        Ok(mut stream) => stream.read(&mut [0; 1]).await.err().map(|error| describe(&error)),
    }
}

/// The same configuration as the transport's. The transport reports files that cannot be read.
fn config(files: Option<&TlsFiles>) -> Option<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match files.and_then(|files| files.authorities.as_ref()) {
        Some(path) => {
            for certificate in CertificateDer::pem_file_iter(path).ok()? {
                roots.add(certificate.ok()?).ok()?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .ok()?
        .with_root_certificates(roots);
    let mut config = match files.map(|files| (&files.certificate, &files.key)) {
        Some((Some(certificate), Some(key))) => {
            let chain = CertificateDer::pem_file_iter(certificate).ok()?.collect::<Result<_, _>>().ok()?;
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(key).ok()?).ok()?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Some(config)
}
