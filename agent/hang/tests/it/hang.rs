//! The hang judge on a simulated job: each kind of hang is detected in time and attributed to the right rank.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_hang::{Count, HangKind, HangStatus, Limits, OUTPUT_LINES, PhaseId, ProcessState, RankSample};
use mainstay_model::id::Rank;
use mainstay_model::time::Span;
use support::hang::{Job, LOOK, RANKS, computes_by_itself};

#[test]
fn a_rank_that_falls_behind_is_the_culprit_within_two_seconds() {
    let mut job = Job::trained(100);
    for rank in (0..RANKS).filter(|rank| *rank != 3) {
        job.step_of(rank, 100);
    }
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::UserCode, &[Rank(3)][..]));
    assert_eq!(hang.victims.len(), RANKS - 1);
    assert_eq!(hang.step, Some(99));
    testing::snapshot!(
        "reasons",
        "hang: a rank that falls behind is the culprit within two seconds",
        hang.headline()
    );
}

#[test]
fn counters_name_the_rank_that_never_enters_a_collective() {
    let mut job = Job::trained(100);
    for rank in 0..RANKS {
        let entered = if rank == 5 { 40 } else { 41 };
        job.counts[rank] = vec![Count { comm: 77, entered, completed: 40, signature: 0 }];
    }
    let (hang, _) = job.hangs(Span::seconds(60));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::UserCode, &[Rank(5)][..]));
    assert!(hang.confidence > 0.9);
}

#[test]
fn a_collective_that_all_ranks_entered_is_a_network_hang_after_a_longer_limit() {
    let mut job = Job::trained(100);
    for rank in 0..RANKS {
        job.counts[rank] = vec![Count { comm: 77, entered: 41, completed: 40, signature: 0 }];
    }
    job.is_calm_for(Span::seconds(25));
    let (hang, _) = job.hangs(Span::seconds(10));
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::Network, 0));
}

#[test]
fn a_rank_in_its_data_loader_is_a_data_input_hang_if_all_are_at_the_same_step() {
    let mut job = Job::trained(100);
    for step in 100..160 {
        let data = job.watch.phases().section("data");
        job.watch.phases().learn(data, step, Span::millis(20));
    }
    for rank in 0..RANKS {
        job.enter(rank, if rank == 2 { "data" } else { "forward" });
    }
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::DataInput, &[Rank(2)][..]));
}

#[test]
fn a_stopped_process_is_the_culprit() {
    let mut job = Job::trained(100);
    job.all_still();
    job.probes[6].as_mut().expect("set").state = ProcessState::Stopped;
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::Stopped, &[Rank(6)][..]));
}

#[test]
fn a_process_stopped_before_anything_was_learned_is_reported_in_seconds_and_hung_after_thirty() {
    let mut job = Job::started(Limits::default());
    job.enter(6, "evaluation");
    job.all_still();
    job.probes[6].as_mut().expect("set").state = ProcessState::Stopped;
    job.is_calm_for(Span::seconds(3));
    assert!(matches!(job.look(), HangStatus::Stopped(found) if found.ranks == [Rank(6)]));
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(30), "{took}");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::Stopped, &[Rank(6)][..]));
}

#[test]
fn a_stopped_process_that_is_resumed_in_time_is_no_hang() {
    let mut job = Job::started(Limits::default());
    job.all_still();
    job.probes[6].as_mut().expect("set").state = ProcessState::Stopped;
    job.is_calm_for(Span::seconds(25));
    job.probes[6].as_mut().expect("set").state = ProcessState::Normal;
    job.beat(6);
    job.is_calm_for(Span::seconds(60));
}

#[test]
fn if_all_ranks_are_still_the_hang_has_no_culprit() {
    let mut job = Job::trained(100);
    job.all_still();
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::AllStill, 0));
}

