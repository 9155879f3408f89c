//! One job on one host, from its first start to its end: the state machine that the launcher drives.
//!
//! ```text
//!             AttemptStarted            fault or stop or all done
//!  Starting ─────────────────► Running ───────────────────────────► Stopping
//!     ▲  │                                                             │ AttemptEnded
//!     │  └── StartFailed ─────────────────────────────┐                ▼
//!     └────────────── RestartInJob ── Ruling ◄──── Judging ◄───────────┤
//!                                       │ Stop                         │ asked to stop, or all ranks done
//!                                       └──────────► Ended ◄───────────┘
//! ```
//!
//! Ranks that wait in their processes (`core::rounds`) go on in the next attempt, or are dismissed (`Stopping` once more)
//! before all ranks are started or the job ends.
//!
//! Total: an input that does not fit the state is recorded and changes nothing else.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::attribute::catalog::Catalog;
use crate::blame;
use crate::entry::{Body, ExitStatus, Fact, JobSpec, StepDone};
use crate::hang::{Hang, PlaceGroup};
use crate::id::{Attempt, Incident, Rank};
use crate::judge::{RankEnd, hung, judge, start_failed};
use crate::ledger::{Books, Ledger, Spending};
use crate::policy::{self, Budget, Case, PastFailure};
use crate::rounds::{self, Rung};
use crate::running::Watch;
use crate::testimony::Testimony;
use crate::time::{Mono, Span};
use crate::verdict::{Action, DecidedBy, Decision, Outcome, Verdict};

/// Progress goes into the journal this often.
const PROGRESS_EVERY: Span = Span::seconds(10);

/// What the launcher tells the job.
#[derive(Clone, Debug)]
pub enum Input {
    /// Something was observed; it goes into the journal.
    Fact(Fact),
    /// A rank completed steps; these are too many for the journal.
    Steps {
        /// In which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// The steps, oldest first.
        done: Vec<StepDone>,
    },
    /// The agent's answer to a proposal; none if there is no agent or it did not answer in time.
    Ruling(Option<Ruling>),
}

/// The agent's word on a proposed decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Ruling {
    /// The incident that the proposal was about; an answer to another one is ignored.
    pub incident: Incident,
    /// What is to be done instead; none if the proposal is agreed to.
    pub instead: Option<(Action, String)>,
    /// What the host has to say of the failure.
    pub testimony: Testimony,
}

/// What the job asks of the launcher.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// To be written into the journal.
    Record(Body),
    /// To be carried out.
    Order(Order),
}

/// What the launcher's hands are to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Start all ranks; answered by `AttemptStarted` or `StartFailed`.
    StartRanks(Attempt),
    /// Start the ranks that are gone, and have those that wait in their processes go on; answered as `StartRanks`.
    StartRound(Attempt),
    /// Stop what is left of the attempt, its whole process tree; answered by `AttemptEnded`.
    StopRanks {
        /// Which attempt.
        attempt: Attempt,
        /// Why, which sets the grace that the ranks are given.
        why: StopWhy,
    },
    /// Write down what all ranks of the attempt are at; answered by `EvidenceTaken` or `HangPassed`.
    TakeEvidence(Attempt),
    /// Ask the agent; answered by [`Input::Ruling`].
    Consult {
        /// The verdict.
        verdict: Box<Verdict>,
        /// What would be done without an agent.
        proposal: Decision,
    },
    /// The job is over.
    Finish {
        /// The status with which the launcher exits.
        exit: i32,
    },
}

/// Why ranks are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopWhy {
    /// A rank failed; the others can only wait for it. Ranks that can stay in their processes leave the attempt in them.
    Fault,
    /// Ranks that wait in their processes are not to go on in them.
    Dismissed,
    /// The launcher was asked to stop: the ranks may want to save.
    Requested,
    /// All ranks are done; what they left behind has to go.
    Done,
}

