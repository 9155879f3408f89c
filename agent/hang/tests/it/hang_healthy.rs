//! The hang judge on simulated jobs that do not hang: it reports no hang whatever takes long in them, not even in a
//! million steps.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_hang::{HangKind, HangStatus, Limits, PhaseId, ProcessState, RankSample};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};
use support::hang::{Job, LOOK, RANKS, computes_by_itself};

#[test]
fn longer_steps_of_ranks_that_compute_on_the_cpu_raise_the_limit() {
    let mut job = computes_by_itself(false);
    (60..64).for_each(|step| job.busy_step(step, Span::seconds(6)));
    let (_, took) = job.hangs(Span::seconds(60));
    assert!(took >= Span::seconds(6), "the limit includes the longer steps: {took}");
}

#[test]
fn long_phases_pauses_and_debuggers_cause_no_verdict() {
    let mut job = Job::trained(100);
    job.enter(0, "checkpoint");
    job.is_calm_for(Span::seconds(1700));

    let mut job = Job::trained(100);
    job.sights[3].quiet_until = Mono::NEVER;
    job.is_calm_for(Span::seconds(5_000));

    let mut job = Job::trained(100);
    job.all_still();
    job.probes[0].as_mut().expect("set").state = ProcessState::Traced;
    job.is_calm_for(Span::seconds(2_000));
}

#[test]
fn judging_resumes_after_a_pause() {
    let mut job = Job::trained(100);
    job.sights[3].quiet_until = Mono::NEVER;
    job.is_calm_for(Span::seconds(50));
    job.sights[3].quiet_until = Mono::default();
    let (_, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(3), "{took}");
}

#[test]
fn without_any_client_there_is_no_verdict() {
    let mut job = Job::started(Limits::default());
    job.sights = vec![RankSample::default(); RANKS];
    job.all_still();
    job.is_calm_for(Span::seconds(5_000));
}

#[test]
fn a_judge_that_was_stopped_itself_reports_no_hang() {
    let mut job = Job::trained(100);
    for _ in 0..50 {
        // The judge is stopped and continued, as on a paused machine: each time it misses two seconds.
        job.now = job.now.after(Span::seconds(2));
        assert_eq!(job.look(), HangStatus::Progressing);
        job.is_calm_for(Span::millis(1200));
    }
}

/// What can keep a living rank busy for minutes: a file system that stalls, garbage collection, memory that is swapped
/// in.
#[test]
fn a_rank_that_is_slow_but_alive_causes_no_verdict() {
    let mut job = Job::trained(100);
    job.all_still();
    job.probes[1].as_mut().expect("set").state = ProcessState::Uninterruptible;
    job.is_calm_for(Span::seconds(25));
    job.probes[1].as_mut().expect("set").state = ProcessState::Normal;
    job.step_together(100, Span::millis(200));
    for _ in 0..900 {
        job.works(2, Span::millis(99), 0);
        job.is_calm_for(LOOK);
    }
    job.step_together(101, Span::millis(200));
    for _ in 0..3000 {
        job.probes[5].as_mut().expect("set").faults += 500;
        job.is_calm_for(LOOK);
    }
    job.step_together(102, Span::millis(200));
    job.is_calm_for(Span::seconds(1));
}

/// New processes import, connect and compile again, however short the steps were before. There may be fewer of them.
#[test]
fn the_first_step_after_a_restart_has_its_own_limit_also_with_fewer_ranks() {
    let mut job = Job::trained(100);
    for ranks in [RANKS, RANKS - 2] {
        job.watch.begin_attempt(job.now, ranks);
        job.sights = vec![RankSample::default(); RANKS];
        job.all_still();
        job.is_calm_for(Span::seconds(100));
        for rank in 0..ranks {
            (job.sights[rank].registered, job.sights[rank].claim) = (true, 1);
            job.beat(rank);
        }
        job.is_calm_for(Span::seconds(600));
    }
    for step in 40..45 {
        job.wait(Span::millis(200), &mut |_| panic!("a healthy job has a verdict"));
        (0..RANKS - 2).for_each(|rank| job.step_of(rank, step));
    }
    (0..RANKS - 2).filter(|rank| *rank != 4).for_each(|rank| job.step_of(rank, 45));
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "the duration of steps is known from before: {took}");
    assert_eq!(hang.culprits, [Rank(4)]);
}

/// The machine slept or its clock jumped: no rank moved in that time, and no rank is at fault.
#[test]
fn a_clock_jump_causes_no_verdict_and_a_later_hang_is_detected() {
    let mut job = Job::trained(100);
    job.now = job.now.after(Span::seconds(8 * 3600));
    assert_eq!(job.look(), HangStatus::Progressing);
    job.is_calm_for(Span::seconds(1));
    job.step_together(100, Span::millis(200));
    (0..RANKS).filter(|rank| *rank != 6).for_each(|rank| job.step_of(rank, 101));
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!(hang.culprits, [Rank(6)]);
}