/// A curriculum of sequence lengths: from one step to the next, all ranks wait three times as long for their devices.
#[test]
fn steps_that_suddenly_take_three_times_as_long_are_not_a_hang() {
    let mut job = Job::started(Limits::default());
    (0..60).for_each(|step| job.step_together(step, Span::seconds(10)));
    job.all_still();
    (60..64).for_each(|step| job.step_together(step, Span::seconds(30)));
    // Then no rank moves any more. In a second job a rank falls behind: its limit is not extended.
    let (hang, took) = job.hangs(Span::seconds(300));
    assert_eq!(hang.kind, HangKind::AllStill);
    assert!(took <= Span::seconds(60), "{took}");
    let mut job = Job::started(Limits::default());
    (0..60).for_each(|step| job.step_together(step, Span::seconds(10)));
    (0..RANKS).filter(|rank| *rank != 5).for_each(|rank| job.step_of(rank, 60));
    job.all_still();
    let (hang, took) = job.hangs(Span::seconds(60));
    assert_eq!(hang.culprits, [Rank(5)]);
    assert!(took <= Span::seconds(15), "{took}");
}

#[test]
fn without_accelerators_the_limit_for_still_ranks_is_not_extended() {
    let (hang, took) = computes_by_itself(false).hangs(Span::seconds(60));
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::AllStill, 0));
    assert!(took <= Span::seconds(3), "one and a half steps, not {took}");
    // With an accelerator, the devices may be in a longer step, so the limit is longer.
    let (hang, took) = computes_by_itself(true).hangs(Span::seconds(60));
    assert_eq!(hang.kind, HangKind::AllStill);
    assert!(took >= Span::seconds(7), "three and a half steps, not {took}");
}

/// Devices that became idle after the last movement are not in a longer step, so the limit is not extended.
#[test]
fn with_idle_devices_the_limit_for_still_ranks_is_not_extended() {
    let found_after = |rest: Option<Span>, works_again: bool| {
        let mut job = Job::started(Limits::default());
        (0..60).for_each(|step| job.step_together(step, Span::seconds(10)));
        job.all_still();
        let frozen = job.now;
        if let Some(rest) = rest {
            job.is_calm_for(rest);
            job.watch.devices_rest(Some(job.now));
        }
        job.is_calm_for(Span::seconds(1));
        if works_again {
            job.watch.devices_rest(None);
        }
        let (hang, _) = job.hangs(Span::seconds(60));
        assert_eq!((hang.kind, hang.culprits.len()), (HangKind::AllStill, 0));
        job.now.since(frozen)
    };
    let rests = found_after(Some(Span::seconds(8)), false);
    assert!(rests <= Span::seconds(15), "one and a half steps, not {rests}");
    for (rest, works_again) in
        [(None, false), (Some(Span::seconds(2)), false), (Some(Span::seconds(8)), true)]
    {
        // No report; a report that may be about the time before the freeze; devices that were between two kernels.
        let waited = found_after(rest, works_again);
        assert!(waited >= Span::seconds(35), "{rest:?}, {works_again}: {waited}");
    }
}

/// Few durations are known after few steps: exactly the default limit applies.
#[test]
fn a_hang_after_few_steps_is_detected_after_the_default_limit() {
    let mut job = Job::trained(20);
    job.all_still();
    (0..RANKS).filter(|rank| *rank != 2).for_each(|rank| job.step_of(rank, 20));
    job.is_calm_for(Span::seconds(300));
    let (hang, took) = job.hangs(Span::seconds(600));
    assert!(took <= Span::seconds(302), "{took}");
    assert_eq!(hang.culprits, [Rank(2)]);
}

#[test]
fn a_rank_in_uninterruptible_sleep_is_the_culprit_after_half_a_minute() {
    let mut job = Job::trained(100);
    job.all_still();
    job.probes[1].as_mut().expect("set").state = ProcessState::Uninterruptible;
    job.is_calm_for(Span::seconds(25));
    let (hang, _) = job.hangs(Span::seconds(10));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::BlockedIo, &[Rank(1)][..]));
}

