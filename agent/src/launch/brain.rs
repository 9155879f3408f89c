//! Who decides for the job: this launcher alone, this one for several hosts, or the leader on another host.
//!
//! All that happens on this host goes through `step`, and all that is to be done here comes out as a [`Task`]. With one host
//! the job is driven directly.

use mainstay_core::base::id::{Attempt, Pid, Rank};
use mainstay_core::base::time::Mono;
use mainstay_core::model::entry::{Body, Fact};
use mainstay_core::progress::goodput::Ledger;
use mainstay_core::progress::monitor::Pace;
use mainstay_core::recovery::hosts::hands::{OnStart, on_start, on_stop};
use mainstay_core::recovery::hosts::wire::{Command, Report};
use mainstay_core::recovery::job::{Input, Job, Order, Output, StopWhy, Summary};

use crate::hosts::{Token, look, streams};
use crate::launch::following::Following;
use crate::launch::leading::Leading;
use crate::launch::shell::Launcher;
use crate::os::clock;

/// The decider.
#[derive(Debug)]
pub(super) enum Brain {
    Alone(Box<Job>),
    Leading(Box<Leading>),
    Following(Box<Following>),
    /// For the moment in which a follower becomes the leader, and after the end.
    Gone,
}

/// What the hands of this launcher are to do.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// An order of the job on this host alone, or one that means the same on each host.
    Order(Order),
    /// An order of a leader.
    Command(Command),
}

impl Brain {
    /// The job, where it is decided here.
    pub(super) fn job(&self) -> Option<&Job> {
        match self {
            Brain::Alone(job) => Some(job),
            Brain::Leading(leading) => Some(leading.lead.job()),
            Brain::Following(_) | Brain::Gone => None,
        }
    }

    pub(super) fn job_mut(&mut self) -> Option<&mut Job> {
        match self {
            Brain::Alone(job) => Some(job),
            Brain::Leading(leading) => Some(leading.lead.job_mut()),
            Brain::Following(_) | Brain::Gone => None,
        }
    }

    /// The process of the coordination store that runs on this host.
    pub(super) fn store_process(&self) -> Option<Pid> {
        match self {
            Brain::Leading(leading) => leading.meeting.store_process(),
            Brain::Following(following) => following.meeting.store_process(),
            Brain::Alone(_) | Brain::Gone => None,
        }
    }

    pub(super) fn pace(&self, rank: Rank) -> Pace {
        self.job().map(|job| job.pace(rank)).unwrap_or_default()
    }

    /// What this launcher and the others of the job show each other.
    pub(super) fn token(&self) -> Option<Token> {
        match self {
            Brain::Leading(leading) => Some(leading.meeting.token.clone()),
            Brain::Following(following) => Some(following.meeting.token.clone()),
            Brain::Alone(_) | Brain::Gone => None,
        }
    }

    /// How the job went.
    pub(super) fn summary(&self, at: Mono, exit: i32) -> Summary {
        let told = match self {
            Brain::Leading(leading) if leading.lead.is_deposed() => {
                let reason = "another launcher leads the job, or this host is cut off".to_owned();
                Some(Summary { exit, reason, ..leading.lead.job().summary(at) })
            }
            Brain::Following(following) => following.summary.clone(),
            Brain::Alone(_) | Brain::Leading(_) | Brain::Gone => self.job().map(|job| job.summary(at)),
        };
        told.unwrap_or_else(|| {
            let cut_off = match self {
                Brain::Following(following) => following.cut_off.clone(),
                _ => None,
            };
            let reason = cut_off.unwrap_or_else(|| "the leader of the job was lost".to_owned());
            let books = Ledger::open(at).books(at);
            Summary { exit, reason, attempts: 0, books, incidents: Vec::new(), saving: None }
        })
    }
}

impl Launcher {
    /// Takes in what happened on this host.
    pub(super) fn step(&mut self, at: Mono, input: Input) {
        let mut out = Vec::new();
        match &mut self.brain {
            Brain::Alone(job) => {
                job.step(at, input, &mut out);
                self.publish(at, out);
            }
            Brain::Leading(leading) if leading.lead.is_deposed() => self.see_deposed(at, input),
            Brain::Leading(leading) => {
                leading.lead.see(at, input);
                self.lead(at);
            }
            Brain::Following(_) => self.report_input(at, input),
            Brain::Gone => {}
        }
    }

