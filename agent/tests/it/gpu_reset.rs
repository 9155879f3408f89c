//! Resets of GPUs with the whole agent: NVIDIA's library and program are fakes, and so are the processes of the
//! host.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use support::Agent;
use testing::TempDir;

const GPU: &str = "gpu.0000:01:00";

/// A host with one GPU whose driver reports that it needs a reset.
struct Host {
    directory: TempDir,
}

impl Host {
    fn new() -> Host {
        let directory = testing::TempDir::named("reset-", testing::memory()).unwrap();
        let host = Host { directory };
        let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
        fs::copy(built, host.at(fake_devices::LIBRARY)).unwrap();
        fs::write(host.at("kmsg"), "").unwrap();
        let gpu = host.at("proc/driver/nvidia/gpus/0000:01:00.0");
        fs::create_dir_all(&gpu).unwrap();
        fs::write(gpu.join("information"), "Device Minor: \t 0\nGPU Excluded:\t No\n").unwrap();
        host.devices(fake_devices::SCRIPT, &[], 1);
        host.devices("after.json", &[], 0);
        host
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What the driver reports: processes on the GPU, and the action that the GPU needs.
    fn devices(&self, name: &str, processes: &[(i32, u64)], recovery_action: u64) {
        let gpu = json!({"uuid": "GPU-1", "pci": "00000000:01:00.0", "processes": processes,
                         "values": {"recovery_action": recovery_action}});
        fs::write(self.at("new"), json!({"driver": "570.1", "gpus": [gpu]}).to_string()).unwrap();
        fs::rename(self.at("new"), self.at(name)).unwrap();
    }

    /// A process that has a file open, as procfs shows it.
    fn process(&self, pid: i32, name: &str, file: &str) {
        let fd = self.at("proc").join(pid.to_string()).join("fd");
        fs::create_dir_all(&fd).unwrap();
        fs::write(fd.with_file_name("comm"), format!("{name}\n")).unwrap();
        symlink(file, fd.join("3")).unwrap();
    }

    /// The reset program; it records its arguments, and then runs this.
    fn nvidia_smi(&self, then: &str) {
        let (path, at) = (self.at("nvidia-smi"), self.directory.path().display().to_string());
        let text = format!("#!/bin/sh\ncd {at}\necho \"$@\" >> calls\n{then}\n");
        // In a child process: a program that one of our own processes has open for writing cannot be executed.
        let write = "printf '%s' \"$1\" > \"$2\" && chmod +x \"$2\"";
        let written = Command::new("/bin/sh").args(["-c", write, "sh", &text]).arg(path).status();
        assert!(written.unwrap().success());
    }

    fn agent(&self, mode: &str) -> Agent {
        self.agent_with(mode, "60s")
    }

    fn agent_with(&self, mode: &str, deadline: &str) -> Agent {
        let (library, log, proc) = (self.at(fake_devices::LIBRARY), self.at("kmsg"), self.at("proc"));
        let program = self.at("nvidia-smi");
        let settings: [(&str, &Path); 7] = [
            ("GPU_LIBRARY", &library),
            ("GPU_INTERVAL", "1s".as_ref()),
            ("KERNEL_LOG_PATH", &log),
            ("HOST_PROC_ROOT", &proc),
            ("GPU_RESET_MODE", mode.as_ref()),
            ("GPU_RESET_PROGRAM", &program),
            ("GPU_RESET_DEADLINE", deadline.as_ref()),
        ];
        let agent = Agent::start(self.directory.path(), &settings);
        agent.wait_until_in_state(GPU, "UNHEALTHY");
        agent
    }

    fn reset(&self) -> Output {
        self.mainstay(&["gpus", "reset", GPU, "--reason", "ticket 7"])
    }

    /// Tests the GPU with a fake of CUDA's library.
    fn deep_check(&self) -> Output {
        let built = std::env::current_exe().unwrap().with_file_name(fake_cuda::LIBRARY);
        fs::copy(built, self.at(fake_cuda::LIBRARY)).unwrap();
        fs::write(self.at(fake_cuda::SCRIPT), json!({"gpus": ["0000:01:00.0"]}).to_string()).unwrap();
        // It copies in this host's memory.
        let library = self.at(fake_devices::LIBRARY);
        let config = format!("[gpu]\nlibrary = {library:?}\n[limits.preflight]\ngpu_memory = \"1MiB\"\n");
        fs::write(self.at("check.toml"), config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(["check", "--deep", "--force", "--group", "gpu", "--deadline", "60s", "--cuda"]);
        command.arg(self.at(fake_cuda::LIBRARY)).arg("--config").arg(self.at("check.toml"));
        command.arg("--socket").arg(self.at("agent.sock")).output().unwrap()
    }

    fn mainstay(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(arguments).arg("--socket").arg(self.at("agent.sock")).output().unwrap()
    }

    /// The recorded calls of the program, one line each.
    fn calls(&self) -> String {
        fs::read_to_string(self.at("calls")).unwrap_or_default()
    }

    fn is_refused(&self, case: &str) {
        self.refuses(self.reset(), case);
    }

    /// Asserts that an order was refused, with the reason of the case.
    fn refuses(&self, output: Output, case: &str) {
        let reported = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{reported}");
        let directory = self.directory.path().display().to_string();
        testing::snapshot!("gpu_reset", case, reported.replace(&directory, "DIRECTORY"));
    }

    fn component(&self) -> Value {
        let status: Value = serde_json::from_slice(&self.mainstay(&["status", "--json"]).stdout).unwrap();
        let components = status["servers"][0]["node"]["components"].as_array().unwrap().clone();
        components.into_iter().find(|component| component["name"] == GPU).unwrap_or_default()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn an_idle_gpu_is_reset_and_healthy_once_it_was_tested_also_after_the_agents_next_start() {
    let host = Host::new();
    host.nvidia_smi("cp after.json next && mv next devices.json");
    // Other files, and the daemon that may stay.
    host.process(7, "nvidia-persiste", "/dev/nvidia0");
    host.process(8, "python", "/dev/nvidia1");
    let agent = host.agent("ordered");
    fs::write(host.at("kmsg"), "NVRM: Xid (PCI:0000:01:00): 48, pid=1, name=python, DBE\n").unwrap();
    agent.wait_for("XID 48");
    let output = host.reset();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(host.calls(), "--gpu-reset -i GPU-1\n");
    let started = agent.wait_for_observation(GPU, "gpu_reset_begun");
    assert_eq!((&started["values.by"], &started["values.reason"]), (&json!("user 0"), &json!("ticket 7")));
    assert_eq!(agent.wait_for_observation(GPU, "gpu_reset")["values.by"], "user 0");
    agent.wait_for_change(GPU, "UNHEALTHY", "DEGRADED");
    drop(agent);
    let library = host.at(fake_devices::LIBRARY);
    let settings: [(&str, &Path); 3] =
        [("GPU_LIBRARY", &library), ("KERNEL_LOG_PATH", "".as_ref()), ("GPU_INTERVAL", "1s".as_ref())];
    let again = Agent::start(host.directory.path(), &settings);
    again.wait_until_in_state(GPU, "DEGRADED");
    let tested = host.deep_check();
    again.wait_for_change(GPU, "DEGRADED", "HEALTHY");
    assert_eq!(host.component()["state"], "HEALTHY", "{tested:?} {}", host.component());
}

#[test]
fn a_gpu_that_is_in_use_is_not_reset() {
    let host = Host::new();
    host.nvidia_smi("cp after.json next && mv next devices.json");
    host.process(4711, "python", "/dev/nvidia0");
    let agent = host.agent("ordered");
    host.is_refused("a process has its device file open");
    let refused = agent.wait_for_observation(GPU, "gpu_reset_refused");
    testing::snapshot!("gpu_reset", "journal: a process has its device file open", text(&refused["detail"]));
    fs::remove_dir_all(host.at("proc/4711")).unwrap();
    host.devices(fake_devices::SCRIPT, &[(12, 1 << 30)], 1);
    host.is_refused("a process works on it");
    assert_eq!(host.calls(), "");
    assert_eq!(host.component()["state"], "UNHEALTHY");
}

#[test]
fn nothing_is_reset_without_permission_and_nothing_that_does_not_exist() {
    let host = Host::new();
    host.nvidia_smi("");
    let _agent = host.agent("off");
    host.is_refused("resets are off");
    let unknown = host.mainstay(&["gpus", "reset", "gpu.0000:09:00", "--reason", "ticket 7"]);
    host.refuses(unknown, "a GPU that is not there");
    let nameless = host.mainstay(&["gpus", "reset", GPU, "--reason", " "]);
    host.refuses(nameless, "no reason");
    assert_eq!(host.calls(), "");
}

#[test]
fn a_reset_that_does_not_help_is_reported_as_such() {
    let host = Host::new();
    host.nvidia_smi("echo GPU was successfully reset.");
    let agent = host.agent("ordered");
    host.is_refused("the reset did not help");
    assert_eq!(agent.wait_for_observation(GPU, "gpu_reset_failed")["values.by"], "user 0");
    assert_eq!(host.component()["state"], "UNHEALTHY");
}

#[test]
fn a_program_that_fails_hangs_or_is_missing_is_reported() {
    let host = Host::new();
    let _agent = host.agent_with("ordered", "300ms");
    host.is_refused("no program");
    host.nvidia_smi("echo 'GPU 0 is in use by another client.' >&2\nexit 19");
    host.is_refused("the program fails");
    host.nvidia_smi("sleep 1000");
    host.is_refused("the program hangs");
}

#[test]
fn the_agent_resets_what_needs_it_by_itself_only_where_it_may_and_only_once() {
    let host = Host::new();
    // It does not help: one attempt is enough.
    host.nvidia_smi("");
    let agent = host.agent("automatic");
    assert_eq!(agent.wait_for_observation(GPU, "gpu_reset_failed")["values.by"], "the agent");
    drop(agent);
    let agent = host.agent("automatic");
    agent.wait_for("18 NVLinks up");
    assert_eq!(host.calls(), "--gpu-reset -i GPU-1\n");
}

#[test]
fn the_agent_leaves_a_gpu_alone_that_is_in_use() {
    let host = Host::new();
    host.nvidia_smi("cp after.json next && mv next devices.json");
    host.process(4711, "python", "/dev/nvidia0");
    let agent = host.agent("automatic");
    let refused = agent.wait_for_observation(GPU, "gpu_reset_refused");
    assert_eq!(refused["values.by"], "the agent");
    testing::snapshot!("gpu_reset", "journal: the agent leaves a GPU in use alone", text(&refused["detail"]));
    assert_eq!(host.calls(), "");
}

#[test]
fn nothing_is_reset_under_a_running_job() {
    let host = Host::new();
    host.nvidia_smi("");
    let agent = host.agent("ordered");
    let mut job = Command::new(env!("CARGO_BIN_EXE_mainstay"))
        .args(["run", "--rdzv-id", "trains", "--no-python", "--socket"])
        .arg(host.at("agent.sock"))
        .arg("--log-dir")
        .arg(host.at("logs"))
        .arg("--runtime-dir")
        .arg(host.at("runtime"))
        .args(["/bin/sh", "-c", "while :; do sleep 0.05; done"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    agent.wait_for("MASTER_PORT");
    host.is_refused("a job runs");
    assert_eq!(host.calls(), "");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(job.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    job.wait().unwrap();
}
