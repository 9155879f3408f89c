//! Connections by TLS: whose word for a server is taken.

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

/// Why no server could prove itself.
#[derive(Debug, thiserror::Error)]
pub enum SecureError {
    /// The file of authorities cannot be used.
    #[error("{}: {why}; it must hold certificates in PEM", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Nobody is trusted.
    #[error(
        "this host has no certificates of authorities{0}; install ca-certificates, or name a file with some"
    )]
    Nobody(String),
    /// TLS does not work here.
    #[error("TLS cannot be used: {0}")]
    Broken(String),
}

/// The authorities that are trusted: those of the host, and those of a file.
#[derive(Clone)]
pub struct Secure(TlsConnector);

impl std::fmt::Debug for Secure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secure")
    }
}

impl Secure {
    /// Trusts whom the host trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` count), and those of the file.
    ///
    /// # Errors
    /// The file cannot be used, or nobody is trusted.
    pub fn new(authorities: Option<&Path>) -> Result<Secure, SecureError> {
        let mut trusted = RootCertStore::empty();
        let of_host = rustls_native_certs::load_native_certs();
        // What cannot be read among them is passed over: there are some that no library understands.
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

    /// TLS over a connection to `address`, `host:port`, whose host the server has to prove to be.
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
