//! What counts as progress between failures, and what the runs of a job learn about restarts for the next run.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use crate::support;

use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Span;
use mainstay_progress::memory::JobMemory;
use mainstay_recovery::policy::{CauseKind, Rung};
use mainstay_recovery::protocol::{Command, Event};
use support::job::Run;

/// Reports that all ranks saved a step and that it is sealed.
fn saved(run: &mut Run, attempt: u32, step: u64) {
    let shards = vec![(Rank(0), vec![1]), (Rank(1), vec![2])];
    run.report(Event::Saved { attempt: Attempt(attempt), step, shards });
}

/// One attempt over these steps, which then loses a rank. Returns whether the job continues.
fn fails_after(
    run: &mut Run,
    attempt: u32,
    steps: std::ops::RangeInclusive<u64>,
    saves: Option<u64>,
) -> bool {
    run.start(attempt);
    run.steps(attempt, steps);
    if let Some(step) = saves {
        saved(run, attempt, step);
    }
    run.crash_and_decide(attempt);
    if let Command::Wake { .. } = run.last_order() {
        run.wait(Span::seconds(600));
    }
    matches!(run.last_order(), Command::Start { .. })
}

#[test]
fn an_attempt_without_a_newer_checkpoint_is_no_progress_in_spite_of_new_steps() {
    let mut run = Run::begin(100);
    assert!(fails_after(&mut run, 0, 1..=17, Some(10)));
    let went_on: Vec<bool> =
        (1..4).map(|attempt| fails_after(&mut run, attempt, 11..=17 + u64::from(attempt), None)).collect();
    assert_eq!(went_on, [true, true, false]);
    let reason = run.job.summary(mainstay_model::time::Mono(run.now)).reason;
    testing::snapshot!(
        "reasons",
        "job_progress: an attempt without a newer checkpoint is no progress in spite of new steps",
        reason
    );
}

#[test]
fn each_newer_checkpoint_is_progress_even_if_sealed_after_its_attempt() {
    let mut run = Run::begin(100);
    for attempt in 0..8_u32 {
        let saved_before = u64::from(attempt) * 10;
        assert!(fails_after(&mut run, attempt, saved_before + 1..=saved_before + 15, None), "{attempt}");
        saved(&mut run, attempt, saved_before + 10);
    }
}

#[test]
fn steps_are_the_progress_of_a_job_that_does_not_resume_from_saves_here() {
    let mut run = Run::begin(100);
    for attempt in 0..8_u32 {
        assert!(fails_after(&mut run, attempt, 1..=10 + u64::from(attempt), None), "{attempt}");
    }
    // It saved here once, for example by order, and resumes from its own files.
    let mut run = Run::begin(100);
    assert!(fails_after(&mut run, 0, 1..=40, Some(10)));
    for attempt in 1..8_u32 {
        let begin = u64::from(attempt) * 30;
        assert!(fails_after(&mut run, attempt, begin..=begin + 40, None), "{attempt}");
    }
}

#[test]
fn a_run_knows_which_rungs_helped_in_earlier_runs() {
    let mut first = Run::begin(100);
    for attempt in 0..3_u32 {
        let begin = u64::from(attempt) * 10;
        assert!(fails_after(&mut first, attempt, begin + 1..=begin + 10, None));
    }
    first.start(3);
    let mut learned = JobMemory::default();
    first.job.remember(&mut learned);
    let reported: Vec<_> =
        learned.rungs.iter().map(|known| (known.cause, known.rung, known.tried, known.helped)).collect();
    // The outcome of the third restart is open.
    assert_eq!(reported, [(CauseKind::Signal, Rung::All, 2.0, 2.0)]);
    let mut second = Run::begin(100);
    second.job.recall(&JobMemory::parse(&learned.clone().written()).expect("the written form parses"));
    let mut again = JobMemory::default();
    second.job.remember(&mut again);
    assert_eq!(again.rungs, learned.rungs, "a run without failures forgets nothing");
}
