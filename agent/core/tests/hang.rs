//! The judge of hangs, on a simulated job: every kind is found in time and in the right rank, and a healthy job of a
//! million steps is never judged.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use mainstay_core::hang::{
    Count, Hang, HangKind, Limits, Outlook, PhaseId, Probe, ProcessState, Sight, Watch,
};
use mainstay_core::id::Rank;
use mainstay_core::time::{Mono, Span};

const RANKS: usize = 8;
const LOOK: Span = Span::millis(100);

/// A job whose ranks step together.
struct Job {
    now: Mono,
    watch: Watch,
    sights: Vec<Sight>,
    counts: Vec<Vec<Count>>,
    probes: Vec<Option<Probe>>,
}

impl Job {
    fn begun(limits: Limits) -> Job {
        let now = Mono(Span::seconds(1000).0);
        let mut job = Job {
            now,
            watch: Watch::new(limits, Rank(0), RANKS, now),
            sights: vec![Sight::default(); RANKS],
            counts: vec![Vec::new(); RANKS],
            probes: vec![None; RANKS],
        };
        for sight in &mut job.sights {
            (sight.registered, sight.claim, sight.since) = (true, 1, now);
        }
        job
    }

    /// One that has made `steps` steps of 200 ms.
    fn trained(steps: u64) -> Job {
        let mut job = Job::begun(Limits::default());
        for step in 0..steps {
            job.step_together(step, Span::millis(200));
        }
        job
    }

    fn step_together(&mut self, step: u64, took: Span) {
        self.wait(took, &mut |_| panic!("a healthy job is judged"));
        for rank in 0..RANKS {
            self.step_of(rank, step);
            self.watch.phases().learn(PhaseId::STEP, step, took);
        }
    }

    /// A step in which all ranks use the CPU for nine tenths of the time.
    fn busy_step(&mut self, step: u64, took: Span) {
        let until = self.now.after(took);
        while self.now < until {
            (0..RANKS).for_each(|rank| self.works(rank, Span::millis(90), 0));
            self.is_calm_for(LOOK);
        }
        for rank in 0..RANKS {
            self.step_of(rank, step);
            self.watch.phases().learn(PhaseId::STEP, step, took);
        }
    }

    fn step_of(&mut self, rank: usize, step: u64) {
        let sight = &mut self.sights[rank];
        (sight.step, sight.since, sight.phase, sight.long) = (Some(step), self.now, PhaseId::STEP, None);
        self.beat(rank);
    }

    fn beat(&mut self, rank: usize) {
        self.sights[rank].beats += 1;
        self.sights[rank].beat_at = self.now;
    }

    fn enter(&mut self, rank: usize, section: &str) {
        let phase = self.watch.phases().section(section);
        let is_long = self.watch.phases().class(phase) == mainstay_core::hang::Class::Long;
        (self.sights[rank].phase, self.sights[rank].since) = (phase, self.now);
        self.sights[rank].long = is_long.then_some(phase);
        self.beat(rank);
    }

    fn look(&mut self) -> Outlook {
        for rank in 0..RANKS {
            self.watch.sight(rank, self.now, &self.sights[rank]);
            self.watch.counts(rank, self.now, &self.counts[rank]);
        }
        if self.watch.wants_probes(self.now) {
            for rank in 0..RANKS {
                if let Some(probe) = &mut self.probes[rank] {
                    probe.at = self.now;
                    self.watch.probe(rank, *probe);
                }
            }
        }
        self.watch.look(self.now)
    }

    /// Lets time pass, looking as the launcher does.
    fn wait(&mut self, span: Span, judged: &mut dyn FnMut(Hang)) {
        let until = self.now.after(span);
        while self.now < until {
            self.now = self.now.after(LOOK).min(until);
            if let Outlook::Hang(hang) = self.look() {
                return judged(*hang);
            }
        }
    }

