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

mod awaited;
mod deciding;
mod evidence;
mod facts;
mod handover;
mod late;
mod lost_peer;
mod ordered;
mod problems;
mod progress;
mod restart;
mod saving;
mod times;

use std::collections::{BTreeMap, BTreeSet};

use crate::policy::{self, Experience, PastFailure, Rung, Settings};
use crate::protocol::{AgentEvidence, Command, Event, StopWhy};
use mainstay_checkpoint::advice;
use mainstay_diagnosis::root_rank::RankEnd;
use mainstay_hang::Hang;
use mainstay_model::entry::{Body, Fact, HostOfRanks, JobSpec, StepDone};
use mainstay_model::finding::Finding;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Verdict;
use mainstay_progress::goodput::{Ledger, TimeCategory};
use mainstay_progress::memory::JobMemory;
use mainstay_progress::monitor::{Pace, Watch};

use awaited::AwaitedConditions;
use deciding::{Afterwards, Pending};
pub use deciding::{POLICY, policy_problem_fact as policy_trouble};
pub use facts::EXHAUSTED;
pub use handover::HandoverState;
use late::Decided;
use lost_peer::LostPeer;
use ordered::Ordered;
pub use ordered::{ORDERS, RANK_EXCLUDED, RESTART_ORDERED, RESTART_WAITS, SAVE_ORDERED};
pub use problems::{FILE_SYSTEM_ANSWERS, FILE_SYSTEM_SILENT};
use restart::Overdue;
use saving::Saving;
pub use times::{IncidentTimes, Summary};

/// The exit status of a job whose ranks could not be started (`EX_SOFTWARE` of `sysexits.h`).
const NOT_STARTED_EXIT: i32 = 70;

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
    Ordered(Ordered),
    /// A restart is decided and delayed.
    HeldBack {
        until: Mono,
    },
    Ended,
}

/// The state of a rank in the current attempt.
#[derive(Clone, Debug, Default)]
struct RankState {
    connected: bool,
    /// When the kernel started to tear down its process, if that was seen.
    ending_at: Option<Mono>,
    end: RankEnd,
    first: Option<StepDone>,
    newest: Option<StepDone>,
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
    ranks: BTreeMap<Rank, RankState>,
    asked: AwaitedConditions,
    /// Ranks that sent heartbeats in this or an earlier attempt. After a restart the job waits for all of them.
    beating: BTreeSet<Rank>,
    /// The rank of this attempt whose steps are accounted: the first that completed one.
    lead: Option<Rank>,
    stop_requested: Option<i32>,
    /// The exit status if all ranks end well after they were asked to save, and the attempt in which they were.
    save_ordered: Option<(i32, Attempt)>,
    /// A hang of this attempt, with the evidence from the ranks.
    hang: Option<(Box<Hang>, Vec<String>)>,
    out_of_memory_kills: u64,
    /// Why the host had no process, thread or file descriptor left for this attempt.
    exhausted: Option<String>,
    attempt_began: Mono,
    stepping: bool,
    last_progress: Mono,
    incidents: Vec<IncidentTimes>,
    past: Vec<PastFailure>,
    /// Watches the step times of the ranks.
    watch: Watch,
    /// The hosts of the ranks of this attempt, for messages; empty if there is one host.
    hosts: Vec<HostOfRanks>,
    /// Findings of this attempt that are not over.
    standing: Vec<Finding>,
    pending: Option<Pending>,
    /// The last failure with a decision, if later host evidence may change its verdict.
    decided: Option<Decided>,
    /// Set while ranks have lost a peer that is not identified yet: since when, and until when the job waits for the
    /// peer's end.
    lost_peer: Option<LostPeer>,
    /// Ranks that have left the last attempt and wait in their processes.
    waiting: Vec<Rank>,
    /// The rung that starts the next attempt.
    rung: Rung,
    /// What to do once the waiting ranks have ended.
    afterwards: Option<Afterwards>,
    /// The longest that a start of all or some ranks took until all had completed a step.
    longest_start: Option<Span>,
    /// When the restart in progress is abandoned if it has not completed a step.
    restart_until: Option<(Mono, Overdue)>,
    /// The restart that was abandoned.
    overdue: Option<Overdue>,
    /// Resources that the next ranks need and that the launcher last saw in use.
    held: Vec<String>,
    /// When a step was last completed, in any attempt.
    last_step: Option<Mono>,
    /// The newest step that all ranks have saved and sealed in any attempt; and the same at the start of this
    /// attempt.
    saved: (Option<u64>, Option<u64>),
    /// What earlier runs learned about rungs.
    earlier: Vec<Experience>,
    ledger: Ledger,
    saving: Saving,
    end: Option<(i32, String, Mono)>,
}

impl Job {
    /// Starts a job: records it and orders the first start.
    pub fn begin(at: Mono, spec: JobSpec, policy: impl Into<Settings>, out: &mut Vec<Output>) -> Job {
        out.push(Output::Record(Body::Fact(Fact::JobStarted(spec.clone()))));
        let earlier = spec.earlier.clone();
        out.push(Output::Command(Command::start(Attempt(0))));
        Job {
            watch: Watch::new(&spec),
            hosts: Vec::new(),
            standing: Vec::new(),
            spec,
            settings: policy.into(),
            user_policy: None,
            phase: Phase::Starting,
            attempt: Attempt(0),
            ranks: BTreeMap::new(),
            asked: AwaitedConditions::default(),
            beating: BTreeSet::new(),
            lead: None,
            stop_requested: None,
            save_ordered: None,
            hang: None,
            out_of_memory_kills: 0,
            exhausted: None,
            attempt_began: at,
            stepping: false,
            last_progress: at,
            incidents: Vec::new(),
            past: Vec::new(),
            pending: None,
            decided: None,
            lost_peer: None,
            waiting: Vec::new(),
            rung: Rung::All,
            afterwards: None,
            longest_start: None,
            restart_until: None,
            overdue: None,
            held: Vec::new(),
            last_step: None,
            saved: (None, None),
            earlier,
            ledger: Ledger::open(at),
            saving: Saving::default(),
            end: None,
        }
    }

