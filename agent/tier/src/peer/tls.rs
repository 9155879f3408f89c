//! TLS between agents, where the configuration has it: each side shows a certificate that the other side's authorities have signed, and
//! who is connected to must be who was meant. Between the launchers of a job each side shows a key that is made of their secret
//! ([`of_secret`]).
//!
//! Only TLS 1.3, for both ends are agents. No connection goes on with the trust of an earlier one. Files that are replaced are read again.

mod of_secret;

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, Connection, RootCertStore, ServerConfig};

use super::error::PeerError;
use super::frame::MAGIC;

/// Where certificates lie, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// This agent's certificate, and those between it and the authority.
    pub certificate: PathBuf,
    /// Its private key; only its owner may read it.
    pub key: PathBuf,
    /// The authorities whose word for other agents is taken.
    pub authorities: PathBuf,
}

/// Which of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The certificate.
    Certificate,
    /// The private key.
    Key,
    /// The authorities.
    Authorities,
}

/// The certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct TlsError {
    /// The file that is at fault.
    pub part: Part,
    /// Its path.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

/// Why a key that is made of a secret is not taken.
const OTHER_SECRET: &str = "its key is made of another secret";

/// What an agent needs for TLS with others.
#[derive(Clone)]
pub struct Tls(Source);

/// Where keys come from.
#[derive(Clone)]
enum Source {
    Files { files: Arc<TlsFiles>, read: Arc<Mutex<Loaded>> },
    Secret(Both),
}

/// The files as they were read last.
struct Loaded {
    marks: Marks,
    both: Both,
}

/// Tells whether a file is another one than before.
type Marks = [Option<(u64, i64, i64, u64)>; 3];

/// One agent both connects and is connected to.
#[derive(Clone)]
struct Both {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Files { files, .. } => {
                f.debug_struct("Tls").field("files", files).finish_non_exhaustive()
            }
            Source::Secret(_) => f.write_str("Tls(..)"),
        }
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// One of them cannot be read or holds something else, others may read the key, or it is not the certificate's.
    pub fn read(files: TlsFiles) -> Result<Tls, TlsError> {
        let read = Loaded { marks: marks(&files), both: Both::read(&files)? };
        Ok(Tls(Source::Files { files: Arc::new(files), read: Arc::new(Mutex::new(read)) }))
    }

    /// Between those who know the secret; nobody else gets through.
    ///
    /// # Errors
    /// TLS cannot be used here.
    pub fn of_secret(secret: &[u8]) -> Result<Tls, rustls::Error> {
        of_secret::both(secret).map(|both| Tls(Source::Secret(both)))
    }

    /// The two ends, for connections of others than peers.
    pub fn ends(&self) -> (Arc<ClientConfig>, Arc<ServerConfig>) {
        let Both { client, server } = self.now();
        (client, server)
    }

    /// The files as they are now; those from before if they are of no use.
    fn now(&self) -> Both {
        let (files, read) = match &self.0 {
            Source::Files { files, read } => (files, read),
            Source::Secret(both) => return both.clone(),
        };
        let marks = marks(files);
        let mut read = read.lock().unwrap_or_else(PoisonError::into_inner);
        if marks != read.marks {
            read.marks = marks;
            match Both::read(files) {
                Ok(both) => {
                    tracing::info!(certificate = %files.certificate.display(), "the certificate was read again");
                    read.both = both;
                }
                // They are being replaced, one after the other; what holds is kept.
                Err(error) => tracing::warn!(%error, "new files for TLS between agents are of no use yet"),
            }
        }
        read.both.clone()
    }

    /// For a connection to `address`, `host:port`: whoever answers must show a certificate for this host.
    pub(super) fn to(&self, address: &str) -> Result<Connection, PeerError> {
        let reported = |why: String| PeerError::Local(format!("TLS to {address}: {why}"));
        let host = match self.0 {
            // Whoever has the key is meant.
            Source::Secret(_) => "launcher",
            Source::Files { .. } => address.rsplit_once(':').map_or(address, |(host, _)| host),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(|error| reported(error.to_string()))?;
        let made = rustls::ClientConnection::new(self.now().client, name);
        made.map(Connection::Client).map_err(|error| reported(error.to_string()))
    }

    /// For a connection that came.
    pub(super) fn from(&self, peer: &str) -> Result<Connection, PeerError> {
        let made = rustls::ServerConnection::new(self.now().server);
        made.map(Connection::Server).map_err(|error| PeerError::Local(format!("TLS with {peer}: {error}")))
    }
}