/// The times of one failure, for people: all on the host's monotonic clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncidentTimes {
    /// Which failure.
    pub incident: Incident,
    /// What it was, in one line.
    pub headline: String,
    /// What was decided, in plain words.
    pub decision: String,
    /// When it happened.
    pub fault_at: Mono,
    /// When the launcher knew.
    pub detected_at: Mono,
    /// When no process of the failed attempt was left.
    pub stopped_at: Option<Mono>,
    /// When it was decided what to do.
    pub decided_at: Option<Mono>,
    /// When the new ranks' processes were there.
    pub started_at: Option<Mono>,
    /// When the last of the new ranks' heartbeat clients connected.
    pub connected_at: Option<Mono>,
    /// When all ranks had completed a step again.
    pub first_step_at: Option<Mono>,
    /// The newest step reached before.
    pub reached_before: Option<u64>,
    /// The first step completed after.
    pub first_step: Option<u64>,
}

/// How a job went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The status with which the launcher exits.
    pub exit: i32,
    /// Why, in plain words.
    pub reason: String,
    /// How often the ranks were started.
    pub attempts: u32,
    /// Where the time went.
    pub books: Books,
    /// Its failures.
    pub incidents: Vec<IncidentTimes>,
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Starting,
    Running,
    Stopping(StopWhy),
    Judging { exit: i32 },
    Ended,
}

/// What is known of a rank in the current attempt.
#[derive(Clone, Debug, Default)]
struct RankState {
    connected: bool,
    end: RankEnd,
    first: Option<StepDone>,
    newest: Option<StepDone>,
}

/// What is done once the ranks that waited in their processes are gone.
#[derive(Clone, Debug, PartialEq)]
enum Afterwards {
    Start,
    Finish { exit: i32, reason: String },
}

/// A failure that is judged and not decided on yet.
#[derive(Clone, Debug)]
struct Pending {
    verdict: Verdict,
    proposal: Decision,
    /// The verdict before anybody's words were heard, and how the ranks ended: for judging it anew.
    heard: Option<(Verdict, BTreeMap<Rank, RankEnd>)>,
}

/// The job.
#[derive(Clone, Debug)]
pub struct Job {
    spec: JobSpec,
    budget: Budget,
    phase: Phase,
    attempt: Attempt,
    ranks: BTreeMap<Rank, RankState>,
    /// Ranks that sent heartbeats in this or an earlier attempt: after a restart all of them are waited for.
    beating: BTreeSet<Rank>,
    /// The rank of this attempt whose steps are booked: the first that completed one.
    lead: Option<Rank>,
    stop_requested: Option<i32>,
    /// A hang of this attempt, with what was found at the ranks.
    hang: Option<(Box<Hang>, Vec<String>)>,
    out_of_memory_kills: u64,
    attempt_began: Mono,
    stepping: bool,
    last_progress: Mono,
    incidents: Vec<IncidentTimes>,
    past: Vec<PastFailure>,
    /// Looks at what the ranks tell of their steps.
    watch: Watch,
    pending: Option<Pending>,
    /// Ranks that have left the last attempt and wait in their processes.
    waiting: Vec<Rank>,
    /// Whether the current attempt began with ranks that stayed in their processes.
    kept_processes: bool,
    afterwards: Option<Afterwards>,
    ledger: Ledger,
    end: Option<(i32, String, Mono)>,
}

impl Job {
    /// Begins a job: records it and orders the first start.
    pub fn begin(at: Mono, spec: JobSpec, budget: Budget, out: &mut Vec<Output>) -> Job {
        out.push(Output::Record(Body::Fact(Fact::JobStarted(spec.clone()))));
        out.push(Output::Order(Order::StartRanks(Attempt(0))));
        Job {
            watch: Watch::new(&spec),
            spec,
            budget,
            phase: Phase::Starting,
            attempt: Attempt(0),
            ranks: BTreeMap::new(),
            beating: BTreeSet::new(),
            lead: None,
            stop_requested: None,
            hang: None,
            out_of_memory_kills: 0,
            attempt_began: at,
            stepping: false,
            last_progress: at,
            incidents: Vec::new(),
            past: Vec::new(),
            pending: None,
            waiting: Vec::new(),
            kept_processes: false,
            afterwards: None,
            ledger: Ledger::open(at),
            end: None,
        }
    }

