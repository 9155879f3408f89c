//! A drill with a GPU memory error: the real agent with the drill library, the real launcher.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::json;
use support::Agent;
use testing::TempDir;

struct Host {
    directory: TempDir,
}

impl Host {
    fn new() -> Host {
        let directory = testing::TempDir::named("drill-", testing::memory()).unwrap();
        let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
        fs::copy(built, directory.path().join(fake_devices::LIBRARY)).unwrap();
        let gpu =
            |number: u32| json!({"uuid": format!("GPU-{number}"), "pci": format!("00000000:0{number}:00.0")});
        let script = json!({"driver": "570.1", "gpus": [gpu(1), gpu(2)]});
        fs::write(directory.path().join(fake_devices::SCRIPT), script.to_string()).unwrap();
        Host { directory }
    }

    fn job(&self, options: &[&str], library: &Path) -> Child {
        let at = self.directory.path();
        let up = at.join("up");
        let script = format!("trap 'exit 0' TERM; : > {}; while :; do sleep 0.05; done", up.display());
        let mut job = Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args([
                "run",
                "--rdzv-id",
                "drill",
                "--no-python",
                "--nproc-per-node",
                "2",
                "--no-agent",
                "--log-dir",
            ])
            .arg(at.join("logs"))
            .arg("--runtime-dir")
            .arg(at.join("runtime"))
            .args(options)
            .args(["/bin/sh", "-c", &script])
            .env("MAINSTAY_AGENT_GPU_LIBRARY", library)
            .env("CUDA_VISIBLE_DEVICES", "1,0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        for _ in 0..2_000 {
            // The command takes its time, so this loop does not spin.
            self.order(&["status"]);
            if up.exists() {
                return job;
            }
        }
        // A job that did not start is not left behind.
        let _ = job.kill();
        let ended = job.wait();
        panic!("the job does not start: {ended:?}");
    }

    fn order(&self, arguments: &[&str]) -> Output {
        let socket = self.directory.path().join("runtime/drill/api.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        let why: &[&str] = if arguments[0] == "status" { &[] } else { &["--reason", "drill"] };
        command.args(arguments).args(why).arg("--socket").arg(socket).output().unwrap()
    }

    fn script(&self) -> String {
        fs::read_to_string(self.directory.path().join(fake_devices::SCRIPT)).unwrap()
    }
}

fn end(mut job: Child) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(job.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    job.wait().unwrap();
}

#[test]
fn a_memory_error_of_a_ranks_gpu_is_detected_like_a_real_one() {
    let host = Host::new();
    let library = host.directory.path().join(fake_devices::LIBRARY);
    let nothing = Path::new("");
    let settings: [(&str, &Path); 3] =
        [("GPU_LIBRARY", &library), ("GPU_INTERVAL", "1s".as_ref()), ("KERNEL_LOG_PATH", nothing)];
    let agent = Agent::start(host.directory.path(), &settings);
    agent.wait_for("18 NVLinks up");
    let job = std::thread::scope(|scope| {
        // Before it happens: an agent that is about to judge its first XID may be slow to accept a new listener.
        let reported = scope.spawn(|| agent.wait_for_xid_by_nvml("0000:02:00", 48));
        let ill = scope.spawn(|| agent.wait_for_change("gpu.0000:02:00", "HEALTHY", "UNHEALTHY"));
        let job = host.job(&["--allow-inject"], &library);
        // GPU 1 is the first visible one of rank 0.
        let done = host.order(&["inject", "ecc", "--rank", "0"]);
        assert!(done.status.success(), "{done:?}");
        reported.join().unwrap();
        ill.join().unwrap();
        job
    });
    assert!(agent.status().contains("gpu.0000:01:00  HEALTHY"), "{}", agent.status());
    end(job);
}

#[test]
fn real_gpus_and_jobs_that_did_not_opt_in_are_left_alone() {
    let host = Host::new();
    let before = host.script();
    let refused = |job: Child, case: &str| {
        let output = host.order(&["inject", "ecc", "--rank", "0"]);
        let reported = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{reported}");
        let directory = host.directory.path().display().to_string();
        testing::snapshot!("gpu_drill", case, reported.replace(&directory, "DIRECTORY"));
        end(job);
        fs::remove_file(host.directory.path().join("up")).unwrap();
        // The next job has the same name.
        fs::remove_dir_all(host.directory.path().join("logs")).unwrap();
    };
    let library = host.directory.path().join(fake_devices::LIBRARY);
    refused(host.job(&[], &library), "a job that did not opt in");
    refused(host.job(&["--allow-inject"], Path::new("")), "a real GPU by default");
    refused(host.job(&["--allow-inject"], Path::new("/usr/lib/libnvidia-ml.so.1")), "a real GPU by path");
    assert_eq!(host.script(), before);
}
