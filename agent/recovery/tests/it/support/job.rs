//! The state machine of a job of two ranks, driven as the launcher drives it.

use mainstay_model::entry::{Body, Entry, ExitStatus, Fact, JobSpec, Note, StartedRank, StepDone};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_model::verdict::{Action, Verdict};
use mainstay_recovery::job::{Job, Output};
use mainstay_recovery::policy::{Budget, Settings};
use mainstay_recovery::protocol::{AgentEvidence, Command, Event};

/// A job of two ranks with its outputs.
pub struct Run {
    pub job: Job,
    pub out: Vec<Output>,
    pub now: u64,
    /// The last completed step of the attempt, as in the ranks' heartbeat pages.
    pub step: Option<u64>,
}

impl Run {
    pub fn begin(max_restarts: u32) -> Run {
        Run::begin_with(Budget { max_restarts, window: None }.into())
    }

    pub fn begin_with(policy: Settings) -> Run {
        let mut out = Vec::new();
        let max_restarts = policy.budget.max_restarts;
        let spec = JobSpec {
            world_size: 2,
            local_world_size: 2,
            max_restarts,
            policy: Some(policy.clone()),
            ..JobSpec::default()
        };
        let job = Job::begin(Mono(0), spec, policy, &mut out);
        Run { job, out, now: 0, step: None }
    }

    pub fn report(&mut self, input: Event) {
        self.now += 10;
        self.job.step(Mono(self.now), input, &mut self.out);
    }

    pub fn fact(&mut self, fact: Fact) {
        self.report(Event::Fact(fact));
    }

    pub fn start(&mut self, attempt: u32) {
        self.step = None;
        let ranks = [0, 1].map(|n| StartedRank {
            rank: Rank(n),
            local_rank: n,
            pid: Pid(100 + n as i32),
            page: None,
            start_ticks: None,
        });
        self.fact(Fact::AttemptStarted {
            attempt: Attempt(attempt),
            master_port: 1,
            ranks: ranks.into(),
            hosts: Vec::new(),
        });
        for rank in [Rank(0), Rank(1)] {
            self.fact(Fact::RankConnected { attempt: Attempt(attempt), rank, client: "test".into() });
        }
    }

    pub fn steps(&mut self, attempt: u32, steps: std::ops::RangeInclusive<u64>) {
        for step in steps {
            (self.now, self.step) = (self.now + 10, Some(step));
            for rank in [Rank(0), Rank(1)] {
                let done =
                    StepDone { step, start: Mono(self.now - 10), end: Mono(self.now), ..StepDone::default() };
                let input = Event::Steps { attempt: Attempt(attempt), ranks: vec![(rank, vec![done])] };
                self.job.step(Mono(self.now), input, &mut self.out);
            }
        }
    }

    /// A step of both ranks with its loss.
    pub fn step_with_loss(&mut self, attempt: u32, step: u64, loss: f64) {
        (self.now, self.step) = (self.now + 10, Some(step));
        let (start, end) = (Mono(self.now - 10), Mono(self.now));
        for rank in [Rank(0), Rank(1)] {
            let done = StepDone { step, start, end, loss: Some(loss), ..StepDone::default() };
            let input = Event::Steps { attempt: Attempt(attempt), ranks: vec![(rank, vec![done])] };
            self.job.step(Mono(self.now), input, &mut self.out);
        }
    }

    pub fn exit(&mut self, attempt: u32, rank: u32, status: ExitStatus, after_stop: bool) {
        self.fact(Fact::RankExited {
            attempt: Attempt(attempt),
            rank: Rank(rank),
            pid: Pid(1),
            status,
            step: self.step,
            data: None,
            after_stop,
            stderr_tail: vec![],
            stdout_tail: vec![],
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        });
    }

    pub fn ending(&mut self, attempt: u32, rank: u32, status: ExitStatus) {
        let (attempt, rank) = (Attempt(attempt), Rank(rank));
        self.fact(Fact::RankEnding { attempt, rank, pid: Pid(1), status });
    }

    pub fn raise(&mut self, attempt: u32, rank: u32, message: &str) {
        let note = Note {
            exception: "builtins.ValueError".into(),
            message: message.into(),
            at: Mono(self.now),
            ..Note::default()
        };
        self.fact(Fact::RankRaised {
            attempt: Attempt(attempt),
            rank: Rank(rank),
            pid: Pid(1),
            note,
            data: None,
        });
    }

    pub fn ended(&mut self, attempt: u32) {
        self.fact(Fact::AttemptEnded { attempt: Attempt(attempt), orphans_killed: 0, waiting: vec![] });
    }

    /// A rank is killed, the other one is stopped, the agent is absent.
    pub fn kill_and_decide(&mut self, attempt: u32) {
        self.end_and_decide(attempt, ExitStatus::Signal(9));
    }

    /// A rank crashes in native code, the other one is stopped, the agent is absent.
    pub fn crash_and_decide(&mut self, attempt: u32) {
        self.end_and_decide(attempt, ExitStatus::Signal(11));
    }

    fn end_and_decide(&mut self, attempt: u32, status: ExitStatus) {
        self.exit(attempt, 1, status, false);
        self.exit(attempt, 0, ExitStatus::Signal(15), true);
        self.ended(attempt);
        self.report(Event::AgentEvidence(None));
    }

    pub fn orders(&self) -> Vec<&Command> {
        self.out
            .iter()
            .filter_map(|output| match output {
                Output::Command(order) => Some(order),
                Output::Record(_) => None,
            })
            .collect()
    }

    pub fn last_order(&self) -> &Command {
        self.orders().pop().expect("an order")
    }

    pub fn bodies(&self) -> Vec<&Body> {
        self.out
            .iter()
            .filter_map(|output| match output {
                Output::Record(body) => Some(body),
                Output::Command(_) => None,
            })
            .collect()
    }

    /// Rank 1 is killed and no process is left. The next input is the ruling of the host.
    pub fn kill(&mut self, attempt: u32) {
        self.exit(attempt, 1, ExitStatus::Signal(9), false);
        self.exit(attempt, 0, ExitStatus::Signal(15), true);
        self.ended(attempt);
    }

    pub fn report_evidence(&mut self, incident: u64, host_evidence: HostEvidence) {
        let ruling = AgentEvidence { incident: Incident(incident), instead: None, host_evidence };
        self.report(Event::AgentEvidence(Some(ruling)));
    }

    /// The records as journal entries.
    pub fn entries(&self) -> Vec<Entry> {
        let entry = |(seq, body): (usize, &&Body)| Entry {
            seq: seq as u64 + 1,
            at: Stamp { mono: Mono(seq as u64), ..Stamp::default() },
            boot: BootId::default(),
            job: Some(JobId("a".into())),
            origin_seq: None,
            body: (*body).clone(),
        };
        self.bodies().iter().enumerate().map(entry).collect()
    }

    pub fn wait(&mut self, span: Span) {
        self.now += span.0;
        self.report(Event::Wake);
    }

    pub fn decisions(&self) -> Vec<Action> {
        let decided = |body: &&Body| match body {
            Body::Decision(decision) => Some(decision.action),
            _ => None,
        };
        self.bodies().iter().filter_map(decided).collect()
    }

    pub fn last_verdict(&self) -> &Verdict {
        let mut verdicts = self.out.iter().filter_map(|output| match output {
            Output::Record(Body::Verdict(verdict)) => Some(verdict),
            _ => None,
        });
        verdicts.next_back().expect("a verdict")
    }
}
