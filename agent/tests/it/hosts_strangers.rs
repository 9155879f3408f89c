//! Who does not belong to a job of several hosts, and reaches its built-in store.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_coord::{Client, Endpoint, Settings};
use serde_json::json;

/// A store that everyone can read.
const OPEN_STORE: &str = "knows the job's id can read what the hosts write there";

/// An end of the job without a proof.
const FOREIGN_END: &str = "that no launcher of the job wrote";

const RUN: &str = "job-of-several-hosts";

/// The launcher that has the store of a job that runs on one host so far. Its rank waits for a file and fails.
struct Job {
    launcher: Child,
    port: u16,
}

impl Job {
    fn start(directory: &Path, token: &str) -> Job {
        let port = testing::free_port();
        let endpoint = format!("127.0.0.1:{port}");
        let rank =
            r#"[ -z "$MAINSTAY_RDZV_TOKEN" ] && touch clean; until [ -e go ]; do sleep 0.02; done; exit 3"#;
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(["run", "--no-agent", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", RUN]);
        command.args(["--rdzv-endpoint", &endpoint, "--rdzv-conf", "is_host=true,last_call_timeout=0.1"]);
        command.args(["--max-restarts", "0", "--nproc-per-node", "1", "--no-python", "--log-dir"]);
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
        let ended = json!({ "version": 1, "needs": 1, "epoch": 99, "why": "all is well", "body": body });
        let key = format!("/mainstay/v1/jobs/{RUN}/ended");
        stranger.put(&key, ended.to_string().as_bytes(), None).await.unwrap();
        job.until(|| said(directory).contains(FOREIGN_END)).await;
    }
    let status = job.end(directory);
    assert!(status.is_some_and(|status| status != 0), "{status:?}\n{}", said(directory));
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
