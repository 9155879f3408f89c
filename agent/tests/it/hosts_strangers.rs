//! Who does not belong to a job of several hosts, and reaches its built-in store.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_coord::{Client, Endpoint, Settings};
use serde_json::{Value, json};

/// A store that everyone can read.
const OPEN_STORE: &str = "knows the job's id can read what the hosts write there";

/// An end of the job without a proof.
const FOREIGN_END: &str = "that no launcher of the job wrote";

const RUN: &str = "job-of-several-hosts";

/// A launcher of a job, and the port of its store.
struct Job {
    launcher: Child,
    port: u16,
}

impl Job {
    /// The launcher that has the store of a job that runs on one host so far. Its rank waits for a file and fails.
    fn start(directory: &Path, token: &str) -> Job {
        let rank =
            r#"[ -z "$MAINSTAY_RDZV_TOKEN" ] && touch clean; until [ -e go ]; do sleep 0.02; done; exit 3"#;
        let options = ["--rdzv-conf", "is_host=true,last_call_timeout=0.1", "--max-restarts", "0"];
        Job::host(directory, testing::free_port(), token, &options, rank)
    }

    fn host(directory: &Path, port: u16, token: &str, options: &[&str], rank: &str) -> Job {
        let endpoint = format!("127.0.0.1:{port}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(["run", "--no-agent", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", RUN]);
        command.args(["--rdzv-endpoint", &endpoint]).args(options);
        command.args(["--nproc-per-node", "1", "--no-python", "--log-dir"]);
        command.arg(directory.join("logs")).arg("--runtime-dir").arg(directory.join("runtime"));
        command.args(["/bin/sh", "-c", rank]).env("MAINSTAY_RDZV_TOKEN", token);
        let printed = fs::File::create(directory.join("said")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(printed).current_dir(directory);
        Job { launcher: command.spawn().unwrap(), port }
    }

    /// What everyone who knows the name of the job can make.
    fn stranger(&self) -> Client {
        let key =
            blake3::derive_key("mainstay 2026-11 built-in coordination store", format!("\0{RUN}").as_bytes());
        let endpoint = Endpoint { tls: false, host: "127.0.0.1".to_owned(), port: self.port };
        let token = Some(blake3::Hash::from_bytes(key).to_hex().to_string());
        Client::new(Settings { token, ..Settings::new(vec![endpoint]) }).unwrap()
    }

    /// Waits until the store has or lacks a key of the job.
    async fn until_key(&mut self, stranger: &Client, name: &str, is_there: bool) {
        while stranger.get(&key(name)).await.unwrap().is_some() != is_there {
            assert_eq!(self.launcher.try_wait().unwrap(), None, "the launcher has ended");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until(&mut self, what: impl Fn() -> bool) {
        while !what() {
            assert_eq!(self.launcher.try_wait().unwrap(), None, "the launcher has ended");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Lets the rank fail, and returns the job's exit status.
    fn end(mut self, directory: &Path) -> Option<i32> {
        fs::write(directory.join("go"), "").unwrap();
        self.launcher.wait().unwrap().code()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let launcher = nix::unistd::Pid::from_raw(self.launcher.id() as i32);
        let _ = nix::sys::signal::kill(launcher, nix::sys::signal::Signal::SIGTERM);
        let _ = self.launcher.wait();
    }
}

fn key(name: &str) -> String {
    format!("/mainstay/v1/jobs/{RUN}/{name}")
}

/// An end that a stranger writes.
async fn forge_end(stranger: &Client, body: Value) {
    let ended = json!({ "version": 1, "needs": 1, "epoch": 99, "why": "all is well", "body": body });
    stranger.put(&key("ended"), ended.to_string().as_bytes(), None).await.unwrap();
}

/// Ends the leases of all launchers, so that they have to register again.
async fn revoke_members(stranger: &Client) {
    for member in stranger.list(&key("members/")).await.unwrap().items {
        stranger.revoke(member.lease.unwrap()).await.unwrap();
    }
}

fn said(directory: &Path) -> String {
    fs::read_to_string(directory.join("said")).unwrap()
}

#[tokio::test]
async fn an_end_that_no_launcher_of_the_job_wrote_ends_nothing() {
    let directory = testing::tempdir().unwrap();
    let directory = directory.path();
    let mut job = Job::start(directory, "");
    job.until(|| directory.join("clean").exists()).await;
    assert!(said(directory).contains(OPEN_STORE), "{}", said(directory));
    let stranger = job.stranger();
    for body in [json!({ "exit": 0 }), json!({ "exit": 0, "proof": "0".repeat(64) })] {
        forge_end(&stranger, body).await;
        job.until(|| said(directory).contains(FOREIGN_END)).await;
        job.until_key(&stranger, "ended", false).await;
    }
    // Not even an end.
    stranger.put(&key("ended"), b"\xff", None).await.unwrap();
    job.until_key(&stranger, "ended", false).await;
    let status = job.end(directory);
    assert!(status.is_some_and(|status| status != 0), "{status:?}\n{}", said(directory));
}

#[tokio::test]
async fn hosts_that_register_again_next_to_a_forged_end_go_on_when_one_of_them_is_lost() {
    let directory = testing::tempdir().unwrap();
    let places = ["first", "second"].map(|name| directory.path().join(name));
    let port = testing::free_port();
    let rank = r#"echo "hosts: $GROUP_WORLD_SIZE" >> rounds; until [ -e go ]; do sleep 0.02; done"#;
    let [mut first, mut second] = [0, 1].map(|place: usize| {
        fs::create_dir(&places[place]).unwrap();
        let conf = format!("is_host={},last_call_timeout=60,shrink_after=0.1,lease=3", place == 0);
        Job::host(&places[place], port, "", &["--rdzv-conf", &conf], rank)
    });
    let ran_on = |place: usize, hosts: usize| {
        let rounds = fs::read_to_string(places[place].join("rounds")).unwrap_or_default();
        rounds.lines().any(|round| round == format!("hosts: {hosts}"))
    };
    first.until(|| ran_on(0, 2)).await;
    second.until(|| ran_on(1, 2)).await;
    let stranger = first.stranger();
    forge_end(&stranger, json!({ "exit": 0 })).await;
    revoke_members(&stranger).await;
    first.until_key(&stranger, "ended", false).await;
    first.until_key(&stranger, "leader", true).await;
    second.launcher.kill().unwrap();
    first.until(|| ran_on(0, 1)).await;
    assert_eq!(first.end(&places[0]), Some(0), "{}", said(&places[0]));
}

#[tokio::test]
async fn with_a_secret_the_name_of_the_job_opens_nothing() {
    let directory = testing::tempdir().unwrap();
    let directory = directory.path();
    let mut job = Job::start(directory, "0123456789abcdef0123456789abcdef");
    // The rank does not get the secret.
    job.until(|| directory.join("clean").exists()).await;
    let refused = job.stranger().list("/mainstay/v1/jobs/").await.unwrap_err();
    assert!(refused.is_refused(), "{refused}");
    assert!(!said(directory).contains(OPEN_STORE), "{}", said(directory));
    assert_ne!(job.end(directory), Some(0));
}
