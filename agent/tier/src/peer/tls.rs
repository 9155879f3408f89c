//! TLS between agents, if configured: each side presents a certificate that an authority of the other side has signed, and
//! the certificate must be for the host that was called. Between the launchers of a job, each side presents a key derived from their
//! secret.
//!
//! Only TLS 1.3, because both ends are agents. Sessions are not resumed. Replaced files are read again.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::{fmt, fs, io};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Connection, DigitallySignedStruct, DistinguishedName,
    Error, PeerIncompatible, RootCertStore, ServerConfig, SignatureScheme,
};

use crate::lock;
use crate::peer::error::PeerError;
use crate::peer::frame::MAGIC;

/// Paths of the certificates, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// This agent's certificate and the intermediate certificates.
    pub certificate: PathBuf,
    /// Its private key; only its owner may read it.
    pub key: PathBuf,
    /// The authorities that are trusted for other agents.
    pub authorities: PathBuf,
}

impl TlsFiles {
    /// The files of a directory, by the names that Kubernetes and cert-manager give them.
    #[must_use]
    pub fn of(directory: &Path) -> TlsFiles {
        let [certificate, key, authorities] =
            ["tls.crt", "tls.key", "ca.crt"].map(|name| directory.join(name));
        TlsFiles { certificate, key, authorities }
    }
}

/// The certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct TlsError {
    /// The invalid file.
    pub path: PathBuf,
    /// The problem.
    pub why: String,
}

/// Why a key that is derived from a secret is refused.
const OTHER_SECRET: &str = "its key is made of another secret";

/// TLS configuration of an agent.
#[derive(Clone)]
pub struct Tls(KeySource);

/// Source of the keys.
#[derive(Clone)]
enum KeySource {
    Files { files: Arc<TlsFiles>, read: Arc<Mutex<LoadedFiles>> },
    Secret(TlsConfigs),
}

/// The files as last read.
struct LoadedFiles {
    marks: FileMarks,
    both: TlsConfigs,
}

/// Inode, modification time and size of each file, to detect replaced files.
type FileMarks = [Option<(u64, i64, i64, u64)>; 3];

/// Client and server configuration: an agent is both.
#[derive(Clone)]
struct TlsConfigs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            KeySource::Files { files, .. } => {
                f.debug_struct("Tls").field("files", files).finish_non_exhaustive()
            }
            KeySource::Secret(_) => f.write_str("Tls(..)"),
        }
    }
}

impl Tls {
    /// Reads the files.
    pub fn read(files: TlsFiles) -> Result<Tls, TlsError> {
        let read = LoadedFiles { marks: marks(&files), both: TlsConfigs::read(&files)? };
        Ok(Tls(KeySource::Files { files: Arc::new(files), read: Arc::new(Mutex::new(read)) }))
    }

    /// TLS between processes that know the secret; others are refused.
    pub fn from_secret(secret: &[u8]) -> Result<Tls, rustls::Error> {
        configs_from_secret(secret).map(|both| Tls(KeySource::Secret(both)))
    }

    /// Client and server configuration, for connections other than between peers.
    pub fn configurations(&self) -> (Arc<ClientConfig>, Arc<ServerConfig>) {
        let TlsConfigs { client, server } = self.now();
        (client, server)
    }

    /// The current files, or the previous ones if those are not valid.
    fn now(&self) -> TlsConfigs {
        let (files, read) = match &self.0 {
            KeySource::Files { files, read } => (files, read),
            KeySource::Secret(both) => return both.clone(),
        };
        let marks = marks(files);
        let mut read = lock(read);
        if marks != read.marks {
            read.marks = marks;
            match TlsConfigs::read(files) {
                Ok(both) => {
                    tracing::info!(certificate = %files.certificate.display(), "the certificate was read again");
                    read.both = both;
                }
                // They are being replaced one by one: keep the valid ones.
                Err(error) => tracing::warn!(%error, "new files for TLS between agents cannot be used yet"),
            }
        }
        read.both.clone()
    }

