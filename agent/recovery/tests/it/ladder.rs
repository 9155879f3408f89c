//! A thousand faults of all kinds, also nested, reported to the job as a launcher reports them. The job always ends,
//! in the right state, and never starts an attempt while another one runs.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use std::collections::BTreeSet;

use mainstay_hang::{Hang, HangKind};
use mainstay_model::entry::{Body, ExitStatus, Fact, JobSpec, Note, StartedRank, StepDone};
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Incident, Pid, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Action;
use mainstay_recovery::job::{Job, Output};
use mainstay_recovery::policy::{Budget, HAND_BACK_EXIT, Settings};
use mainstay_recovery::protocol::{AgentEvidence, Command, Event, StopWhy};

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound
    }

    fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}

/// The injected faults.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// A rank is killed.
    Kill,
    /// A rank raises an exception, each time a different one.
    Raise,
    /// A rank exits with a code.
    Code,
    /// A bug in user code: from here on a rank raises the same error at the same step.
    Bug,
    /// A GPU is lost with the rank.
    LostGpu,
    /// The GPUs' memory stays in use for up to 70 s after the rank was killed.
    Held,
    /// A rank hangs, or only seems to.
    Hang,
}

/// How a job ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Done,
    Stopped,
    HandedBack,
    Asked,
}

const RANKS: u32 = 4;

struct World {
    job: Job,
    random: Random,
    now: Mono,
    orders: Vec<Command>,
    /// The running attempt.
    alive: Option<Attempt>,
    /// Whether the ranks can keep their processes.
    in_process: bool,
    /// Ranks that wait in their processes.
    waiting: Vec<u32>,
    /// Ranks whose processes have ended in this attempt.
    dead: Vec<u32>,
    /// The ranks of this attempt never complete a step.
    stuck: bool,
    /// When the job looks again while its ranks train.
    wake_at: Option<Mono>,
    step: u64,
    /// The step of the newest checkpoint.
    saved: u64,
    faults: u32,
    bug: Option<u64>,
    lost_gpu: bool,
    held_until: Mono,
    asked: bool,
    decisions: Vec<Action>,
}

impl World {
    fn begin(seed: u64, max_restarts: u32) -> World {
        let mut out = Vec::new();
        let spec = JobSpec { world_size: RANKS, local_world_size: RANKS, ..JobSpec::default() };
        let settings = Settings { seed, ..Settings::from(Budget { max_restarts, window: None }) };
        let job = Job::begin(Mono(0), spec, settings, &mut out);
        let mut world = World {
            job,
            random: Random(seed),
            now: Mono(0),
            orders: Vec::new(),
            alive: None,
            in_process: seed % 2 == 1,
            waiting: Vec::new(),
            dead: Vec::new(),
            stuck: false,
            wake_at: None,
            step: 0,
            saved: 0,
            faults: 0,
            bug: None,
            lost_gpu: false,
            held_until: Mono(0),
            asked: false,
            decisions: Vec::new(),
        };
        world.take(out);
        world
    }

