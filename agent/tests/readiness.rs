//! Restarts on hosts that are not ready for one: the real agent over a library in NVML's place, the real launcher.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use support::Agent;
use tempfile::TempDir;

/// A host with one GPU, its agent, and room for a job.
struct Host {
    directory: TempDir,
    agent: Agent,
}

impl Host {
    fn new() -> Host {
        let directory = tempfile::Builder::new().prefix("ready-").tempdir_in("/dev/shm").unwrap();
        let at = directory.path();
        let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
        let library = at.join(fake_devices::LIBRARY);
        fs::copy(built, &library).unwrap();
        write(at, &[], 0);
        let sample = PathBuf::from("1s");
        let nothing = Path::new("");
        let agent = Agent::start(
            at,
            &[("GPU_LIBRARY", &library), ("GPU_INTERVAL", &sample), ("KERNEL_LOG_PATH", nothing)],
        );
        Host { directory, agent }
    }

    fn at(&self) -> &Path {
        self.directory.path()
    }

    /// Which processes hold the GPU, with what memory, from now on.
    fn gpu(&self, processes: &[i32], used: u64) {
        write(self.at(), processes, used);
    }

    /// A rank that trains until it is killed, and ends well in its second attempt.
    fn job(&self, options: &[&str]) -> Child {
        let script = self.at().join("rank.sh");
        fs::write(
            &script,
            "#!/bin/sh\n[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0\nwhile :; do sleep 0.05; done\n",
        )
        .unwrap();
        Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args(["run", "--rdzv-id", "held", "--no-python", "--socket"])
            .arg(self.at().join("agent.sock"))
            .arg("--log-dir")
            .arg(self.at().join("logs"))
            .arg("--runtime-dir")
            .arg(self.at().join("runtime"))
            .args(options)
            .args(["/bin/sh".as_ref(), script.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The process of the job's rank in its first attempt, once the agent has seen it on the GPU.
    fn rank_on_the_gpu(&self) -> i32 {
        self.agent.wait_for("MASTER_PORT");
        let journal = fs::read_dir(self.at().join("logs/held/journal")).unwrap();
        let lines: String = journal.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
        let started = lines.lines().find(|line| line.contains("\"attempt_started\"")).unwrap();
        let started: Value = serde_json::from_str(started).unwrap();
        let pid = started.pointer("/body/ranks/0/pid").and_then(Value::as_i64).unwrap();
        let pid = i32::try_from(pid).unwrap();
        self.gpu(&[pid], 9 << 30);
        self.wait_until_shown(pid);
        pid
    }

    /// The agent's next look has seen the process.
    fn wait_until_shown(&self, pid: i32) {
        for _ in 0..600 {
            // By its place: the number may stand in any time or size too.
            let told: Value = serde_json::from_str(&self.agent.ask(&["gpus", "--json"])).unwrap_or_default();
            if is_told_of(&told, pid) {
                return;
            }
            std::thread::yield_now();
        }
        panic!("the agent never shows process {pid} on the GPU");
    }
}

/// Whether a process of this number is told of anywhere in it.
fn is_told_of(told: &Value, pid: i32) -> bool {
    match told {
        Value::Array(all) => all.iter().any(|one| is_told_of(one, pid)),
        Value::Object(fields) => {
            fields.get("pid").and_then(Value::as_i64) == Some(pid.into())
                || fields.values().any(|field| is_told_of(field, pid))
        }
        _ => false,
    }
}

fn write(directory: &Path, processes: &[i32], used: u64) {
    let processes: Vec<Value> = processes.iter().map(|pid| json!([pid, used])).collect();
    let gpu = json!({"uuid": "GPU-1", "pci": "00000000:01:00.0", "processes": processes,
                     "values": {"memory_used": used}});
    let beside = directory.join("devices.new");
    fs::write(&beside, json!({"driver": "550.54.15", "gpus": [gpu]}).to_string()).unwrap();
    fs::rename(beside, directory.join(fake_devices::SCRIPT)).unwrap();
}

/// Kills the rank and reads what the launcher says until a line has these words.
fn kill_and_read_until(
    job: &mut Child,
    pid: i32,
    words: &str,
) -> (Vec<String>, impl Iterator<Item = String> + use<>) {
    let mut said = BufReader::new(job.stderr.take().unwrap()).lines().map(Result::unwrap);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    let mut lines = Vec::new();
    loop {
        let line = said.next().unwrap_or_else(|| panic!("never said {words:?}: {lines:#?}"));
        let found = line.contains(words);
        lines.push(line);
        if found {
            return (lines, said);
        }
    }
}

#[test]
fn a_restart_waits_until_the_gpus_memory_is_back() {
    let host = Host::new();
    let mut job = host.job(&[]);
    let pid = host.rank_on_the_gpu();
    // The process is gone at once, its memory is not.
    host.gpu(&[], 9 << 30);
    let (_, rest) =
        kill_and_read_until(&mut job, pid, "waiting: this host is not ready for a restart: gpu.0000:01:00");
    host.gpu(&[], 0);
    let rest: Vec<String> = rest.collect();
    assert!(job.wait().unwrap().success(), "{rest:#?}");
    assert!(rest.iter().any(|line| line.contains("restart 1 of 3")), "{rest:#?}");
}

#[test]
fn a_gpu_that_somebody_keeps_is_handed_back_with_its_own_exit_status() {
    let host = Host::new();
    let mut job = host.job(&["--ready-within", "200ms"]);
    let pid = host.rank_on_the_gpu();
    host.gpu(&[4711], 9 << 30);
    let (_, rest) = kill_and_read_until(&mut job, pid, "in use by process 4711");
    let rest: Vec<String> = rest.collect();
    assert_eq!(job.wait().unwrap().code(), Some(75), "{rest:#?}");
    let handed =
        "handing the job back to the scheduler with exit status 75: this host was not ready within 200 ms";
    assert!(rest.iter().any(|line| line.contains(handed)), "{rest:#?}");
}

#[test]
fn a_gpu_that_is_free_holds_up_nothing() {
    let host = Host::new();
    let mut job = host.job(&[]);
    let pid = host.rank_on_the_gpu();
    host.gpu(&[], 0);
    let (lines, rest) = kill_and_read_until(&mut job, pid, "restart 1 of 3");
    assert!(!lines.iter().any(|line| line.contains("waiting")), "{lines:#?}");
    let rest: Vec<String> = rest.collect();
    assert!(job.wait().unwrap().success(), "{rest:#?}");
}
