//! Authentication: the job's token, etcd's users and passwords, client certificates.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use mainstay_coord::{Client, Credentials, Settings, TlsFiles, WatchEvent};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use testing::TempDir;

use crate::stores::{Kind, Store, Ways, endpoint, has_etcd};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_built_in_store_refuses_a_wrong_or_missing_token() {
    let ways = Ways { token: Some("of this job".to_owned()), tls: None };
    let store = Store::start(Kind::Builtin, ways).await;
    store.client().put("/k", b"", None).await.unwrap();
    for token in [None, Some(""), Some("of this joc"), Some("of this job and more")] {
        let settings = Settings { token: token.map(str::to_owned), ..store.settings() };
        let client = Client::new(settings).unwrap();
        let refused = client.get("/k").await.unwrap_err();
        assert!(refused.is_refused(), "{token:?}: {refused}");

        assert!(client.lease(Duration::from_secs(5)).await.unwrap_err().is_refused());
        assert!(client.watch("/", None).next().await.unwrap_err().is_refused());
    }
    // An etcd user has no effect there.
    let user = Some(Credentials { user: "u".to_owned(), password: "p".to_owned() });
    Client::new(Settings { user, ..store.settings() }).unwrap().get("/k").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_user_can_access_only_what_its_role_allows() {
    let Some(mut store) = Store::etcd().await else { return };
    if Command::new("etcdctl").arg("version").output().is_err() {
        eprintln!("skipped: there is no etcdctl on PATH; install etcd-client (as root, by apt-get)");
        return;
    }
    let ctl = |arguments: &[&str]| {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints=127.0.0.1:{}", store.port)).args(arguments);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    ctl(&["user", "add", "root:secret"]);
    ctl(&["user", "grant-role", "root", "root"]);
    ctl(&["user", "add", "train:pass"]);
    ctl(&["role", "add", "jobs"]);
    ctl(&["role", "grant-permission", "jobs", "--prefix=true", "readwrite", "/mainstay/"]);
    ctl(&["user", "grant-role", "train", "jobs"]);
    ctl(&["auth", "enable"]);

    let as_user = |user: &str, password: &str| {
        let user = Some(Credentials { user: user.to_owned(), password: password.to_owned() });
        Client::new(Settings { user, ..store.settings() }).unwrap()
    };
    let client = as_user("train", "pass");
    client.put("/mainstay/x", b"", None).await.unwrap();
    let lease = client.lease(Duration::from_secs(2)).await.unwrap();
    client.put("/mainstay/y", b"", Some(lease.id())).await.unwrap();
    let mut watch = client.watch("/mainstay/", Some(1));
    assert!(matches!(watch.next().await.unwrap(), WatchEvent::Put { .. }));
    assert!(client.put("/other", b"", None).await.unwrap_err().is_refused());
    assert!(client.watch("/other", None).next().await.unwrap_err().is_refused());
    let wrong = as_user("train", "wrong").get("/mainstay/x").await.unwrap_err();
    assert!(wrong.is_refused() && wrong.to_string().contains("user, password"), "{wrong}");
    assert!(store.client().get("/mainstay/x").await.unwrap_err().is_refused());

    // etcd drops tokens on a restart, as it does with expired ones: the client gets another one.
    store.kill();
    let restarted = tokio::spawn(async move {
        store.resume_without_asking().await;
        store
    });
    let _store = restarted.await.unwrap();
    client.put("/mainstay/z", b"", None).await.unwrap();
    loop {
        if let WatchEvent::Put { now, .. } = watch.next().await.unwrap()
            && now.key == "/mainstay/z"
        {
            break;
        }
    }
    assert!(client.get("/mainstay/y").await.unwrap().is_some(), "its lease was kept alive");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_certificates_are_checked_by_the_built_in_store() {
    tls_with_client_certificates(Kind::Builtin).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_certificates_are_checked_by_etcd() {
    if has_etcd() {
        tls_with_client_certificates(Kind::Etcd).await;
    }
}

async fn tls_with_client_certificates(kind: Kind) {
    let ours = Authority::new("ours");
    let strange = Authority::new("strange");
    let ways =
        Ways { token: None, tls: Some((ours.file("cert.pem"), ours.file("key.pem"), ours.file("ca.pem"))) };
    let store = Store::start(kind, ways).await;
    let with = |host: &str, tls: TlsFiles| {
        let endpoints = vec![endpoint(store.port).with_tls(true)];
        let endpoints = endpoints.into_iter().map(|mut endpoint| {
            endpoint.host = host.to_owned();
            endpoint
        });
        let settings = Settings { tls: Some(tls), ..Settings::new(endpoints.collect()) };
        Client::new(settings).unwrap()
    };
    let good = with("127.0.0.1", ours.client());
    good.put("/k", b"1", None).await.unwrap();
    let lease = good.lease(Duration::from_secs(2)).await.unwrap();
    good.put("/k", b"2", Some(lease.id())).await.unwrap();
    assert!(matches!(good.watch("/k", Some(1)).next().await.unwrap(), WatchEvent::Put { .. }));

    let unknown = TlsFiles { authorities: Some(ours.file("ca.pem")), ..strange.client() };
    let error = with("127.0.0.1", unknown).get("/k").await.unwrap_err();
    assert!(error.is_refused(), "a client of an unknown authority: {error}");
    let none = TlsFiles { authorities: Some(ours.file("ca.pem")), ..TlsFiles::default() };
    let error = with("127.0.0.1", none).get("/k").await.unwrap_err();
    assert!(error.is_refused(), "a client without a certificate: {error}");
    let distrusting = TlsFiles { authorities: Some(strange.file("ca.pem")), ..ours.client() };
    let error = with("127.0.0.1", distrusting).get("/k").await.unwrap_err();
    assert!(error.is_refused(), "a store of an unknown authority: {error}");
    let error = with("localhost", ours.client()).get("/k").await.unwrap_err();
    assert!(error.is_refused(), "a certificate for another name: {error}");
    // A client without TLS is not served.
    let plain = Client::new(Settings::new(vec![endpoint(store.port)])).unwrap();
    assert!(plain.get("/k").await.is_err());
}

#[test]
fn an_invalid_certificate_file_is_reported_before_any_request() {
    let folder = testing::tempdir().unwrap();
    let path = folder.path().join("ca.pem");
    let with = |tls: TlsFiles| {
        let endpoints = vec!["https://127.0.0.1:1".parse().unwrap()];
        Client::new(Settings { tls: Some(tls), ..Settings::new(endpoints) }).unwrap_err().to_string()
    };
    let missing = with(TlsFiles { authorities: Some(path.clone()), ..TlsFiles::default() });
    assert!(missing.contains("ca.pem"), "{missing}");
    std::fs::write(&path, "no certificate").unwrap();
    let wrong = with(TlsFiles { authorities: Some(path.clone()), ..TlsFiles::default() });
    assert!(wrong.contains("ca.pem") && wrong.contains("PEM"), "{wrong}");
    let half = with(TlsFiles { certificate: Some(path), ..TlsFiles::default() });
    let folder = folder.path().display().to_string();
    testing::snapshot!("errors", "a certificate without a key", half.replace(&folder, "DIR"));
}

/// An authority with one certificate that is valid for both ends on 127.0.0.1.
struct Authority {
    folder: TempDir,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let folder = testing::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf =
            CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
        write("ca.pem", issuer.pem());
        write("cert.pem", leaf.pem());
        write("key.pem", key.serialize_pem());
        Authority { folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        Path::join(self.folder.path(), name)
    }

    fn client(&self) -> TlsFiles {
        TlsFiles {
            authorities: Some(self.file("ca.pem")),
            certificate: Some(self.file("cert.pem")),
            key: Some(self.file("key.pem")),
        }
    }
}