    fn take(&mut self, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Command(order) => self.orders.push(order),
                Output::Record(Body::Decision(decision)) => self.decisions.push(decision.action),
                Output::Record(_) => {}
            }
        }
    }

    fn report(&mut self, input: Event) {
        self.now = self.now.after(Span::millis(1 + self.random.below(20)));
        let mut out = Vec::new();
        self.job.step(self.now, input, &mut out);
        self.take(out);
    }

    fn fact(&mut self, fact: Fact) {
        self.report(Event::Fact(fact));
    }

    /// Carries out orders until the job is over, and creates the inputs in between.
    fn run(&mut self, end_at: u64) -> (i32, End) {
        for _ in 0..100_000 {
            // A user may ask to stop at any moment.
            if self.random.one_in(20_000) && !self.asked {
                self.asked = true;
                self.fact(Fact::StopRequested { by: "SIGTERM".into(), exit: 143 });
            }
            if self.orders.is_empty() {
                self.train(end_at);
                continue;
            }
            match self.orders.remove(0) {
                Command::Start { attempt, in_process: false, .. } => {
                    assert!(self.waiting.is_empty(), "old processes remain next to all new ones");
                    self.start(attempt);
                }
                Command::Start { attempt, in_process: true, .. } => {
                    assert!(!self.waiting.is_empty(), "a round without ranks");
                    self.waiting.clear();
                    self.start(attempt);
                }
                Command::EndRank { attempt, rank } => {
                    assert!(self.waiting.contains(&rank.0), "an absent rank is ended");
                    self.waiting.retain(|waits| *waits != rank.0);
                    self.exit(attempt, rank.0, ExitStatus::Signal(9), true);
                    let waiting = self.waiting.iter().map(|rank| Rank(*rank)).collect();
                    self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting });
                }
                Command::Stop { attempt, why, .. } => self.stop(attempt, why),
                Command::Consult(verdict) => self.rule(verdict.incident),
                Command::Wake { at } if self.alive.is_some() => self.wake_at = Some(at),
                Command::Wake { at } => {
                    self.now = self.now.max(at);
                    self.report(Event::Wake);
                }
                Command::Finish { exit, .. } => {
                    assert_eq!(self.alive, None, "the job ends with live processes");
                    assert!(self.waiting.is_empty(), "the job ends with waiting processes");
                    assert!(self.orders.is_empty(), "orders after the end: {:?}", self.orders);
                    return (exit, self.end(exit));
                }
                Command::AskToSave { .. } | Command::AskPolicy { .. } => {}
                Command::TakeEvidence { attempt } => self.take_evidence(attempt),
                other => panic!("only a group gives it: {other:?}"),
            }
        }
        panic!("the job never ends");
    }

    fn end(&self, exit: i32) -> End {
        match exit {
            0 => End::Done,
            143 if self.asked => End::Asked,
            HAND_BACK_EXIT => End::HandedBack,
            _ => End::Stopped,
        }
    }

    fn start(&mut self, attempt: Attempt) {
        assert_eq!(self.alive, None, "two attempts at once");
        self.alive = Some(attempt);
        self.step = self.saved;
        self.dead.clear();
        self.wake_at = None;
        // Nested: ranks that continue in their processes and complete no step.
        self.stuck = self.in_process && attempt.0 > 0 && self.random.one_in(25);
        let started = |n| StartedRank {
            rank: Rank(n),
            local_rank: n,
            pid: Pid(n as i32 + 1),
            page: None,
            start_ticks: None,
        };
        let ranks = (0..RANKS).map(started).collect();
        self.fact(Fact::AttemptStarted { attempt, master_port: 1, ranks, hosts: Vec::new() });
        // Nested: a rank may die before it connects.
        if self.random.one_in(10) {
            return self.inject(attempt, Fault::Kill);
        }
        for n in 0..RANKS {
            self.fact(Fact::RankConnected { attempt, rank: Rank(n), client: "test".into() });
        }
    }

    fn train(&mut self, end_at: u64) {
        let attempt = self.alive.expect("without orders the ranks train");
        if self.wake_at.is_some_and(|at| at <= self.now) {
            self.wake_at = None;
            return self.report(Event::Wake);
        }
        if self.stuck {
            match self.wake_at {
                Some(at) => self.now = at,
                // No look is due: new processes of all ranks have no time limit. They complete a step at last.
                None => self.stuck = false,
            }
            return;
        }
        self.step += 1;
        if self.bug == Some(self.step) {
            return self.inject(attempt, Fault::Bug);
        }
        if self.random.one_in(12) {
            let faults = [Fault::Kill, Fault::Raise, Fault::Code, Fault::Held, Fault::Hang];
            let fault = match self.random.below(200) {
                0 => Fault::Bug,
                1 => Fault::LostGpu,
                n => faults[(n % 5) as usize],
            };
            return self.inject(attempt, fault);
        }
        let (start, end) = (self.now, self.now.after(Span::millis(100)));
        self.now = end;
        for n in 0..RANKS {
            let done = vec![StepDone { step: self.step, start, end, ..StepDone::default() }];
            self.report(Event::Steps { attempt, ranks: vec![(Rank(n), done)] });
        }
        if self.step.is_multiple_of(3) {
            self.saved = self.step;
        }
        if self.step >= end_at {
            for n in 0..RANKS {
                self.exit(attempt, n, ExitStatus::Code(0), false);
            }
        }
    }

    fn inject(&mut self, attempt: Attempt, fault: Fault) {
        self.faults += 1;
        let rank = self.random.below(u64::from(RANKS)) as u32;
        match fault {
            Fault::Kill => self.exit(attempt, rank, ExitStatus::Signal(9), false),
            Fault::Code => self.exit(attempt, rank, ExitStatus::Code(3), false),
            Fault::Raise => self.raise(attempt, rank, format!("no answer from {}", name(self.faults))),
            Fault::Bug => {
                self.bug = Some(self.step);
                self.raise(attempt, rank, "shapes do not match".into());
            }
            Fault::Hang => self.hang(attempt, rank),
            Fault::LostGpu => {
                self.lost_gpu = true;
                self.exit(attempt, rank, ExitStatus::Signal(6), false);
            }
            Fault::Held => {
                let span = Span::millis(self.random.below(70_000));
                self.held_until = self.now.after(span);
                self.exit(attempt, rank, ExitStatus::Signal(9), false);
            }
        }
    }

    fn hang(&mut self, attempt: Attempt, rank: u32) {
        let hang = Hang {
            kind: HangKind::Network,
            culprits: vec![Rank(rank)],
            hosts: Vec::new(),
            victims: Vec::new(),
            since: self.now,
            confirmed: self.now,
            phase: format!("section {}", name(self.faults)),
            limit: Span::seconds(1),
            step: Some(self.step),
            confidence: 0.7,
            evidence: Vec::new(),
        };
        self.fact(Fact::RanksHung { attempt, hang: Box::new(hang), acts: true });
    }

    fn take_evidence(&mut self, attempt: Attempt) {
        let took = Span::millis(30);
        match self.random.below(4) {
            0 => self.fact(Fact::HangPassed { attempt, after: took }),
            // Nested: a rank is killed while evidence is taken.
            1 => self.exit(attempt, 0, ExitStatus::Signal(9), false),
            _ => {
                let (groups, waits, summary) = (Vec::new(), Vec::new(), Vec::new());
                self.fact(Fact::EvidenceTaken { attempt, file: None, groups, waits, summary, took });
            }
        }
    }

    fn raise(&mut self, attempt: Attempt, rank: u32, message: String) {
        let exception = "builtins.RuntimeError".to_owned();
        let note = Note { exception, message, at: self.now, step: Some(self.step), ..Note::default() };
        self.fact(Fact::RankRaised { attempt, rank: Rank(rank), pid: Pid(1), note, data: None });
    }

    fn exit(&mut self, attempt: Attempt, rank: u32, status: ExitStatus, after_stop: bool) {
        if self.dead.contains(&rank) {
            return;
        }
        self.dead.push(rank);
        let step = Some(self.step).filter(|step| *step > 0);
        let (rank, pid, stderr_tail, stdout_tail) = (Rank(rank), Pid(1), Vec::new(), Vec::new());
        self.fact(Fact::RankExited {
            attempt,
            rank,
            pid,
            status,
            step,
            data: None,
            after_stop,
            stderr_tail,
            stdout_tail,
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        });
    }

    fn stop(&mut self, attempt: Attempt, why: StopWhy) {
        if why == StopWhy::Dismissed {
            assert_eq!(self.alive, None, "a running attempt is dismissed");
            for rank in std::mem::take(&mut self.waiting) {
                self.exit(attempt, rank, ExitStatus::Signal(15), true);
            }
        } else {
            assert_eq!(self.alive, Some(attempt), "a stop of another attempt");
            let gathers = why == StopWhy::Fault && self.in_process && !self.random.one_in(6);
            for n in 0..RANKS {
                // Nested: a rank is killed, or does not leave its call, while all ranks are stopped.
                if self.random.one_in(8) {
                    self.exit(attempt, n, ExitStatus::Signal(9), true);
                } else if gathers && !self.dead.contains(&n) {
                    self.waiting.push(n);
                } else if why != StopWhy::Done {
                    self.exit(attempt, n, ExitStatus::Signal(15), true);
                }
            }
        }
        (self.alive, self.wake_at) = (None, None);
        let waiting = self.waiting.iter().map(|rank| Rank(*rank)).collect();
        self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting });
        // A late message of an attempt that is over.
        if self.random.one_in(4) {
            self.raise(attempt, 0, "late".into());
        }
    }

    fn rule(&mut self, incident: Incident) {
        let mut host_evidence = HostEvidence::default();
        if self.now < self.held_until {
            host_evidence.held.push("gpu.0000:3b:00: held".into());
        }
        if self.lost_gpu {
            host_evidence.unhealthy.push(Component {
                name: "gpu.0000:3b:00".into(),
                state: HealthState::Unhealthy,
                reason: "it fell off the bus".into(),
                action: RecommendedAction::RebootNode,
                since: self.now,
                ..Component::default()
            });
        }
        let answer = match self.random.below(10) {
            // No agent, or one that first rules on another failure.
            0 if host_evidence.is_empty() => None,
            1 => {
                let other = Incident(incident.0 + 1);
                let early =
                    AgentEvidence { incident: other, instead: None, host_evidence: HostEvidence::default() };
                self.report(Event::AgentEvidence(Some(early)));
                Some(AgentEvidence { incident, instead: None, host_evidence })
            }
            _ => Some(AgentEvidence { incident, instead: None, host_evidence }),
        };
        self.report(Event::AgentEvidence(answer));
    }
}

