//! Real stores: the built-in one in its own process, and etcd.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_coord::{Client, Endpoint, Server, ServerOptions, ServerTls, Settings};
use testing::TempDir;
use testing::free_port;

/// The role of a child process of this test binary.
const ROLE: &str = "MAINSTAY_COORD_TEST";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Builtin,
    Etcd,
}

/// Options of a store.
#[derive(Clone, Debug, Default)]
pub struct Ways {
    /// The job's token; only the built-in store has one.
    pub token: Option<String>,
    /// Certificate, key, and authority of clients.
    pub tls: Option<(PathBuf, PathBuf, PathBuf)>,
}

/// A store in its own process, with its data. Killed on drop.
pub struct Store {
    pub kind: Kind,
    pub port: u16,
    peer_port: u16,
    pub data: TempDir,
    ways: Ways,
    child: Option<Child>,
}

impl Store {
    pub async fn builtin() -> Store {
        Store::start(Kind::Builtin, Ways::default()).await
    }

    /// None, with a printed reason, if there is no etcd.
    pub async fn etcd() -> Option<Store> {
        has_etcd().then_some(())?;
        Some(Store::start(Kind::Etcd, Ways::default()).await)
    }

    pub async fn start(kind: Kind, ways: Ways) -> Store {
        let data = testing::tempdir().unwrap();
        let mut store = Store { kind, port: free_port(), peer_port: free_port(), data, ways, child: None };
        store.resume().await;
        store
    }

    /// Starts it again with the same data and port.
    pub async fn resume(&mut self) {
        self.spawn();
        self.ready(self.ways.tls.is_none()).await;
    }

    /// The same for a store that would refuse a request without a user.
    pub async fn resume_without_asking(&mut self) {
        self.spawn();
        self.ready(false).await;
    }

    fn spawn(&mut self) {
        let child = match self.kind {
            Kind::Builtin => self.builtin_child(),
            Kind::Etcd => self.etcd_child(),
        };
        self.child = Some(child);
    }

    fn builtin_child(&self) -> Child {
        let tls = self.ways.tls.as_ref().map_or(String::new(), |(certificate, key, authority)| {
            format!("{}\n{}\n{}", certificate.display(), key.display(), authority.display())
        });
        let mut command = role("store");
        command.env("COORD_PORT", self.port.to_string()).env("COORD_TLS", tls);
        command
            .env("COORD_DATA", self.data.path())
            .env("COORD_TOKEN", self.ways.token.clone().unwrap_or_default());
        command.spawn().unwrap()
    }

    fn etcd_child(&self) -> Child {
        let scheme = if self.ways.tls.is_some() { "https" } else { "http" };
        let client = format!("{scheme}://127.0.0.1:{}", self.port);
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let mut command = Command::new("etcd");
        command.arg("--name=one").arg("--data-dir").arg(self.data.path().join("etcd"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.arg(format!("--initial-cluster=one={peer}"));
        if let Some((certificate, key, authority)) = &self.ways.tls {
            command.arg("--client-cert-auth").arg("--cert-file").arg(certificate);
            command.arg("--key-file").arg(key).arg("--trusted-ca-file").arg(authority);
        }
        let log = std::fs::File::create(self.data.path().join("etcd.out")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    }

    /// Returns when it accepts connections and, if `ask` is set, answers requests.
    async fn ready(&mut self, ask: bool) {
        for _ in 0..400 {
            let connected = std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok();
            if connected && (!ask || self.client().status().await.is_ok()) {
                return;
            }
            let ended = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "the store ended: {ended:?}\n{}", self.output());
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("the store does not answer\n{}", self.output());
    }

    fn output(&self) -> String {
        std::fs::read_to_string(self.data.path().join("etcd.out")).unwrap_or_default()
    }

    /// Sends SIGKILL and waits for the end.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub fn pid(&self) -> nix::unistd::Pid {
        let id = self.child.as_ref().unwrap().id();
        nix::unistd::Pid::from_raw(i32::try_from(id).unwrap())
    }

    pub fn settings(&self) -> Settings {
        let mut settings = Settings::new(vec![endpoint(self.port)]);
        settings.token.clone_from(&self.ways.token);
        settings
    }

    pub fn client(&self) -> Client {
        Client::new(self.settings()).unwrap()
    }

    /// A client that connects to the store through another port.
    pub fn client_through(&self, port: u16) -> Client {
        Client::new(Settings { endpoints: vec![endpoint(port)], ..self.settings() }).unwrap()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn endpoint(port: u16) -> Endpoint {
    Endpoint { tls: false, host: "127.0.0.1".to_owned(), port }
}

pub fn has_etcd() -> bool {
    let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let there = found.is_ok_and(|status| status.success());
    if !there {
        eprintln!("skipped: there is no etcd on PATH; install etcd-server (as root, by apt-get)");
    }
    there
}

/// This test binary as a child process that plays a role of [`child`].
pub fn role(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["stores::child", "--exact", "--nocapture"]).env(ROLE, name);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// The code of a child process. It does nothing in the test suite itself.
#[tokio::test]
async fn child() {
    let value = |name: &str| std::env::var(name).unwrap_or_default();
    match value(ROLE).as_str() {
        "store" => serve(value("COORD_PORT").parse().unwrap(), Path::new(&value("COORD_DATA"))).await,
        "holder" => hold(value("COORD_PORT").parse().unwrap(), &value("COORD_KEY")).await,
        _ => {}
    }
}

async fn serve(port: u16, data: &Path) {
    let mut options = ServerOptions::new(([127, 0, 0, 1], port).into());
    options.directory = Some(data.join("store"));
    options.token = std::env::var("COORD_TOKEN").ok().filter(|token| !token.is_empty());
    let tls = std::env::var("COORD_TLS").unwrap_or_default();
    if let [certificate, key, authority] = tls.split('\n').collect::<Vec<_>>()[..] {
        options.tls = Some(ServerTls {
            certificate: certificate.into(),
            key: key.into(),
            client_authorities: Some(authority.into()),
        });
    }
    let _server = Server::start(options).await.unwrap();
    std::future::pending::<()>().await;
}

/// Keeps a key under a lease until it is killed.
async fn hold(port: u16, key: &str) {
    let client = Client::new(Settings::new(vec![endpoint(port)])).unwrap();
    let lease = client.lease(Duration::from_secs(2)).await.unwrap();
    client.put(key, b"held", Some(lease.id())).await.unwrap();
    std::future::pending::<()>().await;
}
