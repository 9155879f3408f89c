//! A real etcd for jobs to meet in.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_tests::{Stage, skipped};
use testing::free_port;

/// Whether Debian's `etcd-server` is installed; reports a skip if not.
pub fn has_etcd() -> bool {
    let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_ok() || {
        skipped("there is no etcd (Debian: etcd-server)");
        false
    }
}

/// Killed when it is dropped.
pub struct Etcd {
    pub port: u16,
    peer_port: u16,
    stage: Stage,
    child: Option<Child>,
}

impl Etcd {
    pub fn start() -> Etcd {
        let mut etcd = Etcd { port: free_port(), peer_port: free_port(), stage: Stage::new(), child: None };
        etcd.resume();
        etcd
    }

    /// Starts it on its existing data.
    pub fn resume(&mut self) {
        let client = format!("http://127.0.0.1:{}", self.port);
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let log = std::fs::File::create(self.stage.work().join("etcd.log")).expect("a file");
        let child = Command::new("etcd")
            .arg("--name=one")
            .arg("--data-dir")
            .arg(self.data())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .arg(format!("--initial-cluster=one={peer}"))
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn();
        let child = self.child.insert(child.expect("etcd can be started"));
        let has_ended = |child: &mut Child| child.try_wait().expect("our own child");
        while Self::post(self.port, "/v3/maintenance/status", "{}").is_none() {
            assert_eq!(has_ended(child), None, "etcd on port {} ended at once", self.port);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn data(&self) -> PathBuf {
        self.stage.work().join("data")
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("our own child");
            child.wait().expect("our own child");
        }
    }

    /// Kills it, and removes its data.
    pub fn wipe(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.data()).expect("etcd has data");
    }

    /// The response to a range query for all keys of this program: JSON, with keys and values in base64.
    pub fn all_keys(&self) -> String {
        // "/mainstay" to "/mainstaz".
        Self::post(self.port, "/v3/kv/range", r#"{"key":"L21haW5zdGF5","range_end":"L21haW5zdGF6"}"#)
            .expect("etcd answers")
    }

    fn post(port: u16, path: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        let length = body.len();
        let question = format!(
            "POST {path} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(question.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(answer)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A free port whose neighbour is free too.
pub fn pair() -> u16 {
    loop {
        let (port, next) = (free_port(), free_port());
        if next == port + 1 {
            return port;
        }
    }
}

/// Waits until someone listens there.
pub fn wait_for_port(port: u16) {
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        std::thread::sleep(Duration::from_millis(20));
    }
}
