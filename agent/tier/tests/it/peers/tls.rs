//! Agents with certificates: those of the right authorities work as without TLS, all others are refused.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use mainstay_tier::peer::Service;
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::tls::{Tls, TlsFiles};
use mainstay_tier::peer::wire::{Timeouts, Wire};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use testing::TempDir;

use super::support::{Proxy, address, bytes, hosts_with, pass, token, until};

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// Files in `home` for a host at `address`, which trusts `trusted`.
    fn files(&self, home: &Path, address: &str, trusted: &Authority) -> TlsFiles {
        let host = address.rsplit_once(':').unwrap().0;
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = TlsFiles {
            certificate: home.join("agent.pem"),
            key: home.join("agent.key"),
            authorities: home.join("authorities.pem"),
        };
        fs::write(&files.certificate, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&files.authorities, &trusted.pem).unwrap();
        files
    }

    fn pass(&self, address: &str, trusted: &Authority) -> Credentials {
        let home = TempDir::new().unwrap();
        // The content stays after the files are removed.
        Credentials::Certificate(Tls::read(self.files(home.path(), address, trusted)).unwrap(), None)
    }
}

/// The results on both sides when a client with `theirs` connects to a server with `ours`, which may depend on the server's address.
fn meet(
    ours: impl Fn(&str) -> Credentials,
    theirs: &Credentials,
) -> (Result<Wire, PeerError>, std::thread::Result<Result<Wire, PeerError>>) {
    let at = address();
    let listener = TcpListener::bind(&at).unwrap();
    let shown = ours(&at);
    let accepting = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Wire::accept(stream, &shown, Timeouts::default())
    });
    let connected = Wire::connect(&at, theirs, Timeouts::default());
    (connected, accepting.join())
}

/// Same as [`meet`], if both sides fail.
fn refused(ours: impl Fn(&str) -> Credentials, theirs: &Credentials) -> (PeerError, PeerError) {
    let (connected, accepted) = meet(ours, theirs);
    (connected.unwrap_err(), accepted.unwrap().unwrap_err())
}

#[test]
fn with_certificates_steps_are_sent_and_restored_as_without() {
    for with_token in [false, true] {
        let authority = Authority::new();
        let names = [address(), address(), address()];
        let shows = |index: usize| match authority.pass(&names[index], &authority) {
            Credentials::Certificate(tls, _) if with_token => Credentials::Certificate(tls, Some(token())),
            alone => alone,
        };
        let mut hosts = hosts_with(&names, shows, |_, _| {});
        hosts[0].save(0, 10, &[0, 1], 2);
        hosts[0].wait_for_copies(10, 2);
        hosts[0].lose();
        hosts[0].start();
        assert_eq!(hosts[0].restore().unwrap().0, Some(10));
        hosts[0].has(10, &[0, 1]);
    }
}

#[test]
fn with_tls_traffic_cannot_be_read_in_transit() {
    for by_tls in [false, true] {
        let (front, back) = (address(), address());
        let received = Arc::new(Mutex::new(Vec::new()));
        let listening = Arc::clone(&received);
        let _proxy = Proxy::start(&front, &back, move |_, piece| {
            listening.lock().unwrap().extend_from_slice(piece);
            true
        });
        let names = [address(), front];
        let authority = Authority::new();
        let shows = |index: usize| if by_tls { authority.pass(&names[index], &authority) } else { pass() };
        let hosts = hosts_with(&names, shows, |index, settings| {
            if index == 1 {
                settings.listen = back.parse().unwrap();
            }
        });
        hosts[0].save(0, 3, &[0], 1);
        hosts[0].wait_for_copies(3, 2);
        let content = bytes(3, 0);
        let received = received.lock().unwrap();
        let words = [&content[1000..1032], &b"\"state.safetensors\""[..], b"MSTP"];
        let overheard = words.map(|words| received.windows(words.len()).any(|window| window == words));
        assert_eq!(overheard, [!by_tls; 3], "by TLS: {by_tls}");
    }
}

#[test]
fn a_certificate_of_another_authority_is_refused_and_both_sides_report_it() {
    let (ours, others) = (Authority::new(), Authority::new());
    // It trusts our authority, but its own certificate is from another one.
    let stranger = others.pass(&address(), &ours);
    let (there, here) = refused(|at| ours.pass(at, &ours), &stranger);
    assert!(matches!(there, PeerError::CertificateRefused { .. }), "{there}");
    assert!(there.to_string().contains("tls.crt of checkpoint.tls here"), "{there}");
    assert!(matches!(here, PeerError::BadCertificate { .. }), "{here}");
    assert!(here.to_string().contains("ca.crt of checkpoint.tls here"), "{here}");
    // A server with a certificate of another authority, and one with the certificate of another host.
    let friend = ours.pass(&address(), &ours);
    let (there, _) = refused(|at| others.pass(at, &ours), &friend);
    assert!(matches!(there, PeerError::BadCertificate { .. }), "{there}");
    let (there, _) = refused(|_| ours.pass("127.9.9.9:1", &ours), &friend);
    assert!(matches!(there, PeerError::BadCertificate { .. }), "{there}");
    // With the right certificate, both sides succeed.
    let (there, here) = meet(|at| ours.pass(at, &ours), &friend);
    assert!(there.is_ok() && here.unwrap().is_ok());
}

