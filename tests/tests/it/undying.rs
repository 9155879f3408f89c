//! Ranks that SIGKILL does not end, as in a driver or file system that hangs. Here the kernel's v1 freezer holds
//! them, which only root can use.
#![allow(clippy::expect_used, reason = "a panic in a test is its report")]

use std::fs;
use std::path::PathBuf;

use mainstay_model::entry::Body;
use mainstay_model::verdict::{Action, Decision, Rule};
use mainstay_tests::{Job, Stage, is_root, skipped};

const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// Processes that cannot run, not even to die.
struct Frozen(PathBuf);

impl Frozen {
    /// None if processes cannot be frozen this way.
    fn new(name: &str) -> Option<Frozen> {
        if !is_root() || !PathBuf::from(FREEZER).join("cgroup.procs").exists() {
            skipped("no freezer of the first kind, or not root");
            return None;
        }
        let frozen = Frozen(PathBuf::from(FREEZER).join(format!("mainstay-{}-{name}", std::process::id())));
        fs::create_dir(&frozen.0).expect("a group");
        Some(frozen)
    }

    fn hold(&self, pid: i32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("a member");
        self.set("FROZEN");
    }

    fn set(&self, state: &str) {
        fs::write(self.0.join("freezer.state"), state).expect("a state");
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        let empty =
            || fs::read_to_string(self.0.join("cgroup.procs")).is_ok_and(|members| members.is_empty());
        mainstay_tests::processes::wait_until("the frozen to be gone", empty);
        let _ = fs::remove_dir(&self.0);
    }
}

/// Two ranks, of which the second does not die and the first is killed.
fn with_one_that_does_not_die(stage: &Stage, frozen: &Frozen, options: &str) -> Job {
    let script =
        "mark(f'up.{ATTEMPT}.{RANK}', __import__('os').getpid())\nif ATTEMPT == 0:\n    wait_for('never')\n";
    let job =
        stage.python(script).ranks(2).options("--fault-timeout 100ms --no-warm").options(options).start();
    job.mark("up.0.0");
    frozen.hold(job.mark("up.0.1").parse().expect("a pid"));
    job.kill_rank(0, 0);
    job.wait_for("a wait for the process", |entry| match &entry.body {
        Body::Decision(Decision { action: Action::Wait, rule: Rule::HostNotReady, .. }) => Some(()),
        _ => None,
    });
    job
}

#[test]
fn a_rank_that_does_not_die_is_not_waited_for_forever() {
    let Some(frozen) = Frozen::new("ever") else { return };
    let stage = Stage::new();
    let job = with_one_that_does_not_die(&stage, &frozen, "--ready-within 1s");
    job.wait_for("the end of the wait", |entry| match &entry.body {
        Body::Decision(decision) if decision.action == Action::HandBack { exit: 75 } => Some(()),
        _ => None,
    });
    frozen.set("THAWED");
    job.end().assert_status(75);
}

#[test]
fn a_rank_that_dies_late_is_waited_for_and_the_job_goes_on() {
    let Some(frozen) = Frozen::new("late") else { return };
    let stage = Stage::new();
    let job = with_one_that_does_not_die(&stage, &frozen, "--ready-within 10m");
    frozen.set("THAWED");
    job.mark("up.1.1");
    job.end().assert_status(0);
}
