//! One job on one host, from its first start to its end: the state machine that the launcher drives.
//!
//! ```text
//!             AttemptStarted            fault or stop or all done
//!  Starting ─────────────────► Running ───────────────────────────► Stopping
//!     ▲  │                                                             │ AttemptEnded
//!     │  └── StartFailed ─────────────────────────────┐                ▼
//!     └─ HeldBack ◄── RestartInJob ── AgentEvidence ◄──── Judging ◄───────────┤
//!        (if the ones before brought    │  └─ Wait ─────┘              │ asked to stop, or all ranks done
//!         nothing, until it is time)    │ Stop, HandBack               │
//!                                       └──────────► Ended ◄───────────┘
//! ```
//!
//! A user's own policy is asked between `AgentEvidence` and the action.
//!
//! A restart that a person ordered asks the host in the same way, without a verdict (`Ordered`).
//!
//! Ranks that wait in their processes (`core::rounds`) continue in the next attempt, or are dismissed (`Stopping`
//! again) before all ranks are started or the job ends.
//!
//! Total: an input that does not fit the state is only recorded.

mod attempt;
mod deciding;
mod evidence;
mod facts;
mod findings;
mod handover;
mod history;
mod host_wait;
mod ordered;
mod ranks;
mod restart;
mod saving;

use crate::policy::Settings;
use crate::protocol::{AgentEvidence, Command, Event, StopWhy};
use mainstay_checkpoint::advice;
use mainstay_model::entry::{Body, Fact, HostOfRanks, JobSpec};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Mono;
use mainstay_progress::goodput::{Ledger, TimeCategory};
use mainstay_progress::memory::JobMemory;
use mainstay_progress::monitor::{Pace, Watch};

use attempt::Course;
use deciding::Waiting;
pub use deciding::{POLICY, policy_problem_fact as policy_trouble};
use evidence::{Decided, Pending};
pub use facts::EXHAUSTED;
use findings::Findings;
pub use findings::{FILE_SYSTEM_ANSWERS, FILE_SYSTEM_SILENT};
pub use handover::HandoverState;
use history::History;
pub use history::{IncidentTimes, Summary, hosts_to_exclude};
use host_wait::HostWait;
pub use ordered::{ORDERS, RANK_EXCLUDED, RESTART_ORDERED, RESTART_WAITS, SAVE_ORDERED};
use ranks::Ranks;
use restart::Restart;
use saving::Saving;

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Starting,
    Running,
    Stopping(StopWhy),
    /// A failure is being judged: the agent is asked, or the job waits for the host.
    Judging {
        exit: i32,
    },
    /// A restart was ordered: the agent is asked, or the job waits for the host.
    Ordered(HostWait),
    /// A restart is decided and delayed.
    HeldBack {
        until: Mono,
    },
    Ended,
}

/// An output of the job.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// To be recorded in the journal.
    Record(Body),
    /// To be carried out.
    Command(Command),
}

/// The job.
#[derive(Clone, Debug)]
pub struct Job {
    spec: JobSpec,
    settings: Settings,
    /// The name of the user's own policy, if there is one.
    user_policy: Option<String>,
    phase: Phase,
    attempt: Attempt,
    course: Course,
    ranks: Ranks,
    /// The exit status if the job was asked to stop.
    stop_requested: Option<i32>,
    /// The exit status if all ranks end well after they were asked to save, and the attempt in which they were.
    save_ordered: Option<(i32, Attempt)>,
    history: History,
    /// The host whose launcher decides, if its name is known.
    led_from: Option<String>,
    findings: Findings,
    pending: Option<Pending>,
    /// The last failure with a decision, if later host evidence may change its verdict.
    decided: Option<Decided>,
    waiting: Waiting,
    restart: Restart,
    /// Resources that the next ranks need and that the launcher last saw in use.
    held: Vec<String>,
    /// When a step was last completed, in any attempt.
    last_step: Option<Mono>,
    ledger: Ledger,
    saving: Saving,
    end: Option<(i32, String, Mono)>,
}

