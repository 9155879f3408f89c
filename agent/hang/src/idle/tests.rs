use super::*;
use mainstay_model::hang::{Hang, HangKind};

const FLOOR: Span = Span::seconds(60);

/// A job whose ranks the test drives second by second.
struct Job {
    idle: Idle,
    now: Mono,
    pulses: Vec<Option<ActivitySample>>,
    collected: Vec<HangStatus>,
}

impl Job {
    fn new(ranks: usize) -> Job {
        let pulses = vec![Some(ActivitySample::default()); ranks];
        let (idle, now) = (Idle::new(FLOOR, Rank(0), ranks), Mono(Span::seconds(10).0));
        Job { idle, now, pulses, collected: Vec::new() }
    }

    /// Runs for this many seconds. In each, `does` changes the pulse of each rank.
    fn seconds(&mut self, seconds: u64, does: impl Fn(usize, u64, &mut ActivitySample)) -> &mut Job {
        for second in 0..seconds {
            self.now = self.now.after(Span::seconds(1));
            for (rank, pulse) in self.pulses.iter_mut().enumerate() {
                if let Some(pulse) = pulse {
                    does(rank, second, pulse);
                    pulse.probe.at = self.now;
                }
            }
            if self.idle.wants_look(self.now) {
                let outlook = self.idle.look(self.now, &self.pulses, || false);
                self.collected.push(outlook);
            }
        }
        self
    }

    fn works(&mut self, seconds: u64) -> &mut Job {
        self.seconds(seconds, |_, _, pulse| {
            work(pulse);
            pulse.output += 10;
        })
    }

    fn rests(&mut self, seconds: u64) -> &mut Job {
        self.seconds(seconds, |_, _, _| ())
    }

    fn hang(&self) -> Option<&Hang> {
        self.collected.iter().find_map(|collected| {
            if let HangStatus::Confirmed(hang) = collected { Some(&**hang) } else { None }
        })
    }

    fn said_nothing(&self) -> bool {
        self.collected.iter().all(|collected| *collected == HangStatus::Progressing)
    }
}

fn work(pulse: &mut ActivitySample) {
    pulse.probe.cpu = pulse.probe.cpu.plus(Span::millis(900));
}

#[test]
fn a_job_that_stops_working_hangs() {
    let mut job = Job::new(4);
    job.works(300).rests(55);
    assert!(job.hang().is_none(), "not before its time");
    job.rests(15);
    let hang = job.hang().expect("a hang");
    assert_eq!((hang.kind, hang.culprits.len(), hang.victims.len()), (HangKind::AllStill, 0, 4));
    assert!(hang.confidence < 0.5 && hang.evidence[2].contains("no heartbeats"), "{hang:?}");
    testing::snapshot!("reasons", "idle: a job that stops working hangs", hang.headline());
    assert!(
        job.collected.iter().any(|collected| matches!(collected, HangStatus::Pending(_))),
        "suspected before"
    );
}

#[test]
fn a_job_that_sleeps_by_design_is_never_judged() {
    let mut job = Job::new(2);
    job.works(5).rests(3600);
    assert!(job.hang().is_none(), "it was never active for long");
    let mut job = Job::new(2);
    for _ in 0..60 {
        job.works(20).rests(10);
    }
    job.rests(3600);
    assert!(job.said_nothing(), "it rests a third of the time");
}

#[test]
fn a_rank_that_waits_for_a_file_system_from_the_start_hangs_and_a_sleeping_one_does_not() {
    let blocks = |state| {
        let mut job = Job::new(2);
        job.works(5).seconds(175, move |rank, _, pulse| {
            pulse.probe.state = if rank == 1 { state } else { ProcessState::Normal };
        });
        assert!(job.hang().is_none(), "not before its time");
        job.rests(10);
        job
    };
    let job = blocks(ProcessState::Uninterruptible);
    let hang = job.hang().expect("a hang");
    assert_eq!((hang.kind, &hang.culprits[..]), (HangKind::BlockedIo, &[Rank(1)][..]));
    assert!(blocks(ProcessState::Normal).hang().is_none());
}

#[test]
fn a_rest_as_long_as_earlier_ones_is_not_a_hang() {
    let mut job = Job::new(2);
    job.works(600).rests(40).works(600).rests(150);
    assert!(job.hang().is_none(), "not five times as long");
    job.rests(60);
    assert!(job.hang().is_some());
}

#[test]
fn one_rank_at_work_keeps_the_job_alive() {
    let mut job = Job::new(4);
    job.works(300).seconds(3600, |rank, _, pulse| {
        if rank == 2 {
            pulse.output += 1
        }
    });
    assert!(job.said_nothing());
}