/// A word without digits, because numbers in messages do not distinguish errors.
fn name(number: u32) -> String {
    (0..8).map(|bit| if number >> bit & 1 == 1 { 'b' } else { 'a' }).collect()
}

#[test]
fn every_job_ends_correctly_over_a_thousand_faults() {
    let (mut faults, mut ends, mut decided) = (0, Vec::new(), Vec::new());
    let mut seed = 0;
    while faults < 1000 || seed < 60 {
        let mut world = World::begin(seed, 1000);
        let (_, end) = world.run(200);
        faults += world.faults;
        seed += 1;
        let right = match end {
            End::Done => world.bug.is_none_or(|bug| bug > 200) && !world.lost_gpu && world.step >= 200,
            // The bug repeated, or three attempts in a row made no progress.
            End::Stopped => world.bug.is_some() || idle(&world) >= 3,
            End::HandedBack => world.lost_gpu || world.now < world.held_until.after(Span::seconds(60)),
            End::Asked => world.asked,
        };
        assert!(right, "seed {seed}: {end:?} after {} faults", world.faults);
        ends.push(end);
        decided.append(&mut world.decisions);
    }
    let actions: BTreeSet<&str> = decided.iter().map(|action| action.as_str()).collect();
    for action in ["restart_in_process", "respawn_ranks", "restart_in_job", "wait", "hand_back", "stop"] {
        assert!(actions.contains(action), "no {action} in {actions:?}");
    }
    for end in [End::Done, End::Stopped, End::HandedBack] {
        assert!(ends.contains(&end), "no job ends with {end:?}: {ends:?}");
    }
}

/// The number of decided restarts: an upper bound of those in a row without progress.
fn idle(world: &World) -> usize {
    world.decisions.iter().filter(|action| action.attempt().is_some()).count()
}

#[test]
fn the_same_seed_yields_the_same_decisions() {
    let of = |seed| {
        let mut world = World::begin(seed, 1000);
        let end = world.run(60);
        (end, world.decisions, world.now)
    };
    assert_eq!(of(7), of(7));
}