impl Job {
    /// Starts a job: records it and orders the first start.
    pub fn begin(at: Mono, spec: JobSpec, policy: impl Into<Settings>, out: &mut Vec<Output>) -> Job {
        out.push(Output::Record(Body::Fact(Fact::JobStarted(spec.clone()))));
        out.push(Output::Command(Command::start(Attempt(0))));
        Job {
            findings: Findings::new(Watch::new(&spec)),
            history: History { earlier: spec.earlier.clone(), ..History::default() },
            led_from: None,
            spec,
            settings: policy.into(),
            user_policy: None,
            phase: Phase::Starting,
            attempt: Attempt(0),
            course: Course::new(at),
            ranks: Ranks::default(),
            stop_requested: None,
            save_ordered: None,
            pending: None,
            decided: None,
            waiting: Waiting::default(),
            restart: Restart::new(),
            held: Vec::new(),
            last_step: None,
            ledger: Ledger::open(at),
            saving: Saving::default(),
            end: None,
        }
    }

    /// Continues a job that another leader started: its attempt runs with these ranks, or is being started if there
    /// are none. `carried` is `None` if that leader was lost before the first start. This records and orders nothing.
    pub fn resume(
        at: Mono,
        spec: JobSpec,
        policy: impl Into<Settings>,
        carried: Option<HandoverState>,
        running: &[Rank],
    ) -> Job {
        let mut job = Job::begin(at, spec, policy, &mut Vec::new());
        if let Some(carried) = carried {
            carried.restore(&mut job);
        }
        if !running.is_empty() {
            job.ranks.start(running.iter().copied());
            job.findings.begin_attempt(job.attempt, running.to_vec());
            job.phase = Phase::Running;
        }
        job
    }

    /// The state for the next leader.
    pub fn carried(&self) -> HandoverState {
        HandoverState::from_job(self)
    }

    /// Sets the hosts of the ranks of this attempt, in the order of their node ranks.
    pub fn on_hosts(&mut self, hosts: Vec<HostOfRanks>) {
        let number = |(host, number): (&HostOfRanks, u32)| {
            let ranks = host.first_rank.0..host.first_rank.0.saturating_add(host.ranks);
            ranks.map(move |rank| (Rank(rank), number))
        };
        let host_of_rank = hosts.iter().zip(0..).flat_map(number).collect();
        self.findings.watch.set_hosts(hosts.iter().map(|host| host.host.clone()).collect(), host_of_rank);
        self.ranks.hosts = hosts;
    }

    /// Sets the name of the host whose launcher decides.
    pub fn lead_from(&mut self, host: &str) {
        self.led_from = Some(host.to_owned()).filter(|host| !host.is_empty());
    }

    /// Sets the number of ranks of the next attempt.
    fn world_changed(&mut self, ranks: u32) {
        self.spec.world_size = ranks;
        self.findings.watch.set_ranks(ranks);
        self.ranks.resize(ranks);
    }

    /// Adds a user's policy of this name: it is asked before the built-in one decides.
    pub fn advised_by(&mut self, policy: &str) {
        self.user_policy = Some(policy.to_owned());
    }

    /// Handles the next event. Appends the records and commands to `out`, in order.
    pub fn step(&mut self, at: Mono, event: Event, out: &mut Vec<Output>) {
        match event {
            Event::Fact(mut fact) => {
                if let Fact::RanksHung { hang, .. } = &mut fact {
                    hang.hosts = self.ranks.hosts_of(&hang.culprits);
                }
                out.push(Output::Record(Body::Fact(fact.clone())));
                self.fact(at, fact, out);
            }
            Event::Steps { attempt, ranks } if attempt == self.attempt => {
                for (rank, done) in ranks {
                    self.steps(at, rank, &done, out);
                }
            }
            Event::Role { attempt, rank, role, stage } if attempt == self.attempt => {
                self.findings.watch.set_role(rank, role, stage);
            }
            Event::Saved { attempt, step, shards } => {
                // Counts even if its attempt was already over when it was sealed.
                self.saving.newest = self.saving.newest.max(Some(step));
                if attempt == self.attempt {
                    let found = self.findings.watch.saved(step, &shards);
                    self.findings.report(found, out);
                }
            }
            Event::RankContext(known) => {
                let again = self.findings.watch.set_rank_context(known);
                self.findings.report(again, out);
            }
            Event::AgentEvidence(ruling) => self.ruling(at, ruling, out),
            Event::PolicyAnswer { incident, advice } => self.policy_answered(at, incident, advice, out),
            Event::LateEvidence { incident, host_evidence } => {
                let is_last = incident == self.history.last();
                if let Some(decided) = &mut self.decided
                    && is_last
                    && decided.verdict.incident == incident
                {
                    decided.receive(host_evidence, out);
                }
            }
            Event::Held(held) => self.held = held,
            Event::Wake => self.wake(at, out),
            // Of earlier attempts; and what only the group needs.
            Event::Steps { .. }
            | Event::Role { .. }
            | Event::Opened { .. }
            | Event::Holding { .. }
            | Event::Seated { .. }
            | Event::Brought { .. }
            | Event::Looked { .. } => {}
        }
    }