#[test]
fn a_stopped_rank_is_named_while_others_spin() {
    let mut job = Job::new(4);
    job.works(10).seconds(70, |rank, _, pulse| {
        if rank == 1 { pulse.probe.state = ProcessState::Stopped } else { work(pulse) }
    });
    let hang = job.hang().expect("a hang");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::Stopped, &[Rank(1)][..]));
    testing::snapshot!("reasons", "idle: a stopped rank is named while others spin", hang.headline());
    let first = job.collected.iter().find(|collected| **collected != HangStatus::Progressing);
    let Some(HangStatus::Stopped(stopped)) = first else { panic!("{first:?}") };
    assert_eq!((&stopped.ranks[..], stopped.limit), (&[Rank(1)][..], crate::finding::STOPPED_LIMIT));
}

#[test]
fn a_hang_is_not_put_off_by_a_rank_that_is_stopped_during_it() {
    let hangs_at = |stopped_after: u64| {
        let mut job = Job::new(2);
        job.works(600).seconds(100, |rank, second, pulse| {
            if rank == 1 && second >= stopped_after {
                pulse.probe.state = ProcessState::Stopped;
            }
        });
        job.hang().expect("a hang").confirmed
    };
    assert_eq!(hangs_at(40), hangs_at(1000), "as if no rank had been stopped");
}

#[test]
fn a_stopped_rank_that_resumes_is_no_hang() {
    let mut job = Job::new(2);
    let stopped = |pulse: &mut ActivitySample, state| pulse.probe.state = state;
    job.works(10).seconds(
        20,
        |rank, _, pulse| {
            if rank == 1 { stopped(pulse, ProcessState::Stopped) } else { work(pulse) }
        },
    );
    assert!(matches!(job.collected.last(), Some(HangStatus::Stopped(_))), "{:?}", job.collected.last());
    job.seconds(60, |_, _, pulse| {
        stopped(pulse, ProcessState::Normal);
        work(pulse);
        pulse.output += 1;
    });
    assert_eq!(job.collected.last(), Some(&HangStatus::Progressing));
    assert!(job.hang().is_none());
}

#[test]
fn ranks_that_only_spin_are_doubted_and_never_condemned() {
    let mut job = Job::new(4);
    job.works(300).seconds(2000, |rank, _, pulse| {
        if rank != 3 {
            work(pulse)
        }
    });
    assert!(job.hang().is_none());
    let doubt = job
        .collected
        .iter()
        .find_map(|collected| if let HangStatus::Suspected(doubt) = collected { Some(doubt) } else { None });
    assert_eq!(doubt.expect("a doubt").ranks, [Rank(3)]);
}

#[test]
fn a_job_that_stops_soon_after_its_start_is_doubted_and_never_condemned() {
    let doubt = |job: &Job| {
        job.collected.iter().find_map(|collected| {
            if let HangStatus::Suspected(doubt) = collected { Some(doubt.clone()) } else { None }
        })
    };
    let mut job = Job::new(2);
    // Half of what would show that the job always works.
    job.works(15).rests(150);
    assert!(job.said_nothing(), "{:?}", job.collected.last());
    job.rests(7200);
    assert!(job.hang().is_none());
    let doubt_of_job = doubt(&job).expect("a doubt");
    assert_eq!(doubt_of_job.ranks, [Rank(0), Rank(1)]);
    testing::snapshot!(
        "reasons",
        "idle: a job that stops soon after its start is doubted and never condemned",
        doubt_of_job.why
    );
    // A program that never did anything gives nothing to compare with.
    let mut waits = Job::new(2);
    waits.rests(7200);
    assert!(waits.said_nothing());
}

/// A job that logs every ten seconds, then spins while NCCL reports these counts.
fn spins(counts: impl Fn(u64) -> String) -> Job {
    let mut job = Job::new(4);
    job.works(300);
    for second in 0..400 {
        job.seconds(1, |_, _, pulse| work(pulse));
        let now = job.now;
        if job.idle.wants_collectives(now) {
            let kind = Some(HangKind::UserCode);
            let waits =
                Waits { kind, culprits: vec![Rank(2)], reported: "3 of 4 ranks wait for rank 2".into() };
            job.idle.collectives(now, counts(second), waits);
        }
    }
    job
}

