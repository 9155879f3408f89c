//! Rounds in which some ranks stay in their processes, on GPUs: the real agent with a simulated NVML library.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use mainstay_model::entry::{Body, Fact};
use mainstay_model::verdict::{Action, FaultDomain};
use mainstay_tests::{Agent, End, Job, Stage, has_client, journal, mainstay, processes};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// Two ranks with a GPU each. The first attempt lasts until one of them fails.
const TRAINING: &str = r#"
import mainstay
def train():
    round = int(os.environ["MAINSTAY_ATTEMPT"])
    mark(f"in.{round}.{RANK}", os.getpid())
    while round == 0:
        time.sleep(0.01)
mainstay.restartable(train)()
"#;

/// A rank that waits until it is killed.
const STANDING: &str = r#"
mark(os.environ["WHICH"], os.getpid())
while True:
    time.sleep(0.01)
"#;

/// The host of a job: two GPUs, and an agent that reads them.
pub(super) struct Host {
    stage: Stage,
}

impl Host {
    fn new() -> (Host, Agent) {
        Host::with(&[])
    }

    /// With more variables in the environment of the agent.
    pub(super) fn with(variables: &[String]) -> (Host, Agent) {
        let host = Host { stage: Stage::new() };
        let built = std::env::current_exe().expect("our own file").with_file_name(fake_devices::LIBRARY);
        let library = host.stage.tmpfs().join(fake_devices::LIBRARY);
        fs::write(host.kernel_log(), "").expect("a kernel log of our own");
        fs::copy(built, &library).expect("the library of the tests");
        host.gpus([(&[], 0), (&[], 0)]);
        let settings = [
            format!("MAINSTAY_AGENT_GPU_LIBRARY={}", library.display()),
            "MAINSTAY_AGENT_GPU_INTERVAL=1s".to_owned(),
            format!("MAINSTAY_AGENT_KERNEL_LOG_PATH={}", host.kernel_log().display()),
        ];
        let mut line = vec!["env".to_owned()];
        line.extend(settings);
        line.extend_from_slice(variables);
        line.push(mainstay().display().to_string());
        let agent = Agent::start_under(&line, &host.stage);
        (host, agent)
    }

    pub(super) fn stage(&self) -> &Stage {
        &self.stage
    }

    fn kernel_log(&self) -> PathBuf {
        self.stage.work().join("kmsg")
    }

    /// The kernel log reports that the second GPU is lost; it does not name the process.
    fn loses_the_second_gpu(&self, agent: &Agent) {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
        let microseconds = now.tv_sec() * 1_000_000 + now.tv_nsec() / 1_000;
        let printed =
            "NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
        fs::write(self.kernel_log(), format!("4,1,{microseconds},-;{printed}\n")).expect("the kernel writes");
        agent.wait_for("the XID", |entry| matches!(&entry.body, Body::Fact(Fact::Xid(_))).then_some(()));
    }

    /// A job of one rank that waits until it is killed.
    fn standing(&self, agent: &Agent, name: &str) -> (Job, i32) {
        let plan = self.stage.python(STANDING).ranks(1).options("--max-restarts 0").variable("WHICH", name);
        let job = plan.with(agent).start();
        let pid = job.marked_pid(name);
        (job, pid)
    }

    /// Sets the processes on each GPU, and how much of its memory is in use, from now on.
    fn gpus(&self, of: [(&[i32], u64); 2]) {
        let gpu = |(number, (processes, used)): (usize, (&[i32], u64))| {
            let processes: Vec<Value> = processes.iter().map(|pid| json!([pid, used])).collect();
            json!({"uuid": format!("GPU-{number}"), "pci": format!("00000000:0{}:00.0", number + 1),
                   "processes": processes, "values": {"memory_used": used}})
        };
        let gpus: Vec<Value> = of.into_iter().enumerate().map(gpu).collect();
        let (aside, script) = ("devices.new", self.stage.tmpfs().join(fake_devices::SCRIPT));
        let aside = self.stage.tmpfs().join(aside);
        fs::write(&aside, json!({"driver": "550.54.15", "gpus": gpus}).to_string()).expect("a script");
        fs::rename(aside, script).expect("in its place");
    }

    /// The agent's next reading has seen both processes.
    fn wait_until_shown(&self, agent: &Agent, pids: [i32; 2]) {
        processes::wait_until("the agent to show both ranks on their GPUs", || {
            let mut command = Command::new(mainstay());
            let reported = command.args(["gpus", "--json", "--socket"]).arg(agent.socket()).output();
            let reported: Value =
                serde_json::from_slice(&reported.expect("an answer").stdout).unwrap_or_default();
            pids.iter().all(|pid| is_reported(&reported, *pid))
        });
    }

    /// A job whose ranks are on their GPUs, with their processes.
    fn job(&self, agent: &Agent) -> (Job, [i32; 2]) {
        let job = self.stage.python(TRAINING).ranks(2).options("--fault-timeout 100s").with(agent).start();
        let pids = [0, 1].map(|rank| job.marked_pid(&format!("in.0.{rank}")));
        self.gpus([(&[pids[0]], 9 << 30), (&[pids[1]], 9 << 30)]);
        self.wait_until_shown(agent, pids);
        (job, pids)
    }
}