    /// Waits for a verdict and returns it with the time that it took.
    fn hangs(&mut self, within: Span) -> (Hang, Span) {
        let began = self.now;
        let mut found = None;
        self.wait(within, &mut |hang| found = Some(hang));
        let hang = found.unwrap_or_else(|| panic!("no verdict within {within}"));
        (hang, self.now.since(began))
    }

    fn is_calm_for(&mut self, span: Span) {
        self.wait(span, &mut |hang| panic!("judged: {hang:?}"));
    }

    fn all_still(&mut self) {
        self.probes = vec![Some(Probe { processes: 1, ..Probe::default() }); RANKS];
    }

    fn works(&mut self, rank: usize, cpu: Span, bytes: u64) {
        let probe = self.probes[rank].get_or_insert_default();
        (probe.cpu, probe.bytes) = (probe.cpu.plus(cpu), probe.bytes + bytes);
    }
}

#[test]
fn a_rank_that_falls_behind_is_named_within_two_seconds() {
    let mut job = Job::trained(100);
    for rank in (0..RANKS).filter(|rank| *rank != 3) {
        job.step_of(rank, 100);
    }
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::UserCode, &[Rank(3)][..]));
    assert_eq!(hang.victims.len(), RANKS - 1);
    assert_eq!(hang.step, Some(99));
    assert_eq!(hang.headline(), "rank 3 hangs after step 99: it does not come out of its own code");
}

#[test]
fn the_rank_that_never_enters_a_collective_is_named_by_counters() {
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
fn a_collective_that_all_entered_is_given_time_and_is_the_networks() {
    let mut job = Job::trained(100);
    for rank in 0..RANKS {
        job.counts[rank] = vec![Count { comm: 77, entered: 41, completed: 40, signature: 0 }];
    }
    job.is_calm_for(Span::seconds(25));
    let (hang, _) = job.hangs(Span::seconds(10));
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::Network, 0));
}

#[test]
fn a_rank_in_its_data_loader_is_data_input_though_all_are_at_the_same_step() {
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
fn a_stopped_process_is_named_whatever_else_is_known() {
    let mut job = Job::trained(100);
    job.all_still();
    job.probes[6].as_mut().expect("set").state = ProcessState::Stopped;
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::Stopped, &[Rank(6)][..]));
}

#[test]
fn all_frozen_is_a_hang_without_a_culprit() {
    let mut job = Job::trained(100);
    job.all_still();
    let (hang, took) = job.hangs(Span::seconds(60));
    assert!(took <= Span::seconds(2), "{took}");
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::AllStill, 0));
}

/// A curriculum of sequence lengths: from one step to the next all ranks wait for their devices three times as long.
#[test]
fn steps_that_become_three_times_as_long_at_once_are_no_hang() {
    let mut job = Job::begun(Limits::default());
    (0..60).for_each(|step| job.step_together(step, Span::seconds(10)));
    job.all_still();
    (60..64).for_each(|step| job.step_together(step, Span::seconds(30)));
    // Nobody moves any more; and a rank that falls behind then is not waited for longer than before.
    let (hang, took) = job.hangs(Span::seconds(300));
    assert_eq!(hang.kind, HangKind::AllStill);
    assert!(took <= Span::seconds(60), "{took}");
    let mut job = Job::begun(Limits::default());
    (0..60).for_each(|step| job.step_together(step, Span::seconds(10)));
    (0..RANKS).filter(|rank| *rank != 5).for_each(|rank| job.step_of(rank, 60));
    job.all_still();
    let (hang, took) = job.hangs(Span::seconds(60));
    assert_eq!(hang.culprits, [Rank(5)]);
    assert!(took <= Span::seconds(15), "{took}");
}

/// Steps of two seconds in which ranks use the CPU: they have no accelerator that could be at a longer step while they wait for it.
fn computes_by_itself(holds_device: bool) -> Job {
    let mut job = Job::begun(Limits::default());
    let probe = Probe { processes: 1, holds_device, ..Probe::default() };
    job.probes = vec![Some(probe); RANKS];
    (0..60).for_each(|step| job.busy_step(step, Span::seconds(2)));
    job
}