    /// Reports what only leaders want to know.
    pub(super) fn report(&mut self, at: Mono, report: Report) {
        match &mut self.brain {
            Brain::Alone(_) | Brain::Gone => {}
            Brain::Leading(leading) => {
                leading.lead.report_of_mine(at, report);
                self.lead(at);
            }
            Brain::Following(_) => self.report_up(at, report),
        }
    }

    /// Writes down what the job has to say and keeps its orders for later.
    pub(super) fn publish(&mut self, at: Mono, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Record(body) => self.publish_body(at, body),
                Output::Order(order) => self.tasks.push_back(Task::Order(order)),
            }
        }
    }

    pub(super) fn publish_body(&mut self, at: Mono, body: Body) {
        let entry = self.record(clock::stamp_of(at), None, body);
        self.send_entry(entry);
    }

    /// Carries out what a leader wants. With one host no commands come.
    pub(super) async fn obey_command(
        &mut self,
        command: Command,
        ended: &tokio::sync::mpsc::UnboundedSender<super::shell::Ended>,
    ) {
        match command {
            Command::Seat { attempt, seat } => self.take_seat(attempt, seat).await,
            Command::Open { attempt } => {
                let port = self.take_port();
                self.report(clock::mono(), Report::Opened { attempt, port });
            }
            Command::Gather { attempt, peers } => self.gather_checkpoints(attempt, peers),
            Command::Bring { attempt, step } => self.bring_checkpoint(attempt, step),
            Command::Start { attempt, in_process, master_addr, master_port, resume, before } => {
                let running = self.ranks.iter().any(|rank| rank.exit.is_none());
                match on_start(attempt, self.attempt, !self.ranks.is_empty(), running, in_process) {
                    OnStart::Ignore => {
                        tracing::warn!(%attempt, "a start of an attempt that is over is ignored");
                        return;
                    }
                    OnStart::Refuse => {
                        self.attempt = attempt;
                        let error = "ranks of an earlier attempt still run on this host".to_owned();
                        return self.fact(Fact::StartFailed { attempt, error });
                    }
                    OnStart::Start => {}
                }
                self.crew.master_addr = master_addr;
                self.crew.ran_before = before;
                let port = self.resume_from(resume.as_ref()).map(|()| master_port);
                self.start(attempt, port, in_process, ended).await;
            }
            Command::EndRank { attempt, rank } => {
                self.carry_out_order(Order::EndRank { attempt, rank }, ended).await;
            }
            Command::Stop { attempt, why, save_after } => {
                self.save_after = save_after;
                self.stop_attempt(attempt, why, ended).await;
            }
            Command::TakeEvidence { attempt } => {
                self.carry_out_order(Order::TakeEvidence(attempt), ended).await;
            }
            Command::SaveDue { attempt, step } if attempt == self.attempt && self.stop.is_none() => {
                super::save::tell_due_after(&self.ranks, step);
            }
            Command::SaveDue { .. } => {}
            Command::Look { launcher, address } => self.look_at_launcher(launcher, address),
            Command::Finish { exit, summary } => {
                if let Brain::Following(following) = &mut self.brain {
                    following.summary = summary.map(|summary| *summary);
                }
                self.exit = Some(exit);
            }
        }
    }

    /// Looks beside the loop whether another launcher lives, and reports what was found.
    pub(super) fn look_at_launcher(&mut self, launcher: String, address: String) {
        let Some(token) = self.brain.token() else { return };
        let sights = self.sights.0.clone();
        streams().spawn(async move {
            let sight = look::look(address, token).await;
            // The receiver goes only when the launcher does.
            let _ = sights.send((launcher, sight));
        });
    }

    async fn stop_attempt(
        &mut self,
        attempt: Attempt,
        why: StopWhy,
        ended: &tokio::sync::mpsc::UnboundedSender<super::shell::Ended>,
    ) {
        if on_stop(attempt, self.attempt) {
            self.attempt = attempt;
            self.carry_out_order(Order::StopRanks { attempt, why }, ended).await;
        } else {
            // It is over on this host.
            self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() });
        }
    }
}
