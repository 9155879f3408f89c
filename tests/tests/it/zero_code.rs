//! Jobs whose ranks send no heartbeats: the launcher judges by the activity of their processes, late and with less
//! certainty.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use mainstay_hang::{HangKind, OUTPUT_LINES};
use mainstay_model::entry::{Body, Fact};
use mainstay_model::finding::FindingKind;
use mainstay_model::id::Rank;
use mainstay_model::verdict::Cause;
use mainstay_tests::{End, Stage, journal};

/// Three seconds of work with output, as training logs its steps.
const WORK: &str = "i=0; while [ $i -lt 60 ]; do sleep 0.05; echo step $i; i=$((i+1)); done";

/// Long enough that a launcher on a busy machine, which polls late and leaves out what it could not see, has seen
/// enough of it.
const LONG_WORK: &str = "i=0; while [ $i -lt 240 ]; do sleep 0.05; echo step $i; i=$((i+1)); done";

fn assert_not_judged(end: &End) {
    end.assert_status(0);
    assert!(!journal::facts(&end.journal).any(|fact| matches!(fact, Fact::RanksHung { .. })), "{end}");
}

#[test]
fn ranks_that_worked_and_do_nothing_any_more_are_started_again() {
    let stage = Stage::new();
    let script = format!("{WORK}; [ $ATTEMPT -gt 0 ] && exit 0; exec sleep 36000");
    let end = stage.sh(&script).ranks(3).options("--hang-limit idle=4s").start().end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert!(matches!(verdict.cause, Cause::Hang { hang: HangKind::AllStill, .. }), "{end}");
    assert!(!verdict.heartbeats && verdict.step.is_none() && verdict.confidence < 0.7, "{end}");
}

#[test]
fn a_stopped_rank_is_named_while_others_work() {
    let stage = Stage::new();
    let script = r#"
[ $ATTEMPT -gt 0 ] && exit 0
[ $RANK = 1 ] && kill -STOP $$
work
"#;
    let end = stage.sh(script).ranks(3).options("--hang-limit idle=3s").start().end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert_eq!(verdict.culprit, Some(Rank(1)), "{end}");
    assert!(matches!(verdict.cause, Cause::Hang { hang: HangKind::Stopped, .. }), "{end}");
}

#[test]
fn ranks_that_sleep_by_design_are_left_alone() {
    let stage = Stage::new();
    let end = stage.sh("sleep 8").ranks(2).options("--hang-limit idle=2s").start().end();
    assert_not_judged(&end);
}

#[test]
fn a_rank_that_sleeps_while_another_works_is_left_alone() {
    let stage = Stage::new();
    let script = format!(
        "{WORK}; [ $RANK = 0 ] && {{ sleep 6; mark over; exit 0; }}; until [ -e $MARKS/over ]; do sleep 0.05; done"
    );
    let end = stage.sh(&script).ranks(2).options("--hang-limit idle=2s").start().end();
    assert_not_judged(&end);
}

#[test]
fn a_hang_that_is_only_reported_passes_when_the_ranks_go_on() {
    let stage = Stage::new();
    let script = format!("mkfifo $MARKS/pipe; {LONG_WORK}; read line < $MARKS/pipe; {WORK}");
    let job = stage.sh(&script).options("--hang report --hang-limit idle=3s").start();
    job.wait_for_fact("the hang", |fact| matches!(fact, Fact::RanksHung { acts: false, .. }));
    job.wait_for_fact("evidence", |fact| matches!(fact, Fact::EvidenceTaken { file: Some(_), .. }));
    std::fs::write(stage.marks().join("pipe"), "on\n").expect("a word for the rank");
    job.wait_for_fact("its end", |fact| matches!(fact, Fact::HangPassed { .. }));
    let end = job.end();
    end.assert_status(0);
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
    assert!(end.run_dir.join("attempt_0/hang.json").exists(), "{end}");
}

/// What the first run learned, the second run knows before its first step.
#[test]
fn what_was_learned_is_kept_for_the_next_run_unless_it_is_to_be_forgotten() {
    let stage = Stage::new();
    let kept = || std::fs::read_dir(stage.logs().join(".learned")).map_or(0, Iterator::count);
    stage.sh("exit 0").options("--forget").start().end().assert_status(0);
    assert_eq!(kept(), 0);
    for _ in 0..2 {
        stage.sh("exit 0").start().end().assert_status(0);
        assert_eq!(kept(), 2, "what holds for runs of its size, and for runs of any");
    }
}

/// Two ranks, of which the first prints its steps, and waits from the sixtieth on.
#[test]
fn a_rank_that_prints_no_further_step_hangs_by_the_lines_of_its_output() {
    let stage = Stage::new();
    let script =
        format!("[ $ATTEMPT -gt 0 ] && exit 0; [ $RANK = 1 ] && exec sleep 36000; {WORK}; exec sleep 36000");
    let plan = stage.sh(&script).ranks(2).options("--hang-limit step=4s");
    let end = plan.variable("MAINSTAY_PROGRESS", r"^step (\d+)$").start().end();
    end.assert_status(0);
    let verdict = end.verdict();
    assert!(matches!(verdict.cause, Cause::Hang { .. }), "{end}");
    assert_eq!(verdict.step, Some(59), "{end}");
    assert!(verdict.confidence <= 0.7, "{end}");
    let connected: Vec<(Rank, String)> = journal::facts(&end.journal)
        .filter_map(|fact| match fact {
            Fact::RankConnected { rank, client, .. } => Some((*rank, client.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(connected, [(Rank(0), OUTPUT_LINES.to_owned())], "{end}");
}

#[test]
fn a_loss_that_is_printed_as_nan_is_a_finding() {
    let stage = Stage::new();
    let script = "i=0; until [ -e $MARKS/end ]; do sleep 0.02; i=$((i+1)); \
                  [ $i -lt 20 ] && echo step $i loss 2.5 || echo step $i loss nan; done";
    let plan = stage.sh(script).variable("MAINSTAY_PROGRESS", r"step (\d+) loss (?P<loss>\S+)");
    let job = plan.start();
    let found = job.wait_for("the finding", |entry| match &entry.body {
        Body::Finding(finding) if finding.what == FindingKind::NotANumber => Some(finding.step),
        _ => None,
    });
    stage.mark("end");
    assert_eq!(found, 20);
    job.end().assert_status(0);
}