#[test]
fn without_accelerators_all_frozen_is_found_as_soon_as_any_other_hang() {
    let (hang, took) = computes_by_itself(false).hangs(Span::seconds(60));
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::AllStill, 0));
    assert!(took <= Span::seconds(3), "one and a half steps, not {took}");
    // With one, the devices may be at a longer step: it is waited for.
    let (hang, took) = computes_by_itself(true).hangs(Span::seconds(60));
    assert_eq!(hang.kind, HangKind::AllStill);
    assert!(took >= Span::seconds(7), "three and a half steps, not {took}");
}

#[test]
fn steps_that_become_longer_are_seen_where_ranks_compute_by_themselves() {
    let mut job = computes_by_itself(false);
    (60..64).for_each(|step| job.busy_step(step, Span::seconds(6)));
    let (_, took) = job.hangs(Span::seconds(60));
    assert!(took >= Span::seconds(6), "longer steps are known by now: {took}");
}

/// Little is known of a job that has made few steps: it is waited for as long as the default says, and no longer.
#[test]
fn a_hang_after_few_steps_is_found_by_the_default_limit() {
    let mut job = Job::trained(20);
    job.all_still();
    (0..RANKS).filter(|rank| *rank != 2).for_each(|rank| job.step_of(rank, 20));
    job.is_calm_for(Span::seconds(300));
    let (hang, took) = job.hangs(Span::seconds(600));
    assert!(took <= Span::seconds(302), "{took}");
    assert_eq!(hang.culprits, [Rank(2)]);
}

#[test]
fn a_rank_in_uninterruptible_sleep_is_given_half_a_minute() {
    let mut job = Job::trained(100);
    job.all_still();
    job.probes[1].as_mut().expect("set").state = ProcessState::Uninterruptible;
    job.is_calm_for(Span::seconds(25));
    let (hang, _) = job.hangs(Span::seconds(10));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::BlockedIo, &[Rank(1)][..]));
}

#[test]
fn a_loop_is_found_after_two_minutes_and_work_is_waited_for() {
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
fn beats_without_steps_are_a_livelock() {
    let given = [("livelock".to_owned(), Span::seconds(5))].into();
    let mut job = Job::begun(Limits { given, ..Limits::default() });
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
}

#[test]
fn a_rank_that_never_registers_is_waited_for_and_then_named() {
    let given = [("first_step".to_owned(), Span::seconds(20))].into();
    let mut job = Job::begun(Limits { given, ..Limits::default() });
    job.sights[7] = Sight::default();
    job.is_calm_for(Span::seconds(19));
    let (hang, _) = job.hangs(Span::seconds(3));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::NeverRegistered, &[Rank(7)][..]));
}

#[test]
fn a_rank_that_is_done_while_the_others_wait_is_named() {
    let mut job = Job::trained(100);
    job.watch.finished(0, job.now);
    let (hang, _) = job.hangs(Span::seconds(60));
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::FinishedEarly, &[Rank(0)][..]));
    assert!(!hang.victims.contains(&Rank(0)));
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
    let mut job = Job::begun(Limits::default());
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
        let mut job = Job::begun(Limits::default());
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
    let mut job = Job::begun(Limits::default());
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
/// the next, checkpoints and evaluation they are not.
#[test]
fn healthy_steps_of_ranks_that_compute_by_themselves_are_never_judged() {
    let mut dice = Dice(20_261_122);
    let mut job = computes_by_itself(false);
    for step in 60..200_000_u64 {
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
    job.busy_step(200_000, Span::seconds(1));
    let (hang, _) = job.hangs(Span::seconds(600));
    assert_eq!(hang.kind, HangKind::AllStill);
}