#[test]
fn ranks_that_spin_in_a_collective_are_found_by_nccls_counters() {
    let job = spins(|_| "7 7 6 7".to_owned());
    let hang = job.hang().expect("a hang");
    assert_eq!((hang.kind, hang.culprits.as_slice()), (HangKind::UserCode, &[Rank(2)][..]));
    testing::snapshot!(
        "reasons",
        "idle: ranks that spin in a collective are found by nccls counters",
        hang.evidence[0]
    );
    assert!(spins(|second| format!("{second}")).hang().is_none(), "they move on");
}

#[test]
fn a_job_that_computes_silently_from_the_start_is_not_doubted() {
    let mut job = Job::new(4);
    job.seconds(7200, |_, _, pulse| work(pulse));
    assert!(job.said_nothing());
}

#[test]
fn the_limit_is_three_times_as_long_if_unseen_work_is_possible() {
    for network in [false, true] {
        let mut job = Job::new(1);
        job.works(300);
        for _ in 0..170 {
            job.now = job.now.after(Span::seconds(1));
            if let Some(pulse) = &mut job.pulses[0] {
                pulse.probe.at = job.now;
                pulse.network += if network { 5_000_000 } else { 0 };
            }
            if job.idle.wants_look(job.now) {
                let outlook = job.idle.look(job.now, &job.pulses, || !network);
                job.collected.push(outlook);
            }
        }
        assert!(job.hang().is_none());
        job.rests(60);
        assert_eq!(job.hang().map(|hang| hang.culprits.clone()), Some(vec![Rank(0)]));
    }
}

#[test]
fn a_launcher_that_was_held_up_restarts_its_clock() {
    let mut job = Job::new(2);
    job.works(300);
    job.now = job.now.after(Span::seconds(4000));
    job.rests(50);
    assert!(job.hang().is_none());
}

#[test]
fn a_debugger_is_no_hang() {
    let mut job = Job::new(2);
    job.works(300).seconds(600, |_, _, pulse| pulse.probe.state = ProcessState::Traced);
    assert!(job.said_nothing());
}

/// A job whose processes always spin, as they do while they wait for a device. `idle` gives the rest of its devices.
fn on_devices(job: &mut Job, seconds: u64, idle: impl Fn(u64) -> Option<Span>) {
    for second in 0..seconds {
        job.seconds(1, |_, _, pulse| work(pulse));
        if let Some(idle) = idle(second) {
            job.idle.devices(job.now, idle);
        }
    }
}

#[test]
fn devices_that_lose_their_work_are_a_hang_while_the_processes_spin() {
    let mut job = Job::new(2);
    on_devices(&mut job, 300, |_| Some(Span(0)));
    on_devices(&mut job, 50, |second| Some(Span::seconds(second)));
    assert!(job.hang().is_none(), "not before its time");
    on_devices(&mut job, 30, |second| Some(Span::seconds(50 + second)));
    let hang = job.hang().expect("a hang");
    assert_eq!((hang.kind, hang.culprits.len()), (HangKind::AllStill, 0));
    assert!(hang.confidence <= 0.6, "{hang:?}");
    testing::snapshot!("reasons", "idle: devices without work hang with little confidence", hang.evidence[0]);
}

#[test]
fn devices_that_rest_by_design_or_save_or_are_unknown_are_no_hang() {
    // The devices are idle half of the time.
    let mut job = Job::new(2);
    on_devices(&mut job, 1200, |second| Some(Span::seconds(if second % 100 < 50 { 0 } else { second % 50 })));
    assert!(job.hang().is_none());
    // Something is written while they are idle.
    let mut job = Job::new(2);
    on_devices(&mut job, 300, |_| Some(Span(0)));
    for second in 0..150 {
        job.works(1);
        job.idle.devices(job.now, Span::seconds(second));
    }
    assert!(job.hang().is_none());
    // The reporter of the devices is gone.
    let mut job = Job::new(2);
    on_devices(&mut job, 300, |_| Some(Span(0)));
    on_devices(&mut job, 300, |_| None);
    assert!(job.hang().is_none());
}

#[test]
fn devices_that_are_known_to_rest_are_not_unseen() {
    for idle in [false, true] {
        let mut job = Job::new(1);
        job.works(300);
        for second in 0..100 {
            job.now = job.now.after(Span::seconds(1));
            if let Some(pulse) = &mut job.pulses[0] {
                pulse.probe.at = job.now;
            }
            job.idle.devices(job.now, Span::seconds(if idle { second } else { 0 }));
            if job.idle.wants_look(job.now) {
                let outlook = job.idle.look(job.now, &job.pulses, || true);
                job.collected.push(outlook);
            }
        }
        assert_eq!(job.hang().is_some(), idle);
    }
}
