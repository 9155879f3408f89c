//! TLS connections: which servers are trusted.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::{HttpError, broken};

/// Why no server can be authenticated.
#[derive(Debug, thiserror::Error)]
pub enum SecureError {
    /// The file of CA certificates cannot be used.
    #[error("{}: {why}; it must hold certificates in PEM", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No CA is trusted.
    #[error(
        "this host has no certificates of authorities{0}; install ca-certificates, or name a file with some"
    )]
    Nobody(String),
    /// TLS is not available.
    #[error("TLS cannot be used: {0}")]
    Broken(String),
}

/// The trusted CAs: those of the host, and those of a file.
#[derive(Clone)]
pub struct Secure(TlsConnector);

impl std::fmt::Debug for Secure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secure")
    }
}

impl Secure {
    /// Trusts the host's CAs (`SSL_CERT_FILE` and `SSL_CERT_DIR` count), and those of the file.
    ///
    /// # Errors
    /// The file cannot be used, or no CA is trusted.
    pub fn new(authorities: Option<&Path>) -> Result<Secure, SecureError> {
        let mut trusted = RootCertStore::empty();
        let of_host = rustls_native_certs::load_native_certs();
        // Certificates that cannot be parsed are skipped: some are supported by no library.
        trusted.add_parsable_certificates(of_host.certs);
        if let Some(path) = authorities {
            let wrong = |why: String| SecureError::File { path: path.to_owned(), why };
            let read = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
            let mut found = 0;
            for certificate in read {
                let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
                trusted.add(certificate).map_err(|error| wrong(error.to_string()))?;
                found += 1;
            }
            if found == 0 {
                return Err(wrong("there is none".to_owned()));
            }
        }
        if trusted.is_empty() {
            let why = of_host.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
            return Err(SecureError::Nobody(why));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| SecureError::Broken(error.to_string()))?
            .with_root_certificates(trusted)
            .with_no_client_auth();
        Ok(Secure(TlsConnector::from(Arc::new(config))))
    }

    /// TLS over a connection to `address`, `host:port`; the server must prove that it is this host.
    pub(super) async fn over(
        &self,
        stream: TcpStream,
        address: &str,
    ) -> Result<TlsStream<TcpStream>, HttpError> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(|error| broken(&error))?;
        self.0.connect(name, stream).await.map_err(|error| broken(&error))
    }
}
