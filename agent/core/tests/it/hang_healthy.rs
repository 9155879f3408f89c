//! The judge of hangs, on simulated jobs that do not hang: whatever takes long in them, nobody is judged; not in a million steps.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_core::base::id::Rank;
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::hang::{HangKind, Limits, Outlook, PhaseId, ProcessState, Sight};
use support::hang::{Job, LOOK, RANKS, computes_by_itself};

#[test]
fn steps_that_become_longer_are_seen_where_ranks_compute_by_themselves() {
    let mut job = computes_by_itself(false);
    (60..64).for_each(|step| job.busy_step(step, Span::seconds(6)));
    let (_, took) = job.hangs(Span::seconds(60));
    assert!(took >= Span::seconds(6), "longer steps are known by now: {took}");
}

#[test]
fn nothing_is_judged_in_long_phases_pauses_and_under_a_debugger() {
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
fn a_pause_that_ends_is_judged_again() {
    let mut job = Job::trained(100);
    job.sights[3].quiet_until = Mono::NEVER;
    job.is_calm_for(Span::seconds(50));
    job.sights[3].quiet_until = Mono::default();
    let (_, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(3), "{took}");
}

#[test]
fn without_any_client_nothing_is_judged() {
    let mut job = Job::started(Limits::default());
    job.sights = vec![Sight::default(); RANKS];
    job.all_still();
    job.is_calm_for(Span::seconds(5_000));
}

#[test]
fn a_judge_that_was_held_up_does_not_blame_the_ranks() {
    let mut job = Job::trained(100);
    for _ in 0..50 {
        // Stopped and continued, as with a paused machine: each time two seconds are missing.
        job.now = job.now.after(Span::seconds(2));
        assert_eq!(job.look(), Outlook::Calm);
        job.is_calm_for(Span::millis(1200));
    }
}

/// What a rank may be at for minutes without being dead: a file system that stalls, a collection of garbage, memory that comes
/// back from swap.
#[test]
fn a_rank_that_is_slow_but_alive_is_waited_for() {
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

/// New processes import, connect and compile again, however quick the steps were before; and there may be fewer of them.
#[test]
fn the_first_step_after_a_restart_is_given_its_time_also_with_fewer_ranks() {
    let mut job = Job::trained(100);
    for ranks in [RANKS, RANKS - 2] {
        job.watch.begin_attempt(job.now, ranks);
        job.sights = vec![Sight::default(); RANKS];
        job.all_still();
        job.is_calm_for(Span::seconds(100));
        for rank in 0..ranks {
            (job.sights[rank].registered, job.sights[rank].claim) = (true, 1);
            job.beat(rank);
        }
        job.is_calm_for(Span::seconds(600));
    }
    for step in 40..45 {
        job.wait(Span::millis(200), &mut |_| panic!("a healthy job is judged"));
        (0..RANKS - 2).for_each(|rank| job.step_of(rank, step));
    }
    (0..RANKS - 2).filter(|rank| *rank != 4).for_each(|rank| job.step_of(rank, 45));
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "what steps take is known from before: {took}");
    assert_eq!(hang.culprits, [Rank(4)]);
}

/// A machine that slept, or a clock that jumped: nobody moved meanwhile, and nobody is to blame.
#[test]
fn a_jump_of_the_clock_blames_nobody_and_a_hang_after_it_is_found() {
    let mut job = Job::trained(100);
    job.now = job.now.after(Span::seconds(8 * 3600));
    assert_eq!(job.look(), Outlook::Calm);
    job.is_calm_for(Span::seconds(1));
    job.step_together(100, Span::millis(200));
    (0..RANKS).filter(|rank| *rank != 6).for_each(|rank| job.step_of(rank, 101));
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!(hang.culprits, [Rank(6)]);
}

/// What the run before took for its steps holds in the first steps of the next one, with room.
#[test]
fn a_second_run_knows_from_the_first_what_steps_take() {
    let learned = Job::trained(100).watch.phases().remembered();
    let takes = |learned: &[mainstay_core::hang::PhaseMemory], pause: Span| {
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
    // A second run may warm up slowly, and is judged ten times as soon as a job that nobody knows.
    let second = takes(&learned, Span::seconds(50));
    assert!(second <= Span::seconds(300), "{second}");
    let first = takes(&[], Span::seconds(50));
    assert!(first >= Span::seconds(590), "{first}");
}

/// Numbers from a seed (SplitMix64).
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

/// A million steps of a job with all that healthy jobs do. What it does with nothing open and nobody told is work.
#[test]
fn a_million_healthy_steps_are_never_judged() {
    let mut dice = Dice(20_261_121);
    let mut job = Job::started(Limits::default());
    job.all_still();
    job.is_calm_for(Span::seconds(900));
    for step in 0..1_000_000_u64 {
        // A log-normal pace with a heavy tail: one in a hundred up to 4, one in a thousand up to 12 times as long.
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
            // Quick steps lie between two looks; most of a million do.
            job.now = job.now.after(took);
            for rank in 0..RANKS {
                job.step_of(rank, step);
            }
            job.watch.phases().learn(PhaseId::STEP, step, took);
            assert_eq!(job.look(), Outlook::Calm);
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
            // A recompilation that nobody announced: one works, the others wait.
            for _ in 0..900 {
                job.works(1, Span::millis(95), 1 << 20);
                job.is_calm_for(LOOK);
            }
        }
    }
}

/// Where ranks compute by themselves all of them are judged as soon as one would be: with heavy tails, paces that triple from one step to
/// the next, checkpoints and evaluation they are not. `MAINSTAY_HEALTHY_STEPS` says how many when this is built; else a fifth of a million.
#[test]
fn healthy_steps_of_ranks_that_compute_by_themselves_are_never_judged() {
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
            // Of quick steps nothing can be suspected: looks in them are left out.
            job.now = job.now.after(took);
            for rank in 0..RANKS {
                job.works(rank, Span(took.0 / 10 * 9), 0);
                job.step_of(rank, step);
            }
            job.watch.phases().learn(PhaseId::STEP, step, took);
            assert_eq!(job.look(), Outlook::Calm);
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