    /// Client side for a connection to `address`, `host:port`. The server's certificate must be for this host.
    pub(super) fn to(&self, address: &str) -> Result<Connection, PeerError> {
        let local = |why: String| PeerError::Local(format!("TLS to {address}: {why}"));
        let host = match self.0 {
            // Any process with the key is valid.
            KeySource::Secret(_) => "launcher",
            KeySource::Files { .. } => address.rsplit_once(':').map_or(address, |(host, _)| host),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(|error| local(error.to_string()))?;
        let made = rustls::ClientConnection::new(self.now().client, name);
        made.map(Connection::Client).map_err(|error| local(error.to_string()))
    }

    /// Server side for an incoming connection.
    pub(super) fn from(&self, peer: &str) -> Result<Connection, PeerError> {
        let made = rustls::ServerConnection::new(self.now().server);
        made.map(Connection::Server).map_err(|error| PeerError::Local(format!("TLS with {peer}: {error}")))
    }
}

impl TlsConfigs {
    fn read(files: &TlsFiles) -> Result<TlsConfigs, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates(&files.certificate)?;
        let mut trusted = RootCertStore::empty();
        for authority in certificates(&files.authorities)? {
            trusted.add(authority).map_err(|error| tls_error(&files.authorities, error))?;
        }
        let trusted = Arc::new(trusted);
        let unfit = |error: rustls::Error| configuration_error(files, &error);
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(unfit)?
            .with_root_certificates(Arc::clone(&trusted))
            .with_client_auth_cert(chain.clone(), private_key(&files.key)?)
            .map_err(unfit)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(trusted, Arc::clone(&provider))
            .build()
            .map_err(|error| tls_error(&files.authorities, error))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(unfit)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, private_key(&files.key)?)
            .map_err(unfit)?;
        let (mut client, mut server) = (client, server);
        client.resumption = Resumption::disabled();
        server.send_tls13_tickets = 0;
        Ok(TlsConfigs { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn tls_error(path: &Path, why: impl fmt::Display) -> TlsError {
    TlsError { path: path.to_owned(), why: why.to_string() }
}

/// Error if certificate and key are read but do not match.
fn configuration_error(files: &TlsFiles, error: &rustls::Error) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(_) => {
            let why = format!("it is not the key of the certificate in {}", files.certificate.display());
            tls_error(&files.key, why)
        }
        rustls::Error::InvalidCertificate(_) => tls_error(&files.certificate, error),
        _ => tls_error(&files.key, error),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| tls_error(path, error))?;
    let read: Result<Vec<_>, _> = read.collect();
    let found =
        read.map_err(|error| tls_error(path, format!("{error}; it must hold certificates in PEM")))?;
    if found.is_empty() {
        return Err(tls_error(path, "there is no certificate in it; it must hold certificates in PEM"));
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let invalid = |why: String| tls_error(path, why);
    let mode = fs::metadata(path).map_err(|error| invalid(error.to_string()))?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(invalid(format!("it may be read by others (mode {mode:o}): make it 0600")));
    }
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| invalid(format!("{error}; it must hold a private key in PEM without a password")))
}

fn marks(files: &TlsFiles) -> FileMarks {
    [&files.certificate, &files.key, &files.authorities].map(|path| {
        let found = fs::metadata(path).ok()?;
        Some((found.ino(), found.mtime(), found.mtime_nsec(), found.size()))
    })
}

/// The error for a failed handshake; `first` are the first bytes from the other side.
pub(super) fn handshake_error(peer: &str, first: [u8; 4], error: io::Error) -> PeerError {
    if first == MAGIC {
        return PeerError::SpeaksPlainly { peer: peer.to_owned() };
    }
    stream_error(peer, error)
}

/// The error of a connection that may use TLS.
pub(super) fn stream_error(peer: &str, error: io::Error) -> PeerError {
    let peer = || peer.to_owned();
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::AlertReceived(alert)) if is_about_certificates(*alert) => {
            PeerError::CertificateRefused { peer: peer(), why: alert_text(*alert) }
        }
        Some(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)) => {
            PeerError::BadCertificate { peer: peer(), why: OTHER_SECRET.to_owned() }
        }
        Some(error @ (rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)) => {
            PeerError::BadCertificate { peer: peer(), why: error.to_string() }
        }
        // The peer stopped waiting, which is not a TLS error.
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

fn alert_text(alert: AlertDescription) -> String {
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

// TLS between processes that share a secret and have no certificates: the launchers of one job.
//
// Their common private key is derived from the secret. Each side presents the public key (RFC 7250) and accepts only the same one, so
// there is no authority, no name to compare and no expiry. Sessions have their own keys, which cannot be derived from the
// secret: an eavesdropper who later learns the secret cannot decrypt recorded traffic.

/// Prefix of an Ed25519 private key in PKCS #8; the 32 bytes of the key follow (RFC 8410).
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Client and server configuration for connections between processes that know `secret`.
fn configs_from_secret(secret: &[u8]) -> Result<TlsConfigs, Error> {
    let seed = blake3::derive_key("mainstay 2026-11 TLS between the launchers of one job", secret);
    let key = [&PKCS8[..], &seed[..]].concat();
    let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key))?;
    let public = key.public_key().ok_or(Error::General("the key has no public half".to_owned()))?;
    let public = CertificateDer::from(public.as_ref().to_vec());
    let provider = Arc::new(ring::default_provider());
    let same = Arc::new(SameKeyVerifier {
        public: public.clone(),
        algorithms: provider.signature_verification_algorithms,
    });
    let shown = Arc::new(CertifiedKey::new(vec![public], key));
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&same) as Arc<dyn ServerCertVerifier>)
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&shown))));
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(same)
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(shown)));
    client.resumption = Resumption::disabled();
    client.enable_sni = false;
    server.send_tls13_tickets = 0;
    Ok(TlsConfigs { client: Arc::new(client), server: Arc::new(server) })
}

/// Accepts only the public key that is derived from the secret.
#[derive(Debug)]
struct SameKeyVerifier {
    public: CertificateDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl SameKeyVerifier {
    fn is_same(&self, shown: &CertificateDer<'_>) -> Result<(), Error> {
        let same = shown.as_ref() == self.public.as_ref();
        if same { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }

    fn signed(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(shown.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// Error for TLS 1.2: only TLS 1.3 is supported.
fn unsupported_version() -> Result<HandshakeSignatureValid, Error> {
    Err(PeerIncompatible::Tls12NotOffered.into())
}

impl ServerCertVerifier for SameKeyVerifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.is_same(shown).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unsupported_version()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for SameKeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.is_same(shown).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unsupported_version()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
