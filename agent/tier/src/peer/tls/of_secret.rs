//! TLS between processes that share a secret and have no certificates: the launchers of one job.
//!
//! Their common private key is derived from the secret. Each side presents the public key (RFC 7250) and accepts only the same one, so
//! there is no authority, no name to compare and no expiry. Sessions have their own keys, which cannot be derived from the
//! secret: an eavesdropper who later learns the secret cannot decrypt recorded traffic.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    ServerConfig, SignatureScheme,
};

use super::Both;

/// Prefix of an Ed25519 private key in PKCS #8; the 32 bytes of the key follow (RFC 8410).
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Client and server configuration for connections between processes that know `secret`.
pub(super) fn both(secret: &[u8]) -> Result<Both, Error> {
    let seed = blake3::derive_key("mainstay 2026-11 TLS between the launchers of one job", secret);
    let key = [&PKCS8[..], &seed[..]].concat();
    let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key))?;
    let public = key.public_key().ok_or(Error::General("the key has no public half".to_owned()))?;
    let public = CertificateDer::from(public.as_ref().to_vec());
    let provider = Arc::new(ring::default_provider());
    let same =
        Arc::new(SameKey { public: public.clone(), algorithms: provider.signature_verification_algorithms });
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
    Ok(Both { client: Arc::new(client), server: Arc::new(server) })
}

/// Accepts only the public key that is derived from the secret.
#[derive(Debug)]
struct SameKey {
    public: CertificateDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl SameKey {
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
fn not_spoken() -> Result<HandshakeSignatureValid, Error> {
    Err(PeerIncompatible::Tls12NotOffered.into())
}

impl ServerCertVerifier for SameKey {
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
        not_spoken()
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

impl ClientCertVerifier for SameKey {
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
        not_spoken()
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