    /// The summary of the job so far; complete once the job has ended.
    pub fn summary(&self, at: Mono) -> Summary {
        let (exit, reason, at) = match &self.end {
            Some((exit, reason, ended)) => (*exit, reason.clone(), *ended),
            None => (0, "still running".to_owned(), at),
        };
        Summary {
            exit,
            reason,
            attempts: self.attempt.0.saturating_add(1),
            saving: advice::advice_for(&self.ledger.accounting(at), self.history.count()),
            accounting: self.ledger.accounting(at),
            incidents: self.history.incidents.clone(),
            exclude: self.history.to_exclude(),
        }
    }

    /// A rank failed: accounts the fault and stops the others, once per attempt.
    fn failure(&mut self, at: Mono, fault_at: Mono, out: &mut Vec<Output>) {
        if self.phase != Phase::Running {
            return;
        }
        let fault_at = self.course.lost_peer.take().map_or(fault_at, |lost| fault_at.min(lost.since));
        self.ledger.enter(fault_at, TimeCategory::Undetected);
        self.ledger.enter(at, TimeCategory::Stopping);
        self.stop(StopWhy::Fault, out);
    }

    fn stop(&mut self, why: StopWhy, out: &mut Vec<Output>) {
        self.phase = Phase::Stopping(why);
        out.push(Output::Command(Command::stop(self.attempt, why)));
    }

    fn stop_requested(&mut self, at: Mono, exit: i32, out: &mut Vec<Output>) {
        self.stop_requested.get_or_insert(exit);
        match self.phase {
            Phase::Running => {
                self.ledger.enter(at, TimeCategory::Finishing);
                self.stop(StopWhy::Requested, out);
            }
            Phase::Judging { .. } | Phase::Ordered(_) | Phase::HeldBack { .. } => {
                self.finish_without(at, exit, "asked to stop".to_owned(), out);
            }
            Phase::Starting | Phase::Stopping(_) | Phase::Ended => {}
        }
    }

    fn finish(&mut self, at: Mono, exit: i32, reason: String, out: &mut Vec<Output>) {
        self.phase = Phase::Ended;
        self.end = Some((exit, reason.clone(), at));
        out.push(Output::Record(Body::Fact(Fact::JobEnded { exit, reason })));
        out.push(Output::Command(Command::finish(exit)));
    }

    /// Whether a save is due by the advice: true once each time. A job whose ranks do not step has nothing to save.
    pub fn save_is_due(&mut self, at: Mono) -> bool {
        self.course.is_stepping() && self.stop_requested.is_none() && self.saving.is_due(at)
    }

    /// Loads what earlier runs of the job learned.
    pub fn recall(&mut self, learned: &JobMemory) {
        self.findings.watch.recall(learned);
        self.history.earlier.clone_from(&learned.rungs);
    }

    /// Adds what this run learned, for the next one.
    pub fn remember(&self, learned: &mut JobMemory) {
        self.findings.watch.remember(learned);
        self.history.remember(learned);
    }

    /// The pace of a rank's last steps compared with its peers'.
    pub fn pace(&self, rank: Rank) -> Pace {
        self.findings.watch.pace(rank)
    }

    /// The last step of this attempt up to which no replica is known to have differed.
    pub fn vouched(&self) -> Option<u64> {
        self.findings.watch.vouched()
    }

    /// The specification of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }
}
