//! The interfaces for NVRx: what its launcher learns about the node.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

#[allow(dead_code, reason = "shared with the tests of the agent, which use all of it")]
use crate::support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hyper_util::rt::TokioIo;
use mainstay_proto::nvhcd::health_check_service_client::HealthCheckServiceClient;
use mainstay_proto::nvhcd::{HealthCheckRequest, HealthCheckResponse};
use serde_json::Value;
use support::Agent;
use testing::TempDir;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};

const OFF_BUS: &str = "4,100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n";

/// What the launcher of NVRx sends.
const ARGUMENTS: [&str; 6] = ["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"];

struct Host {
    directory: TempDir,
}

impl Host {
    fn with_log(lines: &str) -> Host {
        let host = Host { directory: testing::tempdir().unwrap() };
        fs::write(host.at("kmsg"), lines).unwrap();
        fs::create_dir(host.at("segments")).unwrap();
        host
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn agent(&self, settings: &[(&str, &str)]) -> Agent {
        let (log, socket, segments) = (self.at("kmsg"), self.at("run/nvhcd.sock"), self.at("segments"));
        let mut all: Vec<(&str, &Path)> = vec![
            ("KERNEL_LOG_PATH", &log),
            ("NVRX_HEALTH_SOCKET", &socket),
            ("NVRX_SEGMENT_HEALTH_DIR", &segments),
            ("GPU_ENABLED", Path::new("false")),
        ];
        all.extend(settings.iter().map(|(name, value)| (*name, Path::new(*value))));
        Agent::start(self.directory.path(), &all)
    }

    async fn ask(&self) -> (HealthCheckResponse, Value) {
        let socket = self.at("run/nvhcd.sock");
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
        let request = HealthCheckRequest { args: ARGUMENTS.map(str::to_owned).to_vec() };
        let answer =
            HealthCheckServiceClient::new(channel).run_health_check(request).await.unwrap().into_inner();
        let output: Value = serde_json::from_str(&answer.output).unwrap();
        assert!(output.is_object(), "anything else counts as healthy: {output}");
        (answer, output)
    }
}

#[tokio::test]
async fn a_node_that_is_well_is_let_in() {
    let host = Host::with_log("6,1,1000000,-;Linux version 6.1\n");
    let _agent = host.agent(&[]);
    let (answer, output) = host.ask().await;
    assert!(answer.success, "{answer:?}");
    assert_eq!((answer.exit_code, &output["fail_count"]), (0, &Value::from(0)));
    let mode = fs::metadata(host.at("run/nvhcd.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666, "the job's user must be able to ask");
}

#[tokio::test]
async fn a_node_with_a_lost_gpu_is_kept_out_with_a_reason() {
    let host = Host::with_log(OFF_BUS);
    let _agent = host.agent(&[]);
    let (answer, output) = host.ask().await;
    assert!(!answer.success);
    assert_eq!(output["fail_count"], 1);
    let reported = output["failed_checks"][0].as_str().unwrap();
    assert!(reported.starts_with("gpu.0000:3b:00: ") && reported.ends_with("(REBOOT_NODE)"), "{reported}");
}

#[tokio::test]
async fn an_unknown_state_keeps_a_node_out_only_if_configured() {
    let host = Host::with_log("");
    fs::remove_file(host.at("kmsg")).unwrap();
    // A link to itself: it is there, and cannot be read.
    std::os::unix::fs::symlink(host.at("kmsg"), host.at("kmsg")).unwrap();
    let agent = host.agent(&[]);
    let (answer, output) = host.ask().await;
    assert!(answer.success, "{answer:?}");
    assert!(output["unknown"].to_string().contains("host.kernel_log"), "{output}");
    drop(agent);
    let _agent = host.agent(&[("NVRX_FAIL_ON_UNKNOWN", "true")]);
    assert!(!host.ask().await.0.success);
}

/// A process of a Slurm job; it ends when this is dropped.
struct SlurmProcess(std::process::Child);

impl SlurmProcess {
    fn of(job: &str) -> SlurmProcess {
        let mut command = Command::new("sleep");
        command.arg("600").env("SLURM_JOB_ID", job).stdin(Stdio::null());
        SlurmProcess(command.spawn().unwrap())
    }
}

impl Drop for SlurmProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn jobs_on_an_unfit_node_find_their_segment_file_and_those_on_a_fit_one_do_not() {
    // A job id that no other job on this machine has.
    let job = format!("9{}", std::process::id());
    let _process = SlurmProcess::of(&job);
    let host = Host::with_log(OFF_BUS);
    let file = host.at("segments").join(format!("segment_health_check.{job}.{job}"));
    let agent = host.agent(&[]);
    let seen = until(&file, true);
    assert!(seen.contains("gpu.0000:3b:00"), "{seen}");
    drop(agent);
    // The node was repaired: the kernel log of the next boot has no fault.
    fs::remove_dir_all(host.at("state")).unwrap();
    fs::write(host.at("kmsg"), "6,1,1000000,-;Linux version 6.1\n").unwrap();
    let _agent = host.agent(&[]);
    until(&file, false);
}

/// Waits until a file exists and is complete, or is gone.
fn until(file: &Path, there: bool) -> String {
    let watched = file.parent().unwrap();
    for _ in 0..3000 {
        match fs::read_to_string(file) {
            Ok(text) if there => return text,
            Err(_) if !there => return String::new(),
            _ => std::thread::sleep(std::time::Duration::from_millis(10)),
        }
    }
    let all: Vec<_> = fs::read_dir(watched).unwrap().flatten().map(|entry| entry.file_name()).collect();
    panic!("{} (there: {there}): {all:?}", file.display());
}