    /// Sets the hosts of the ranks of this attempt, in the order of their node ranks.
    pub fn on_hosts(&mut self, hosts: Vec<HostOfRanks>) {
        let number = |(host, number): (&HostOfRanks, u32)| {
            let ranks = host.first_rank.0..host.first_rank.0.saturating_add(host.ranks);
            ranks.map(move |rank| (Rank(rank), number))
        };
        let host_of_rank = hosts.iter().zip(0..).flat_map(number).collect();
        self.watch.set_hosts(hosts.iter().map(|host| host.host.clone()).collect(), host_of_rank);
        self.hosts = hosts;
    }

    /// Sets the number of ranks of the next attempt.
    fn world_changed(&mut self, ranks: u32) {
        self.spec.world_size = ranks;
        self.watch.set_ranks(ranks);
        // Ranks that no longer exist are not waited for.
        self.beating.retain(|rank| rank.0 < ranks);
    }

    /// Adds the host where a failure started, if there are several.
    pub(super) fn locate(&self, verdict: &mut Verdict) {
        let Some(culprit) = verdict.culprit else { return };
        let Some(HostOfRanks { host, node_rank, .. }) = HostOfRanks::find(&self.hosts, culprit) else {
            return;
        };
        verdict.evidence.push(format!("{culprit} ran on host {host} (node rank {node_rank})"));
        if let Some(rest) = verdict.headline.strip_prefix(&format!("{culprit} ")).map(str::to_owned)
            && !rest.starts_with("on host ")
        {
            verdict.headline = format!("{culprit} on host {host} {rest}");
        }
        verdict.host = Some(host.clone());
    }

    /// Adds the hosts of the culprits to a hang.
    fn locate_hang(&self, fact: &mut Fact) {
        let Fact::RanksHung { hang, .. } = fact else { return };
        hang.hosts = self.hosts_of(&hang.culprits);
    }

    fn hosts_of(&self, ranks: &[Rank]) -> Vec<String> {
        let host = |rank: &Rank| HostOfRanks::find(&self.hosts, *rank).map(|host| host.host.clone());
        let mut hosts: Vec<String> = ranks.iter().filter_map(host).collect();
        hosts.dedup();
        hosts
    }

    /// Adds a user's policy of this name: it is asked before the built-in one decides.
    pub fn advised_by(&mut self, policy: &str) {
        self.user_policy = Some(policy.to_owned());
    }

    /// Handles the next event. Appends the records and commands to `out`, in order.
    pub fn step(&mut self, at: Mono, event: Event, out: &mut Vec<Output>) {
        match event {
            Event::Fact(mut fact) => {
                self.locate_hang(&mut fact);
                out.push(Output::Record(Body::Fact(fact.clone())));
                self.fact(at, fact, out);
            }
            Event::Steps { attempt, ranks } if attempt == self.attempt => {
                for (rank, done) in ranks {
                    self.steps(at, rank, &done, out);
                }
            }
            Event::Role { attempt, rank, role, stage } if attempt == self.attempt => {
                self.watch.set_role(rank, role, stage);
            }
            Event::Saved { attempt, step, shards } => {
                // Counts even if its attempt was already over when it was sealed.
                self.saved.0 = self.saved.0.max(Some(step));
                if attempt == self.attempt {
                    let found = self.watch.saved(step, &shards);
                    self.report_found(found, out);
                }
            }
            Event::RankContext(known) => {
                let again = self.watch.set_rank_context(known);
                self.report_found(again, out);
            }
            Event::AgentEvidence(ruling) => self.ruling(at, ruling, out),
            Event::PolicyAnswer { incident, advice } => self.policy_answered(at, incident, advice, out),
            Event::LateEvidence { incident, host_evidence } => {
                self.receive_late(incident, host_evidence, out)
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
            saving: advice::advice_for(&self.ledger.accounting(at), self.failures()),
            accounting: self.ledger.accounting(at),
            incidents: self.incidents.clone(),
        }
    }

    /// A rank failed: accounts the fault and stops the others, once per attempt.
    fn failure(&mut self, at: Mono, fault_at: Mono, out: &mut Vec<Output>) {
        if self.phase != Phase::Running {
            return;
        }
        let fault_at = self.lost_peer.take().map_or(fault_at, |lost| fault_at.min(lost.since));
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

    fn with_incident(&mut self, change: impl FnOnce(&mut IncidentTimes)) {
        if let Some(incident) = self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none())
        {
            change(incident);
        }
    }

    /// Loads what earlier runs of the job learned.
    pub fn recall(&mut self, learned: &JobMemory) {
        self.watch.recall(learned);
        self.earlier.clone_from(&learned.rungs);
    }

    /// Adds what this run learned, for the next one.
    pub fn remember(&self, learned: &mut JobMemory) {
        self.watch.remember(learned);
        let failed_again = self.incidents.len() > self.past.len();
        learned.rungs = policy::experiences(&self.earlier, &self.past, failed_again);
    }

    /// The pace of a rank's last steps compared with its peers'.
    pub fn pace(&self, rank: Rank) -> Pace {
        self.watch.pace(rank)
    }

    /// The last step of this attempt up to which no replica is known to have differed.
    pub fn vouched(&self) -> Option<u64> {
        self.watch.vouched()
    }

    /// The specification of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }
}