    /// Takes in the next input; what is to be recorded and done is appended to `out`, in order.
    pub fn step(&mut self, at: Mono, input: Input, out: &mut Vec<Output>) {
        match input {
            Input::Fact(fact) => {
                out.push(Output::Record(Body::Fact(fact.clone())));
                self.fact(at, fact, out);
            }
            Input::Steps { attempt, rank, done } if attempt == self.attempt => {
                self.steps(at, rank, &done, out)
            }
            Input::Steps { .. } => {}
            Input::Ruling(ruling) => self.ruling(at, ruling, out),
        }
    }

    /// How the job went, or goes: complete once it has ended.
    pub fn summary(&self, at: Mono) -> Summary {
        let (exit, reason, at) = match &self.end {
            Some((exit, reason, ended)) => (*exit, reason.clone(), *ended),
            None => (0, "still running".to_owned(), at),
        };
        Summary {
            exit,
            reason,
            attempts: self.attempt.0.saturating_add(1),
            books: self.ledger.books(at),
            incidents: self.incidents.clone(),
        }
    }

    fn fact(&mut self, at: Mono, fact: Fact, out: &mut Vec<Output>) {
        match fact {
            Fact::AttemptStarted { attempt, ranks, .. } => {
                if self.phase != Phase::Starting || attempt != self.attempt {
                    return;
                }
                self.ranks = ranks.iter().map(|started| (started.rank, RankState::default())).collect();
                self.watch.begin_attempt(attempt, self.ranks.keys().copied().collect());
                self.stepping = false;
                self.attempt_began = at;
                self.lead = None;
                self.hang = None;
                self.waiting.clear();
                self.ledger.begin_attempt();
                self.with_incident(|incident| incident.started_at = Some(at));
                self.phase = Phase::Running;
                if self.stop_requested.is_some() {
                    self.stop(StopWhy::Requested, out);
                }
            }
            Fact::StartFailed { attempt, error } => {
                if self.phase == Phase::Starting && attempt == self.attempt {
                    let verdict = start_failed(self.next_incident(), attempt, &error, at);
                    self.propose(at, verdict, 1, out);
                }
            }
            Fact::RankConnected { attempt, rank, .. } if attempt == self.attempt => self.connected(at, rank),
            Fact::RankRaised { attempt, rank, note, .. } if attempt == self.attempt => {
                let fault_at = note.at;
                if let Some(state) = self.ranks.get_mut(&rank) {
                    state.end.detected_at.get_or_insert(at);
                    // A rank may raise again while it cleans up: what came first is what it failed of.
                    state.end.note.get_or_insert(note);
                }
                self.failure(at, fault_at, out);
            }
            Fact::RankExited { attempt, rank, status, step, after_stop, stderr_tail, .. }
                if attempt == self.attempt =>
            {
                if let Some(state) = self.ranks.get_mut(&rank) {
                    state.end.detected_at.get_or_insert(at);
                    state.end.exit = Some((status, at));
                    state.end.after_stop = after_stop;
                    state.end.step = step;
                    state.end.stderr_tail = stderr_tail;
                }
                if !status.is_success() {
                    self.failure(at, at, out);
                } else if self.phase == Phase::Running
                    && self.ranks.values().all(|rank| rank.end.exit.is_some())
                {
                    self.ledger.enter(at, Spending::Finishing);
                    self.stop(StopWhy::Done, out);
                }
            }
            Fact::RanksHung { attempt, hang, acts } if attempt == self.attempt => {
                if acts && self.phase == Phase::Running && self.hang.is_none() {
                    self.hang = Some((hang, Vec::new()));
                    out.push(Output::Order(Order::TakeEvidence(attempt)));
                }
            }
            Fact::HangPassed { attempt, .. } if attempt == self.attempt && self.phase == Phase::Running => {
                self.hang = None;
            }
            Fact::EvidenceTaken { attempt, file, groups, summary, .. } if attempt == self.attempt => {
                if let Some((hang, found)) = &mut self.hang {
                    hang.refine(&groups);
                    *found = groups.iter().map(PlaceGroup::to_string).collect();
                    found.extend(summary);
                    found.extend(file.map(|file| format!("what all ranks were at: {file}")));
                    let since = hang.since;
                    self.failure(at, since, out);
                }
            }
            Fact::AttemptEnded { attempt, waiting, .. } if attempt == self.attempt => {
                self.attempt_ended(at, waiting, out);
            }
            Fact::StopRequested { exit, .. } => self.stop_requested(at, exit, out),
            Fact::OutOfMemoryKills { count } => {
                self.out_of_memory_kills = self.out_of_memory_kills.saturating_add(count);
            }
            // Facts of attempts that are over, and those that only readers want.
            Fact::RankConnected { .. }
            | Fact::RankRaised { .. }
            | Fact::RankExited { .. }
            | Fact::AttemptEnded { .. }
            | Fact::RanksHung { .. }
            | Fact::HangPassed { .. }
            | Fact::EvidenceTaken { .. }
            | Fact::RankRefused { .. }
            | Fact::PagesUnavailable { .. }
            | Fact::RanksStepping { .. }
            | Fact::Progress { .. }
            | Fact::AgentFound { .. }
            | Fact::AgentLost { .. }
            | Fact::AgentStarted { .. }
            | Fact::AgentStopped
            | Fact::JobStarted(_)
            | Fact::LauncherLost { .. }
            | Fact::Xid(_)
            | Fact::Sxid(_)
            | Fact::KernelReport(_)
            | Fact::KernelLinesLeftOut { .. }
            | Fact::KernelLogGap { .. }
            | Fact::Observed(_)
            | Fact::HostTestified { .. }
            | Fact::GpuDriverSilent { .. }
            | Fact::GpuDriverAnswered { .. }
            | Fact::JobEnded { .. } => {}
        }
    }