impl Both {
    fn read(files: &TlsFiles) -> Result<Both, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates(Part::Certificate, &files.certificate)?;
        let mut trusted = RootCertStore::empty();
        for authority in certificates(Part::Authorities, &files.authorities)? {
            trusted.add(authority).map_err(|error| wrong(Part::Authorities, &files.authorities, error))?;
        }
        let trusted = Arc::new(trusted);
        let unfit = |error: rustls::Error| unfit(files, &error);
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(unfit)?
            .with_root_certificates(Arc::clone(&trusted))
            .with_client_auth_cert(chain.clone(), private_key(&files.key)?)
            .map_err(unfit)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(trusted, Arc::clone(&provider))
            .build()
            .map_err(|error| wrong(Part::Authorities, &files.authorities, error))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(unfit)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, private_key(&files.key)?)
            .map_err(unfit)?;
        let (mut client, mut server) = (client, server);
        client.resumption = Resumption::disabled();
        server.send_tls13_tickets = 0;
        Ok(Both { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn wrong(part: Part, path: &Path, why: impl fmt::Display) -> TlsError {
    TlsError { part, path: path.to_owned(), why: why.to_string() }
}

/// Certificate and key are read, and do not go together.
fn unfit(files: &TlsFiles, error: &rustls::Error) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(_) => {
            let why = format!("it is not the key of the certificate in {}", files.certificate.display());
            wrong(Part::Key, &files.key, why)
        }
        rustls::Error::InvalidCertificate(_) => wrong(Part::Certificate, &files.certificate, error),
        _ => wrong(Part::Key, &files.key, error),
    }
}

fn certificates(part: Part, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| wrong(part, path, error))?;
    let read: Result<Vec<_>, _> = read.collect();
    let found =
        read.map_err(|error| wrong(part, path, format!("{error}; it must hold certificates in PEM")))?;
    if found.is_empty() {
        return Err(wrong(part, path, "there is no certificate in it; it must hold certificates in PEM"));
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let reported = |why: String| wrong(Part::Key, path, why);
    let mode = fs::metadata(path).map_err(|error| reported(error.to_string()))?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(reported(format!("it may be read by others (mode {mode:o}): make it 0600")));
    }
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| reported(format!("{error}; it must hold a private key in PEM without a password")))
}

fn marks(files: &TlsFiles) -> Marks {
    [&files.certificate, &files.key, &files.authorities].map(|path| {
        let found = fs::metadata(path).ok()?;
        Some((found.ino(), found.mtime(), found.mtime_nsec(), found.size()))
    })
}

/// What it means that no TLS came about; `first` is how the other side began.
pub(super) fn failed(peer: &str, first: [u8; 4], error: io::Error) -> PeerError {
    if first == MAGIC {
        return PeerError::SpeaksPlainly { peer: peer.to_owned() };
    }
    reported(peer, error)
}

/// What went wrong on a connection that may be one of TLS.
pub(super) fn reported(peer: &str, error: io::Error) -> PeerError {
    let peer = || peer.to_owned();
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::AlertReceived(alert)) if is_about_certificates(*alert) => {
            PeerError::CertificateRefused { peer: peer(), why: alert_words(*alert) }
        }
        Some(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)) => {
            PeerError::BadCertificate { peer: peer(), why: OTHER_SECRET.to_owned() }
        }
        Some(error @ (rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)) => {
            PeerError::BadCertificate { peer: peer(), why: error.to_string() }
        }
        // It did not wait any longer, which says nothing against either side.
        Some(rustls::Error::AlertReceived(AlertDescription::CloseNotify)) => {
            PeerError::lost(&peer(), io::Error::from(io::ErrorKind::ConnectionAborted))
        }
        Some(error) => PeerError::Tls { peer: peer(), why: error.to_string() },
        None => PeerError::lost(&peer(), error),
    }
}

fn is_about_certificates(alert: AlertDescription) -> bool {
    use AlertDescription as Alert;
    matches!(
        alert,
        Alert::NoCertificate
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::DecryptError
            | Alert::CertificateRequired
    )
}

fn alert_words(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::UnknownCA => "none of its authorities has signed it".to_owned(),
        AlertDescription::CertificateRequired => "none was shown".to_owned(),
        AlertDescription::AccessDenied => OTHER_SECRET.to_owned(),
        AlertDescription::CertificateExpired => {
            "it has expired, or one of the two clocks is wrong".to_owned()
        }
        other => format!("{other:?}"),
    }
}