/// The step durations of the previous run apply, with a margin, in the first steps of the next one.
#[test]
fn a_second_run_uses_the_step_durations_of_the_first() {
    let learned = Job::trained(100).watch.phases().remembered();
    let takes = |learned: &[mainstay_hang::PhaseMemory], pause: Span| {
        let mut job = Job::started(Limits::default());
        job.watch.phases().recall(learned);
        for step in 0..5 {
            job.step_together(step, Span::millis(200));
        }
        job.is_calm_for(pause);
        job.step_together(5, Span::millis(200));
        (0..RANKS).filter(|rank| *rank != 3).for_each(|rank| job.step_of(rank, 6));
        let (hang, took) = job.hangs(Span::seconds(1200));
        assert_eq!(hang.culprits, [Rank(3)]);
        took
    };
    // A second run may warm up slowly. Its limit is at least 60 s, a tenth of that of a job without memory.
    let second = takes(&learned, Span::seconds(50));
    assert!(second <= Span::seconds(300), "{second}");
    let first = takes(&[], Span::seconds(50));
    assert!(first >= Span::seconds(590), "{first}");
}

/// Pseudo-random numbers from a seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// A million steps of a job that does everything that healthy jobs do. Outside of sections its delays are work.
#[test]
fn a_million_healthy_steps_cause_no_verdict() {
    let mut dice = Dice(20_261_121);
    let mut job = Job::started(Limits::default());
    job.all_still();
    job.is_calm_for(Span::seconds(900));
    for step in 0..1_000_000_u64 {
        // A log-normal duration with a heavy tail: one in 100 up to 4 times, one in 1000 up to 12 times as long.
        let mut took = 0.25 * (0.25 * dice.normal()).exp();
        let luck = dice.unit();
        if luck < 0.001 {
            took *= 1.0 + 11.0 * dice.unit();
        } else if luck < 0.01 {
            took *= 1.0 + 3.0 * dice.unit();
        }
        let took = Span((took * 1e9) as u64);
        if took > Span::millis(300) {
            job.step_together(step, took);
        } else {
            // Short steps are between two looks; most of the million are.
            job.now = job.now.after(took);
            for rank in 0..RANKS {
                job.step_of(rank, step);
            }
            job.watch.phases().learn(PhaseId::STEP, step, took);
            assert_eq!(job.look(), HangStatus::Progressing);
        }
        if step % 10_000 == 9_999 {
            job.enter(0, "checkpoint");
            let span = Span::seconds(5 + dice.number() % 200);
            job.is_calm_for(span);
        }
        if step % 50_000 == 49_999 {
            for rank in 0..RANKS {
                job.enter(rank, "evaluation");
            }
            job.is_calm_for(Span::seconds(30 + dice.number() % 240));
        }
        if step % 50_000 == 49_999 {
            // A recompilation that was not announced: one rank works, the others wait.
            for _ in 0..900 {
                job.works(1, Span::millis(95), 1 << 20);
                job.is_calm_for(LOOK);
            }
        }
    }
}

/// If ranks compute on the CPU, the limit for all of them is as short as for a single one. Heavy tails, durations that
/// triple from one step to the next, checkpoints and evaluation must not cause a verdict. `MAINSTAY_HEALTHY_STEPS`
/// sets the number of steps at build time; the default is 200,000.
#[test]
fn healthy_steps_of_ranks_that_compute_on_the_cpu_cause_no_verdict() {
    let asked_for = option_env!("MAINSTAY_HEALTHY_STEPS").and_then(|text| text.parse().ok());
    let steps: u64 = asked_for.unwrap_or(200_000);
    let mut dice = Dice(20_261_122);
    let mut job = computes_by_itself(false);
    for step in 60..steps {
        let pace = if step % 20_000 < 2_000 { 1.5 } else { 0.5 };
        let luck = dice.unit();
        let tail = if luck < 0.001 { 1.0 + 11.0 * dice.unit() } else { 1.0 };
        let took = Span((pace * tail * (0.25 * dice.normal()).exp() * 1e9) as u64);
        if took > Span::millis(1000) {
            job.busy_step(step, took);
        } else {
            // A short step can cause no suspicion, so the looks within it are left out.
            job.now = job.now.after(took);
            for rank in 0..RANKS {
                job.works(rank, Span(took.0 / 10 * 9), 0);
                job.step_of(rank, step);
            }
            job.watch.phases().learn(PhaseId::STEP, step, took);
            assert_eq!(job.look(), HangStatus::Progressing);
        }
        if step % 10_000 == 9_999 {
            let section = if step % 50_000 == 49_999 { "evaluation" } else { "checkpoint" };
            (0..RANKS).for_each(|rank| job.enter(rank, section));
            job.is_calm_for(Span::seconds(5 + dice.number() % 200));
        }
    }
    job.busy_step(steps, Span::seconds(1));
    let (hang, _) = job.hangs(Span::seconds(600));
    assert_eq!(hang.kind, HangKind::AllStill);
}