    fn connected(&mut self, at: Mono, rank: Rank) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.connected = true;
            self.beating.insert(rank);
        }
        if self.ledger.state() == Spending::Starting {
            self.ledger.enter(at, Spending::Initialising);
        }
        if self.ranks.values().all(|state| state.connected) {
            self.with_incident(|incident| {
                incident.connected_at.get_or_insert(at);
            });
        }
    }

    /// A rank failed: the fault is booked and the others are stopped, once per attempt.
    fn failure(&mut self, at: Mono, fault_at: Mono, out: &mut Vec<Output>) {
        if self.phase != Phase::Running {
            return;
        }
        self.ledger.enter(fault_at, Spending::Undetected);
        self.ledger.enter(at, Spending::Stopping);
        self.stop(StopWhy::Fault, out);
    }

    fn stop(&mut self, why: StopWhy, out: &mut Vec<Output>) {
        self.phase = Phase::Stopping(why);
        out.push(Output::Order(Order::StopRanks { attempt: self.attempt, why }));
    }

    fn stop_requested(&mut self, at: Mono, exit: i32, out: &mut Vec<Output>) {
        self.stop_requested.get_or_insert(exit);
        match self.phase {
            Phase::Running => {
                self.ledger.enter(at, Spending::Finishing);
                self.stop(StopWhy::Requested, out);
            }
            Phase::Judging { .. } => self.finish_without(at, exit, "asked to stop".to_owned(), out),
            Phase::Starting | Phase::Stopping(_) | Phase::Ended => {}
        }
    }

    fn attempt_ended(&mut self, at: Mono, waiting: Vec<Rank>, out: &mut Vec<Output>) {
        let Phase::Stopping(why) = self.phase else { return };
        self.waiting = if why == StopWhy::Fault { waiting } else { Vec::new() };
        if let Some(exit) = self.stop_requested {
            return self.finish_without(at, exit, "asked to stop".to_owned(), out);
        }
        match why {
            StopWhy::Dismissed => match self.afterwards.take() {
                Some(Afterwards::Finish { exit, reason }) => self.finish(at, exit, reason, out),
                Some(Afterwards::Start) | None => self.start_next(at, out),
            },
            StopWhy::Done | StopWhy::Requested => self.finish(at, 0, "all ranks are done".to_owned(), out),
            StopWhy::Fault => {
                let ends: BTreeMap<Rank, RankEnd> = self
                    .ranks
                    .iter()
                    .map(|(rank, state)| {
                        // A journal that is replayed has no steps, but tells where each rank ended.
                        let step = state.newest.map(|newest| newest.step).or(state.end.step);
                        (
                            *rank,
                            RankEnd { step, heartbeats: state.connected, ..state.end.clone() }
                                .with_last_words(),
                        )
                    })
                    .collect();
                if let Some((hang, found)) = self.hang.take() {
                    let verdict = hung(self.next_incident(), self.attempt, &hang, found);
                    self.ledger.enter(at, Spending::Deciding);
                    return self.propose(at, verdict, 1, out);
                }
                let mut verdict = judge(self.next_incident(), self.attempt, &ends, self.out_of_memory_kills);
                // The catalogue is compiled in and tested; without it the verdict says less, and nothing wrong.
                let first = verdict.clone();
                if let Ok(catalog) = Catalog::built_in() {
                    blame::complete(&mut verdict, catalog, &ends, &Testimony::default());
                }
                let exit = exit_of(&verdict, &ends);
                self.ledger.enter(at, Spending::Deciding);
                self.propose(at, verdict, exit, out);
                if let Some(pending) = &mut self.pending {
                    pending.heard = Some((first, ends));
                }
            }
        }
    }

    /// What the policy says, by the mildest way that there is to do it.
    fn decide(&self, case: Case<'_>) -> (Action, String) {
        let (action, why) = policy::decide(self.budget, case);
        let rung = Rung {
            waiting: self.waiting.len(),
            ranks: self.ranks.len(),
            kept_processes: self.kept_processes,
            stepped: self.lead.is_some(),
        };
        let (action, how) = rounds::mildest(action, rung);
        (action, why + how)
    }

    /// Records the verdict, makes the proposal and asks the agent for its word.
    fn propose(&mut self, at: Mono, verdict: Verdict, exit: i32, out: &mut Vec<Output>) {
        let lived = verdict.fault_at.since(self.attempt_began);
        let case = Case { verdict: &verdict, past: &self.past, exit, lived, now: at };
        let (action, why) = self.decide(case);
        let proposal = Decision { incident: verdict.incident, action, why, by: DecidedBy::Launcher };
        out.push(Output::Record(Body::Verdict(verdict.clone())));
        out.push(Output::Order(Order::Consult {
            verdict: Box::new(verdict.clone()),
            proposal: proposal.clone(),
        }));
        self.incidents.push(IncidentTimes {
            incident: verdict.incident,
            headline: verdict.headline.clone(),
            decision: String::new(),
            fault_at: verdict.fault_at,
            detected_at: verdict.detected_at,
            stopped_at: Some(at),
            decided_at: None,
            started_at: None,
            connected_at: None,
            first_step_at: None,
            reached_before: self.ledger.reached(),
            first_step: None,
        });
        self.phase = Phase::Judging { exit };
        self.pending = Some(Pending { verdict, proposal, heard: None });
    }

    /// Judges anew with what the host has to say. A verdict that changes is recorded again; it is what is decided on.
    fn hear(&self, at: Mono, exit: i32, pending: &mut Pending, testimony: &Testimony, out: &mut Vec<Output>) {
        let (Some((first, ends)), Ok(catalog)) = (&pending.heard, Catalog::built_in()) else { return };
        let mut verdict = first.clone();
        blame::complete(&mut verdict, catalog, ends, testimony);
        if verdict == pending.verdict {
            return;
        }
        let lived = verdict.fault_at.since(self.attempt_began);
        let case = Case { verdict: &verdict, past: &self.past, exit, lived, now: at };
        (pending.proposal.action, pending.proposal.why) = self.decide(case);
        out.push(Output::Record(Body::Verdict(verdict.clone())));
        pending.verdict = verdict;
    }

    fn ruling(&mut self, at: Mono, ruling: Option<Ruling>, out: &mut Vec<Output>) {
        let Phase::Judging { exit } = self.phase else { return };
        let fits = |ruling: &Ruling| {
            self.pending.as_ref().is_some_and(|pending| pending.verdict.incident == ruling.incident)
        };
        if ruling.as_ref().is_some_and(|ruling| !fits(ruling)) {
            return;
        }
        let Some(mut pending) = self.pending.take() else { return };
        if let Some(testimony) =
            ruling.as_ref().map(|ruling| &ruling.testimony).filter(|told| !told.is_empty())
        {
            let (incident, testimony) = (pending.verdict.incident, testimony.clone());
            self.hear(at, exit, &mut pending, &testimony, out);
            out.push(Output::Record(Body::Fact(Fact::HostTestified { incident, testimony })));
        }
        let Pending { verdict, proposal: mut decision, .. } = pending;
        if let Some(ruling) = ruling {
            decision.by = DecidedBy::Agent;
            if let Some((action, why)) = ruling.instead {
                decision.action = action;
                decision.why = why;
            }
        }
        out.push(Output::Record(Body::Decision(decision.clone())));
        self.with_incident(|incident| {
            incident.decided_at = Some(at);
            incident.decision = decision.why.clone();
        });
        match decision.action {
            Action::RestartInProcess { .. } | Action::RespawnRanks { .. } | Action::RestartInJob { .. } => {
                let lived = verdict.fault_at.since(self.attempt_began);
                self.past.push(PastFailure {
                    decided_at: at,
                    cause: verdict.cause,
                    step: verdict.step,
                    lived,
                });
                self.kept_processes = decision.action.keeps_processes() && !self.waiting.is_empty();
                if self.kept_processes || self.waiting.is_empty() {
                    self.start_next(at, out);
                } else {
                    self.dismiss(Afterwards::Start, out);
                }
            }
            Action::Stop { exit: wanted } => {
                let exit = if wanted == 0 { exit.max(1) } else { wanted };
                self.finish_without(at, exit, format!("{}; {}", verdict.headline, decision.why), out);
            }
        }
    }

    fn start_next(&mut self, at: Mono, out: &mut Vec<Output>) {
        self.attempt = self.attempt.next();
        self.out_of_memory_kills = 0;
        self.phase = Phase::Starting;
        self.ledger.enter(at, Spending::Starting);
        let order = if self.kept_processes { Order::StartRound } else { Order::StartRanks };
        out.push(Output::Order(order(self.attempt)));
    }

    /// Ends the processes of ranks that wait in them, and does the rest when they are gone.
    fn dismiss(&mut self, afterwards: Afterwards, out: &mut Vec<Output>) {
        self.afterwards = Some(afterwards);
        self.waiting.clear();
        self.stop(StopWhy::Dismissed, out);
    }

    /// Ends the job, once no rank waits in its process any more.
    fn finish_without(&mut self, at: Mono, exit: i32, reason: String, out: &mut Vec<Output>) {
        self.pending = None;
        if self.waiting.is_empty() {
            self.finish(at, exit, reason, out);
        } else {
            self.dismiss(Afterwards::Finish { exit, reason }, out);
        }
    }

    fn finish(&mut self, at: Mono, exit: i32, reason: String, out: &mut Vec<Output>) {
        self.phase = Phase::Ended;
        self.end = Some((exit, reason.clone(), at));
        out.push(Output::Record(Body::Fact(Fact::JobEnded { exit, reason })));
        out.push(Output::Order(Order::Finish { exit }));
    }

    fn steps(&mut self, at: Mono, rank: Rank, done: &[StepDone], out: &mut Vec<Output>) {
        let Some(state) = self.ranks.get_mut(&rank) else { return };
        let Some(newest) = done.last() else { return };
        state.first.get_or_insert(done[0]);
        state.newest = Some(*newest);
        // One rank's steps are the job's, and the same rank's for the whole attempt: else some would count twice.
        if *self.lead.get_or_insert(rank) == rank {
            if matches!(self.ledger.state(), Spending::Starting | Spending::Initialising) {
                let began = if done[0].first { done[0].end } else { done[0].start };
                self.ledger.enter(began, Spending::Training);
            }
            for step in done {
                self.ledger.step(step);
            }
        }
        self.announce_progress(at, out);
        let found = self.watch.steps(rank, done);
        out.extend(found.into_iter().map(|finding| Output::Record(Body::Finding(finding))));
    }

    /// Tells, once per attempt, that all ranks are stepping; and from then on, now and then, how far they are.
    fn announce_progress(&mut self, at: Mono, out: &mut Vec<Output>) {
        let beating = self.ranks.iter().filter(|(rank, _)| self.beating.contains(rank));
        let stepped: Option<Vec<(StepDone, StepDone)>> =
            beating.map(|(_, state)| Some((state.first?, state.newest?))).collect();
        let Some(stepped) = stepped.filter(|stepped| !stepped.is_empty()) else { return };
        let attempt = self.attempt;
        if !self.stepping {
            self.stepping = true;
            self.last_progress = at;
            // Looks at the pages are rarer than quick steps: the first step counts, not the newest by now.
            let step = stepped.iter().map(|(first, _)| first.step).max().unwrap_or(0);
            let last = stepped.iter().map(|(first, _)| first.end).max().unwrap_or(at);
            out.push(Output::Record(Body::Fact(Fact::RanksStepping { attempt, step })));
            self.tell_outcome(last, step, out);
        } else if at.since(self.last_progress) >= PROGRESS_EVERY {
            self.last_progress = at;
            let step = stepped.iter().map(|(_, newest)| newest.step).min().unwrap_or(0);
            let loss = stepped.iter().find_map(|(_, newest)| newest.loss);
            out.push(Output::Record(Body::Fact(Fact::Progress { attempt, step, loss })));
        }
    }

    /// What came of the last restart, told at the first step that all ranks completed after it.
    fn tell_outcome(&mut self, at: Mono, step: u64, out: &mut Vec<Output>) {
        let attempt = self.attempt;
        let Some(incident) = self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none())
        else {
            return;
        };
        incident.first_step_at = Some(at);
        incident.first_step = Some(step);
        let reached_before = incident.reached_before.unwrap_or(0);
        out.push(Output::Record(Body::Outcome(Outcome {
            incident: incident.incident,
            attempt,
            step,
            reached_before,
            steps_lost: (reached_before + 1).saturating_sub(step),
            to_ranks_started: incident.started_at.unwrap_or(at).since(incident.fault_at),
            to_ranks_connected: incident.connected_at.map(|connected| connected.since(incident.fault_at)),
            to_first_step: at.since(incident.fault_at),
        })));
    }

    fn next_incident(&self) -> Incident {
        Incident(self.incidents.len() as u64 + 1)
    }

    fn with_incident(&mut self, change: impl FnOnce(&mut IncidentTimes)) {
        if let Some(incident) = self.incidents.last_mut().filter(|incident| incident.first_step_at.is_none())
        {
            change(incident);
        }
    }

    /// What the job runs.
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }
}

/// The status with which the launcher exits after this failure: the culprit's own, a signal as 128 + its number.
/// A rank that raised may have been stopped before it could exit; Python would have exited with 1.
fn exit_of(verdict: &Verdict, ends: &BTreeMap<Rank, RankEnd>) -> i32 {
    let end = verdict.culprit.and_then(|rank| ends.get(&rank));
    match end {
        Some(RankEnd { note: Some(_), .. }) | None => 1,
        Some(end) => end.exit.map_or(1, |(status, _)| match status {
            ExitStatus::Code(0) => 1,
            status => status.as_shell_code(),
        }),
    }
}