#[test]
fn an_agent_with_a_foreign_certificate_is_not_a_peer_and_reports_why() {
    let (ours, others) = (Authority::new(), Authority::new());
    let names = [address(), address()];
    let hosts = hosts_with(&names, |index| ours.pass(&names[index], &ours), |_, _| {});
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    let store = TempDir::new().unwrap();
    let settings = mainstay_tier::peer::Settings {
        listen: address().parse().unwrap(),
        name: String::new(),
        store: store.path().to_owned(),
        ..hosts[0].settings.clone()
    };
    for (shown, word) in [(others.pass(&address(), &ours), "certificate"), (pass(), "TLS")] {
        let settings =
            mainstay_tier::peer::Settings { listen: address().parse().unwrap(), ..settings.clone() };
        let outsider = Service::start(settings, shown).unwrap();
        until("the refusal", || {
            let peers = outsider.peers();
            peers.values().all(|peer| peer.error.as_ref().is_some_and(|error| error.contains(word)))
        });
        assert!(outsider.copies().is_empty());
    }
}

#[test]
fn a_client_without_a_certificate_gets_an_error_that_one_is_required() {
    let ours = Authority::new();
    let at = address();
    let listener = TcpListener::bind(&at).unwrap();
    let shown = ours.pass(&at, &ours);
    let accepting = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        Wire::accept(stream, &shown, Timeouts::default())
    });
    let mut trusted = rustls::RootCertStore::empty();
    trusted.add(CertificateDer::from_pem_slice(ours.pem.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(trusted)
        .with_no_client_auth();
    let name = ServerName::try_from(at.rsplit_once(':').unwrap().0.to_owned()).unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, TcpStream::connect(&at).unwrap());
    let reported = stream.write_all(&[0; 40]).and_then(|()| stream.read_exact(&mut [0; 40])).unwrap_err();
    assert!(reported.to_string().contains("CertificateRequired"), "{reported}");
    let refused = accepting.join().unwrap().unwrap_err();
    assert!(matches!(refused, PeerError::BadCertificate { .. }), "{refused}");
}

#[test]
fn if_only_one_of_two_uses_tls_both_errors_explain_what_to_do() {
    let ours = Authority::new();
    let secure = ours.pass(&address(), &ours);
    let (there, here) = refused(|at| ours.pass(at, &ours), &pass());
    assert!(matches!(there, PeerError::SpeaksTls { .. }), "{there}");
    assert!(there.to_string().contains("set checkpoint.tls here"), "{there}");
    assert!(matches!(here, PeerError::SpeaksPlainly { .. }), "{here}");
    let (there, here) = refused(|_| pass(), &secure);
    assert!(matches!(there, PeerError::SpeaksPlainly { .. }), "{there}");
    assert!(matches!(here, PeerError::SpeaksTls { .. }), "{here}");
}

#[test]
fn a_certificate_does_not_replace_a_configured_token() {
    let ours = Authority::new();
    let with_token = |at: &str| match ours.pass(at, &ours) {
        Credentials::Certificate(tls, _) => Credentials::Certificate(tls, Some(token())),
        other => other,
    };
    let (there, here) = refused(with_token, &ours.pass(&address(), &ours));
    assert!(matches!(there, PeerError::Refused { .. }), "{there}");
    assert!(matches!(here, PeerError::WrongToken { .. }), "{here}");
}

#[test]
fn certificates_that_are_replaced_are_used_from_then_on_and_bad_ones_never() {
    let (old, new) = (Authority::new(), Authority::new());
    let (home, at) = (TempDir::new().unwrap(), address());
    let files = old.files(home.path(), &at, &old);
    let tls = Tls::read(files.clone()).unwrap();
    let shown = || Credentials::Certificate(tls.clone(), None);
    let meets = |theirs: &Credentials| {
        let listener = TcpListener::bind(&at).unwrap();
        let shown = shown();
        let accepting = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            Wire::accept(stream, &shown, Timeouts::default()).is_ok()
        });
        Wire::connect(&at, theirs, Timeouts::default()).is_ok() & accepting.join().unwrap()
    };
    let (of_old, of_new) = (old.pass(&address(), &old), new.pass(&address(), &new));
    assert!(meets(&of_old) && !meets(&of_new));
    fs::write(&files.certificate, "a part of").unwrap();
    assert!(meets(&of_old), "what was read before holds while files are of no use");
    new.files(home.path(), &at, &new);
    assert!(meets(&of_new) && !meets(&of_old));
}

#[test]
fn unusable_files_are_named() {
    let ours = Authority::new();
    let spoilt = |spoil: &dyn Fn(&TlsFiles)| {
        let home = TempDir::new().unwrap();
        let files = ours.files(home.path(), "127.0.0.1:1", &ours);
        spoil(&files);
        Tls::read(files).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(spoilt(&|_| {}), Ok(()));
    let expect = |spoil: &dyn Fn(&TlsFiles), words: [&str; 2]| {
        let text = spoilt(spoil).unwrap_err();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    expect(&|files| fs::remove_file(&files.certificate).unwrap(), ["agent.pem", "No such file"]);
    expect(&|files| fs::write(&files.certificate, "no PEM").unwrap(), ["agent.pem", "in PEM"]);
    expect(&|files| fs::write(&files.authorities, "").unwrap(), ["authorities.pem", "in PEM"]);
    expect(&|files| fs::write(&files.key, "no PEM").unwrap(), ["agent.key", "private key in PEM"]);
    let another = KeyPair::generate().unwrap().serialize_pem();
    expect(
        &|files| fs::write(&files.key, &another).unwrap(),
        ["agent.key", "not the key of the certificate"],
    );
    let open = |files: &TlsFiles| fs::set_permissions(&files.key, fs::Permissions::from_mode(0o644)).unwrap();
    expect(&open, ["agent.key", "0600"]);
}
