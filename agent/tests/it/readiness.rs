//! Restarts on hosts that are not ready: the real agent with a fake NVML library, the real launcher.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use support::Agent;
use testing::TempDir;

/// A host with one GPU, its agent, and room for a job.
struct Host {
    /// Dropped before its directory.
    agent: Agent,
    directory: TempDir,
}

impl Host {
    fn new() -> Host {
        let directory = testing::TempDir::named("ready-", testing::memory()).unwrap();
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

    /// Sets which processes hold the GPU, and how much memory.
    fn gpu(&self, processes: &[i32], used: u64) {
        write(self.at(), processes, used);
    }

    /// A rank that trains until it is killed, and exits with 0 in its second attempt.
    fn job(&self, options: &[&str]) -> Child {
        self.job_that_begins_with(":", options)
    }

    /// The same, which first runs a command: only in its first attempt, in the host's directory.
    fn job_that_begins_with(&self, first: &str, options: &[&str]) -> Child {
        let script = self.at().join("rank.sh");
        let at = self.at().display();
        let text = format!(
            "#!/bin/sh\n[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0\ncd {at}\n{first}\nwhile :; do sleep 0.05; done\n"
        );
        fs::write(&script, text).unwrap();
        Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args(["run", "--rdzv-id", "held", "--no-python", "--socket"])
            .arg(self.at().join("agent.sock"))
            .arg("--log-dir")
            .arg(self.at().join("logs"))
            .arg("--runtime-dir")
            .arg(self.at().join("runtime"))
            .args(options)
            .args(["/bin/sh".as_ref(), script.as_os_str()])
            .env("CUDA_VISIBLE_DEVICES", "0,1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The process of the job's rank in its first attempt, once the agent has seen it on the GPU.
    fn rank_on_the_gpu(&self) -> i32 {
        let pid = self.rank();
        self.gpu(&[pid], 9 << 30);
        self.wait_until_shown(pid);
        pid
    }

    /// The process of the job's rank in its first attempt.
    fn rank(&self) -> i32 {
        self.agent.wait_for("MASTER_PORT");
        let journal = self.journal();
        let started = journal.iter().find(|body| body["what"] == "attempt_started").unwrap();
        let pid = started.pointer("/ranks/0/pid").and_then(Value::as_i64).unwrap();
        i32::try_from(pid).unwrap()
    }

    /// What the rank wrote into a file with this name, once it has.
    fn written(&self, name: &str) -> String {
        for _ in 0..600 {
            // The command takes its time, so this loop does not spin.
            self.agent.ask(&["status"]);
            if let Some(text) =
                fs::read_to_string(self.at().join(name)).ok().filter(|text| text.ends_with('\n'))
            {
                return text.trim().to_owned();
            }
        }
        panic!("the rank never writes {name}");
    }

    /// The reason of the first decision to wait for the GPU that names this process.
    fn waits_for(&self, pid: i32) -> String {
        let waits = self.agent.wait_for_decision("wait", "host_not_ready", &pid.to_string());
        waits["why"].as_str().unwrap().replace(&pid.to_string(), "PID")
    }

    /// The bodies of the entries in the launcher's journal.
    fn journal(&self) -> Vec<Value> {
        let journal = fs::read_dir(self.at().join("logs/held/journal")).unwrap();
        let lines: String = journal.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
        // The last line may not be whole yet.
        let body = |line| Some(serde_json::from_str::<Value>(line).ok()?.get_mut("body")?.take());
        lines.lines().filter_map(body).collect()
    }

    /// Runs an order of a person for the job.
    fn order(&self, arguments: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        let socket = self.at().join("runtime/held/api.sock");
        let ordered = command.arg("job").args(arguments).args(["--reason", "so", "--socket"]).arg(socket);
        let ordered = ordered.output().unwrap();
        assert!(ordered.status.success(), "{ordered:?}");
    }

    /// Waits until the agent's next look shows the process.
    fn wait_until_shown(&self, pid: i32) {
        for _ in 0..600 {
            // By its place: the number may also be part of a time or size.
            let reported: Value =
                serde_json::from_str(&self.agent.ask(&["gpus", "--json"])).unwrap_or_default();
            if is_reported(&reported, pid) {
                return;
            }
            std::thread::yield_now();
        }
        panic!("the agent never shows process {pid} on the GPU");
    }
}

/// Whether a process with this number is anywhere in it.
fn is_reported(reported: &Value, pid: i32) -> bool {
    match reported {
        Value::Array(all) => all.iter().any(|one| is_reported(one, pid)),
        Value::Object(fields) => {
            fields.get("pid").and_then(Value::as_i64) == Some(pid.into())
                || fields.values().any(|field| is_reported(field, pid))
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

fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
}

/// What the launcher prints until it ends, and its exit status.
fn end(mut job: Child) -> (String, Option<i32>) {
    let mut printed = String::new();
    job.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    (printed, job.wait().unwrap().code())
}

/// Asserts that the job succeeds, and returns what its launcher printed.
fn succeeds(job: Child) -> String {
    let (printed, status) = end(job);
    assert_eq!(status, Some(0), "{printed}");
    printed
}

#[test]
fn a_restart_waits_until_the_gpus_memory_is_back() {
    let host = Host::new();
    let job = host.job(&[]);
    let pid = host.rank_on_the_gpu();
    // The process is gone at once; its memory is still held.
    host.gpu(&[], 9 << 30);
    kill(pid);
    host.agent.wait_for_decision("wait", "host_not_ready", "gpu.0000:01:00");
    host.gpu(&[], 0);
    succeeds(job);
    let decided: Vec<Value> = host.journal().into_iter().filter(|body| body["kind"] == "decision").collect();
    let last = decided.last().unwrap();
    assert_eq!((&last["rule"], &last["action"]["attempt"]), (&json!("restart"), &json!(1)), "{decided:#?}");
}

#[test]
fn a_gpu_that_stays_held_hands_the_job_back_with_its_own_exit_status() {
    let host = Host::new();
    let job = host.job(&["--ready-within", "200ms"]);
    let pid = host.rank_on_the_gpu();
    host.gpu(&[4711], 9 << 30);
    kill(pid);
    host.waits_for(4711);
    let (printed, status) = end(job);
    assert_eq!(status, Some(75), "{printed}");
    let journal = host.journal();
    let handed = journal.iter().find(|body| body["kind"] == "decision" && body["action"]["exit"] == 75);
    let handed = handed.unwrap_or_else(|| panic!("{journal:#?}"));
    assert_eq!(handed["rule"], "host_unfit", "{handed}");
    assert!(handed["why"].as_str().unwrap().contains(" 200 ms"), "{handed}");
}

#[test]
fn a_gpu_that_is_free_holds_up_nothing() {
    let host = Host::new();
    let job = host.job(&[]);
    let pid = host.rank_on_the_gpu();
    host.gpu(&[], 0);
    kill(pid);
    let printed = succeeds(job);
    // On a busy machine the launcher may wait for the driver, but not for the GPU.
    assert!(!printed.contains("gpu.0000:01:00"), "{printed}");
    assert!(host.journal().iter().any(|body| body["kind"] == "decision" && body["rule"] == "restart"));
}

#[test]
fn an_ordered_restart_waits_until_the_gpus_memory_is_free_too() {
    let host = Host::new();
    let job = host.job(&[]);
    host.rank_on_the_gpu();
    host.gpu(&[], 9 << 30);
    host.order(&["restart"]);
    let waits = host.agent.wait_for_observation("job.orders", "restart_waits");
    assert!(waits["detail"].as_str().unwrap().contains("gpu.0000:01:00"), "{waits}");
    host.gpu(&[], 0);
    succeeds(job);
}

#[test]
fn an_ordered_restart_does_not_wait_forever_and_on_a_free_gpu_not_at_all() {
    for (used, options, exit) in [(9 << 30, &["--ready-within", "200ms"][..], 75), (0, &[], 0)] {
        let host = Host::new();
        let job = host.job(options);
        host.rank_on_the_gpu();
        host.gpu(&[], used);
        host.order(&["restart"]);
        let (printed, status) = end(job);
        assert_eq!(status, Some(exit), "{printed}");
        let journal = host.journal();
        let waited = journal.iter().any(|body| body["event"] == "restart_waits");
        let handed = journal.iter().any(|body| body["kind"] == "decision" && body["action"]["exit"] == 75);
        assert_eq!((waited, handed), (used > 0, exit == 75), "{printed}\n{journal:#?}");
    }
}

#[test]
fn a_gpu_that_a_person_excludes_delays_nothing() {
    let host = Host::new();
    let job = host.job(&[]);
    let pid = host.rank_on_the_gpu();
    // It is excluded because it is unhealthy, and may never release anything.
    host.gpu(&[pid, 4711], 9 << 30);
    host.order(&["exclude-rank", "0"]);
    let printed = succeeds(job);
    assert!(!printed.contains("gpu.0000:01:00"), "{printed}");
}

/// A helper in a new session that ignores all signals except SIGKILL.
const WITH_HELPER: &str =
    "setsid sh -c 'trap \"\" TERM HUP INT; echo $$ > helper; while :; do sleep 0.05; done' &";

#[test]
fn a_process_that_a_rank_started_belongs_to_the_job_and_is_killed_and_waited_for() {
    let host = Host::new();
    let job = host.job_that_begins_with(WITH_HELPER, &[]);
    let (rank, helper) = (host.rank(), host.written("helper").parse().unwrap());
    // The rank itself uses no GPU.
    host.gpu(&[helper], 9 << 30);
    host.wait_until_shown(helper);
    kill(rank);
    testing::snapshot!("readiness", "held by a process of the job", host.waits_for(helper));
    assert!(!is_alive(helper), "it is gone before the host is looked at");
    host.gpu(&[], 0);
    succeeds(job);
}

#[test]
fn a_process_that_left_its_launcher_is_found_by_its_mark_and_killed() {
    let host = Host::new();
    let job = host.job_that_begins_with("echo $MAINSTAY_LAUNCH > launch", &[]);
    let (rank, launch) = (host.rank_on_the_gpu(), host.written("launch"));
    // As if another process had started it for a rank: it is no descendant of the launcher.
    let marks = [("MAINSTAY_JOB_ID", "held"), ("MAINSTAY_LAUNCH", launch.as_str())];
    let mut escaped = Command::new("sleep").arg("36000").envs(marks).spawn().unwrap();
    let pid = i32::try_from(escaped.id()).unwrap();
    host.gpu(&[rank, pid], 9 << 30);
    host.wait_until_shown(pid);
    host.gpu(&[pid], 1 << 20);
    kill(rank);
    // It would run for hours.
    assert_eq!(escaped.wait().unwrap().signal(), Some(9));
    host.gpu(&[], 0);
    succeeds(job);
}

#[test]
fn a_strangers_process_is_waited_for_and_left_alone() {
    let host = Host::new();
    let job = host.job(&[]);
    let rank = host.rank_on_the_gpu();
    let mut stranger = Command::new("sleep").arg("36000").spawn().unwrap();
    let pid = i32::try_from(stranger.id()).unwrap();
    host.gpu(&[pid], 9 << 30);
    kill(rank);
    testing::snapshot!("readiness", "held by a stranger", host.waits_for(pid));
    host.gpu(&[], 0);
    succeeds(job);
    assert_eq!(stranger.try_wait().unwrap(), None, "it lives");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

/// Whether the process exists and is no zombie.
fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}
