//! A rank without the client reports a lost peer only in its output.

use crate::support::job::Run;
use mainstay_model::entry::{Body, ExitStatus, Fact};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::verdict::{Cause, Verdict};
use mainstay_recovery::protocol::{Command, StopWhy};

/// The exit of a PyTorch rank with a process group: each line of its traceback starts with the rank.
fn exits_with(run: &mut Run, rank: u32, exception: &str) {
    let lines = [
        "Traceback (most recent call last):",
        "  File \"train.py\", line 7, in <module>",
        "    step()",
        exception,
    ];
    run.fact(Fact::RankExited {
        attempt: Attempt(0),
        rank: Rank(rank),
        pid: Pid(1),
        status: ExitStatus::Code(1),
        step: None,
        data: None,
        after_stop: false,
        stderr_tail: lines.map(|line| format!("[rank{rank}]: {line}")).to_vec(),
        stdout_tail: Vec::new(),
        stderr_times: Vec::new(),
        stdout_times: Vec::new(),
    });
}

fn verdict_of(run: &Run) -> Verdict {
    let verdict = run.bodies().into_iter().find_map(|body| match body {
        Body::Verdict(verdict) => Some(verdict.clone()),
        _ => None,
    });
    verdict.expect("a verdict")
}

#[test]
fn a_rank_whose_output_reports_a_lost_peer_is_a_victim_of_that_peer() {
    let mut run = Run::begin(3);
    run.start(0);
    exits_with(&mut run, 0, "RuntimeError: [pair.cc:544] Connection closed by peer [127.0.0.1]:20353");
    assert!(matches!(run.last_order(), Command::Wake { .. }), "{:?}", run.last_order());
    exits_with(&mut run, 1, "KeyError: 'labels'");
    assert_eq!(run.last_order(), &Command::stop(Attempt(0), StopWhy::Fault));
    run.ended(0);
    let verdict = verdict_of(&run);
    assert_eq!((verdict.culprit, &verdict.victims[..]), (Some(Rank(1)), &[Rank(0)][..]));
    assert!(
        matches!(&verdict.cause, Cause::Exception { exception, .. } if exception == "KeyError"),
        "{verdict:?}"
    );
}

#[test]
fn the_exit_of_a_rank_that_lost_a_peer_does_not_end_the_wait_for_the_peer() {
    let mut run = Run::begin(3);
    run.start(0);
    run.raise(0, 0, "[../gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:4711");
    run.exit(0, 0, ExitStatus::Code(1), false);
    assert!(matches!(run.last_order(), Command::Wake { .. }), "{:?}", run.last_order());
    run.exit(0, 1, ExitStatus::Code(3), false);
    run.ended(0);
    assert_eq!(verdict_of(&run).culprit, Some(Rank(1)));
}