#[test]
fn a_spinning_rank_is_a_hang_after_two_minutes_and_a_working_rank_after_ten() {
    for (bytes, patience) in [(0, 110), (1 << 20, 590)] {
        let mut job = Job::trained(100);
        job.all_still();
        for _ in 0..patience * 10 {
            job.works(4, Span::millis(99), bytes);
            job.is_calm_for(LOOK);
        }
        let mut found = None;
        for _ in 0..200 {
            job.works(4, Span::millis(99), bytes);
            job.wait(LOOK, &mut |hang| found = Some(hang));
        }
        let hang = found.expect("a verdict");
        assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::UserCode, &[Rank(4)][..]));
    }
}

#[test]
fn heartbeats_without_steps_are_a_livelock() {
    let given = [("livelock".to_owned(), Span::seconds(5))].into();
    let mut job = Job::started(Limits { given, ..Limits::default() });
    for step in 0..100 {
        job.step_together(step, Span::millis(200));
    }
    let mut found = None;
    for _ in 0..70 {
        job.beat(2);
        job.wait(LOOK, &mut |hang| found = Some(hang));
    }
    let hang = found.expect("a verdict");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::Livelock, &[Rank(2)][..]));
    testing::snapshot!("reasons", "hang: heartbeats without steps are a livelock", hang.headline());
}

#[test]
fn a_rank_that_never_registers_is_the_culprit_after_the_first_step_limit() {
    let given = [("first_step".to_owned(), Span::seconds(20))].into();
    let mut job = Job::started(Limits { given, ..Limits::default() });
    job.sights[7] = RankSample::default();
    job.is_calm_for(Span::seconds(19));
    let (hang, _) = job.hangs(Span::seconds(3));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::NeverRegistered, &[Rank(7)][..]));
}

#[test]
fn a_rank_that_finishes_while_the_others_wait_is_the_culprit() {
    let mut job = Job::trained(100);
    job.watch.finished(0, job.now);
    let (hang, _) = job.hangs(Span::seconds(60));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::FinishedEarly, &[Rank(0)][..]));
    assert!(!hang.victims.contains(&Rank(0)));
}

/// A job of which only the first rank prints its steps, each 200 ms.
fn prints(limits: Limits) -> Job {
    let mut job = Job::started(limits);
    job.all_still();
    let lines = job.watch.phases().section(OUTPUT_LINES);
    job.sights.iter_mut().for_each(|sample| sample.phase = lines);
    for step in 0..60 {
        job.is_calm_for(Span::millis(200));
        job.step_of(0, step);
        job.sights[0].phase = lines;
        let phase = if step == 0 { PhaseId::FIRST_STEP } else { lines };
        job.watch.phases().learn(phase, step, Span::millis(200));
    }
    job
}

#[test]
fn ranks_that_print_no_steps_are_not_behind_one_that_does() {
    let mut job = prints(Limits::default());
    job.is_calm_for(Span::seconds(29));
    let (hang, _) = job.hangs(Span::seconds(3));
    assert_eq!((hang.kind, hang.culprits.len(), hang.step), (HangKind::AllStill, 0, Some(59)));
    assert_eq!(hang.phase, OUTPUT_LINES);
    assert!(hang.confidence <= 0.7);
    testing::snapshot!("reasons", "hang: a rank prints no further step", hang.headline());
}

#[test]
fn the_limit_of_a_step_is_that_of_its_line() {
    let limits = Limits { given: [("step".to_owned(), Span::seconds(5))].into(), ..Limits::default() };
    let (hang, took) = prints(limits).hangs(Span::seconds(60));
    assert!(took <= Span::seconds(6), "{took}");
    assert_eq!(hang.step, Some(59));
}

#[test]
fn a_rank_that_works_without_printing_is_given_the_time_for_work() {
    let mut job = prints(Limits::default());
    for _ in 0..200 {
        job.works(3, Span::millis(900), 4096);
        job.is_calm_for(Span::seconds(1));
    }
}
