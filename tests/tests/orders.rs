//! What people order for a job: who may, what is done, and what the journal keeps of it.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::process::{Command, Output};

use mainstay_core::entry::Fact;
use mainstay_tests::{End, Job, Stage, mainstay, story};

/// Ranks that work until they are told to end.
const WORKS: &str = r#"trap 'exit 0' TERM
mark "up.$ATTEMPT.$RANK"
work"#;

fn order(job: &Job, arguments: &[&str]) -> Output {
    let mut command = Command::new(mainstay());
    command.args(arguments).arg("--socket").arg(job.socket());
    command.output().expect("mainstay can be started")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn ordered(end: &End, event: &str) -> usize {
    let is = |fact: &&Fact| matches!(fact, Fact::Observed(seen) if seen.event == event);
    story::facts(&end.story).filter(is).count()
}

#[test]
fn a_restart_that_is_ordered_is_no_failure_and_a_stop_ends_the_job() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).ranks(2).options("--max-restarts 0").start();
    job.mark("up.0.0");
    job.mark("up.0.1");
    let restarted = order(&job, &["job", "restart", "--reason", "new settings"]);
    assert!(restarted.status.success(), "{}", said(&restarted));
    job.mark("up.1.0");
    job.mark("up.1.1");
    let stopped = order(&job, &["job", "stop", "--reason", "enough"]);
    assert!(stopped.status.success(), "{}", said(&stopped));
    let end = job.end();
    end.assert_status(143);
    assert_eq!(story::verdicts(&end.story).len(), 0, "{end}");
    assert_eq!((ordered(&end, "restart_ordered"), ordered(&end, "stop_ordered")), (1, 1), "{end}");
    end.assert_said("(enough): stopping the ranks");
}

#[test]
fn faults_are_injected_only_into_jobs_that_opted_in() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).start();
    job.mark("up.0.0");
    let refused = order(&job, &["inject", "kill", "--rank", "0", "--reason", "drill"]);
    assert_eq!(refused.status.code(), Some(3));
    assert!(said(&refused).contains("--allow-inject"), "{}", said(&refused));
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    end.assert_status(143);
    assert_eq!(ordered(&end, "fault_injected"), 0, "{end}");
}

#[test]
fn an_injected_kill_is_judged_as_any_other_and_the_journal_has_who_did_it() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).ranks(2).options("--allow-inject").start();
    job.mark("up.0.1");
    let no_rank = order(&job, &["inject", "kill", "--rank", "7", "--reason", "drill"]);
    assert!(said(&no_rank).contains("rank 7 does not run"), "{}", said(&no_rank));
    let killed = order(&job, &["inject", "kill", "--rank", "1", "--reason", "drill"]);
    assert!(killed.status.success(), "{}", said(&killed));
    job.mark("up.1.0");
    job.mark("up.1.1");
    order(&job, &["job", "stop", "--reason", "enough"]);
    let end = job.end();
    end.assert_status(143);
    let kind = |fact: &Fact| match fact {
        Fact::Observed(seen) if seen.event == "fault_injected" => Some("injected"),
        Fact::RankExited { after_stop: false, .. } => Some("exited"),
        _ => None,
    };
    let told: Vec<&str> = story::facts(&end.story).filter_map(kind).collect();
    assert_eq!(told[..2], ["injected", "exited"], "{end}");
}

#[test]
fn an_order_without_a_reason_is_refused() {
    let stage = Stage::new();
    let job = stage.sh(WORKS).start();
    job.mark("up.0.0");
    let refused = order(&job, &["job", "stop", "--reason", " "]);
    assert_eq!(refused.status.code(), Some(3));
    assert!(said(&refused).contains("say why"), "{}", said(&refused));
    order(&job, &["job", "stop", "--reason", "enough"]);
    job.end().assert_status(143);
}

#[test]
fn a_dry_run_says_what_would_be_done_and_ends() {
    let stage = Stage::new();
    let end = stage.sh("kill -9 $$").options("--dry-run").start().end();
    end.assert_status(137);
    end.assert_said("dry run; it would be restarting all ranks");
    assert_eq!(end.summary().attempts, 1, "{end}");
}