/// Whether the document contains this process id anywhere.
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

fn went_on_with(end: &End, pids: [i32; 2]) {
    end.assert_status(0);
    let of_the_next = journal::facts(&end.journal).filter_map(|fact| match fact {
        Fact::AttemptStarted { attempt, ranks, .. } if attempt.0 == 1 => Some(ranks.clone()),
        _ => None,
    });
    let ranks = of_the_next.last().expect("a second attempt");
    assert_eq!(ranks[0].pid.0, pids[0], "the one that stayed goes on in its process\n{end}");
    assert_ne!(ranks[1].pid.0, pids[1], "{end}");
}

#[test]
fn a_round_waits_for_the_gpu_of_the_lost_rank_and_not_for_those_of_ranks_that_stay() {
    if !has_client() {
        return;
    }
    let (host, agent) = Host::new();
    let (job, pids) = host.job(&agent);
    // The process ends at once, its memory is not freed yet.
    host.gpus([(&[pids[0]], 9 << 30), (&[], 9 << 30)]);
    job.kill_rank(0, 1);
    job.wait_for("a wait for the GPU", |entry| match &entry.body {
        Body::Decision(decision) if decision.action == Action::Wait => Some(()),
        _ => None,
    });
    host.gpus([(&[pids[0]], 9 << 30), (&[], 0)]);
    job.mark("in.1.1");
    let end = job.end();
    went_on_with(&end, pids);
    let decisions = journal::decisions(&end.journal);
    let last = decisions.last().expect("a decision");
    assert!(matches!(last.action, Action::RespawnRanks { .. }), "{end}");
    assert!(decisions.iter().all(|decision| !decision.why.contains("gpu.0000:01:00")), "{end}");
}

#[test]
fn a_round_whose_lost_ranks_gpu_is_free_waits_for_nothing() {
    if !has_client() {
        return;
    }
    let (host, agent) = Host::new();
    let (job, pids) = host.job(&agent);
    // The rank that stays also uses the GPU of the lost one, and a new process uses its own.
    host.gpus([(&[pids[0], 4711], 9 << 30), (&[pids[0]], 1 << 30)]);
    job.kill_rank(0, 1);
    job.mark("in.1.1");
    let end = job.end();
    went_on_with(&end, pids);
    let decisions = journal::decisions(&end.journal);
    // On a busy machine the launcher may wait for the driver, but not for a GPU.
    assert!(decisions.iter().all(|decision| !decision.why.contains("gpu.0000")), "{end}");
}

#[test]
fn of_two_jobs_on_a_host_only_the_one_whose_gpu_is_lost_fails_of_it() {
    let (host, agent) = Host::new();
    let (first, of_first) = host.standing(&agent, "first");
    let (second, of_second) = host.standing(&agent, "second");
    host.gpus([(&[of_first], 9 << 30), (&[of_second], 9 << 30)]);
    host.wait_until_shown(&agent, [of_first, of_second]);
    host.loses_the_second_gpu(&agent);
    let last = |job: Job| {
        job.wait_for_fact("the agent", |fact| matches!(fact, Fact::AgentFound { .. }));
        job.kill_rank(0, 0);
        let end = job.end();
        let verdict = journal::verdicts(&end.journal).pop().expect("a verdict").clone();
        let is_lost = verdict.evidence.iter().any(|printed| printed.contains("79"));
        (verdict.domain, is_lost, end)
    };
    let (domain, is_lost, end) = last(first);
    assert!(domain != FaultDomain::Hardware && !is_lost, "its own GPU is well\n{end}");
    let (domain, is_lost, end) = last(second);
    assert!(domain == FaultDomain::Hardware && is_lost, "{end}");
}

#[test]
fn a_line_of_the_kernel_that_comes_when_the_job_has_ended_changes_its_verdict() {
    let (host, agent) = Host::new();
    let job = host.stage.sh("kill -9 $$").ranks(1).options("--max-restarts 0").with(&agent).start();
    let id = job.id().to_owned();
    let end = job.end();
    assert_ne!(journal::verdicts(&end.journal)[0].domain, FaultDomain::Hardware, "{end}");
    agent.wait_for_fact(&id, "its end", |fact| matches!(fact, Fact::JobEnded { .. }));
    host.loses_the_second_gpu(&agent);
    let verdict = agent.wait_for("another verdict", |entry| match &entry.body {
        Body::Verdict(verdict) if verdict.domain == FaultDomain::Hardware => Some(verdict.clone()),
        _ => None,
    });
    assert!(verdict.evidence.iter().any(|line| line.contains("79")), "{:?}", verdict.evidence);
    // The agent reports it to a caller.
    let mut asked = Command::new(mainstay());
    let reported = asked.args(["explain", &id, "--socket"]).arg(agent.socket()).output().expect("an answer");
    let reported = String::from_utf8_lossy(&reported.stdout).into_owned();
    assert!(reported.contains("79") && reported.contains("hardware"), "{reported}");
}
