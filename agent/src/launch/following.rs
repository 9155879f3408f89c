//! Another launcher leads: what is seen here goes to it, and what it orders is done here. Its journal is written here as
//! well, so that each host shows the whole job.

use mainstay_core::base::time::{Mono, Span, Stamp};
use mainstay_core::model::entry::{Body, Entry, Fact, JobSpec};
use mainstay_core::recovery::hosts::clock::{Mapping, times};
use mainstay_core::recovery::hosts::sequence::{Inbox, Outbox, Received};
use mainstay_core::recovery::hosts::wire::{Command, Down, Join, Report, Seat, Up};
use mainstay_core::recovery::job::{Input, StopWhy, Summary};
use tokio::sync::{mpsc, watch};

use crate::hosts::connect::FromLeader;
use crate::launch::brain::{Brain, Task};
use crate::launch::gather::Aborting;
use crate::launch::hosts::HostsPlan;
use crate::launch::shell::Launcher;
use crate::os::clock;

/// Reports that the leader has not acknowledged; with more this host counts as cut off.
const REPORTS: usize = 16_384;

/// A launcher without a leader for so long stops its ranks.
const LEASE: Span = Span::seconds(10);

/// What a follower starts with.
#[derive(Debug)]
pub struct Followed {
    /// Its seat.
    pub seat: Seat,
    /// The job's name for ranks of all hosts.
    pub job: String,
    /// The job's launch for ranks of all hosts.
    pub launch: String,
    /// What arrives from the leader.
    pub events: mpsc::Receiver<FromLeader>,
    /// The way to it, while there is one.
    pub to: Option<mpsc::Sender<Up>>,
    /// Its clock.
    pub clock: Mapping,
    /// What is sent first on a new connection.
    pub join: watch::Sender<Join>,
    /// What was asked for.
    pub plan: HostsPlan,
    /// The task that keeps the connection.
    pub task: Aborting,
}

/// What a follower has.
#[derive(Debug)]
pub(super) struct Following {
    events: mpsc::Receiver<FromLeader>,
    to: Option<mpsc::Sender<Up>>,
    clock: Mapping,
    join: watch::Sender<Join>,
    plan: HostsPlan,
    _task: Aborting,
    outbox: Outbox<(Mono, Report)>,
    inbox: Inbox,
    /// The newest entry of the leader's journal that was written here.
    entries: u64,
    gone: Option<Mono>,
    /// Whether the leader was given up.
    pub(super) cut_off: bool,
    /// What this host's journal says of the job.
    spec: JobSpec,
    pub(super) summary: Option<Summary>,
}

impl Following {
    pub(super) fn new(followed: Followed, spec: JobSpec) -> Following {
        let Followed { events, to, clock, join, plan, task, .. } = followed;
        Following {
            events,
            gone: to.is_none().then(clock::mono),
            to,
            clock,
            join,
            plan,
            _task: task,
            outbox: Outbox::new(REPORTS),
            inbox: Inbox::default(),
            entries: 0,
            cut_off: false,
            spec,
            summary: None,
        }
    }

    pub(super) async fn next(&mut self) -> FromLeader {
        match self.events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// A way that takes no more is given up; another connection is made.
    fn send(&mut self, up: Up) {
        if self.to.as_ref().is_some_and(|to| to.try_send(up).is_err()) {
            self.to = None;
            self.gone.get_or_insert(clock::mono());
        }
    }

    fn send_again(&mut self) {
        let again: Vec<Up> = self
            .outbox
            .unacknowledged()
            .map(|(number, (at, report))| Up::Report { number, at: *at, report: report.clone() })
            .collect();
        again.into_iter().for_each(|up| self.send(up));
    }

    fn remember(&self) {
        let have = (self.inbox.have(), self.entries);
        self.join.send_modify(|join| join.have = have);
    }
}

/// Whether a fact concerns the whole job, and not only this host.
fn concerns_all(fact: &Fact) -> bool {
    match fact {
        Fact::AttemptStarted { .. }
        | Fact::StartFailed { .. }
        | Fact::RankConnected { .. }
        | Fact::RankRefused { .. }
        | Fact::PagesUnavailable { .. }
        | Fact::RankRaised { .. }
        | Fact::RankEnding { .. }
        | Fact::RankExited { .. }
        | Fact::RanksHung { .. }
        | Fact::HangPassed { .. }
        | Fact::EvidenceTaken { .. }
        | Fact::AttemptEnded { .. }
        | Fact::StopRequested { .. }
        | Fact::OutOfMemoryKills { .. } => true,
        Fact::Observed(seen) => {
            seen.component == mainstay_core::recovery::job::ORDERS
                || matches!(seen.component.as_str(), "job" | "template")
        }
        _ => false,
    }
}

impl Launcher {
    /// Something happened on this host.
    pub(super) fn report_input(&mut self, at: Mono, input: Input) {
        let Brain::Following(following) = &mut self.brain else { return };
        if let Input::Fact(fact) = &input {
            if following.cut_off && matches!(fact, Fact::AttemptEnded { .. }) {
                self.exit = Some(self.settings.policy.hand_back_exit);
                return;
            }
            if !concerns_all(fact) {
                return self.publish_body(at, Body::Fact(fact.clone()));
            }
        }
        let at = following.clock.to_leader(at);
        if let Some(report) = Report::of(following.clock.input(input)) {
            self.report_up(at, report);
        }
    }

    /// Sends a report, now or when there is a connection again.
    pub(super) fn report_up(&mut self, at: Mono, report: Report) {
        let Brain::Following(following) = &mut self.brain else { return };
        match following.outbox.push((at, report.clone())) {
            Ok(number) => following.send(Up::Report { number, at, report }),
            // Far more than a leader that lives leaves unread.
            Err(error) => {
                tracing::warn!(%error, "the leader does not read the reports of this host");
                following.gone = Some(Mono(0));
            }
        }
    }

    /// A message of the leader, or the news that there is no connection.
    pub(super) fn hear_leader(&mut self, event: FromLeader) {
        let Brain::Following(following) = &mut self.brain else { return };
        match event {
            FromLeader::Connected { to } => following.to = Some(to),
            FromLeader::Lost { why } => {
                following.to = None;
                if following.gone.is_none() {
                    following.gone = Some(clock::mono());
                    let endpoint = following.plan.endpoint();
                    self.terminal
                        .say(format!("no connection to the leader at {endpoint}: {why}; the ranks go on"));
                }
            }
            FromLeader::Said { at, down } => self.said_by_leader(at, down),
        }
    }

    fn said_by_leader(&mut self, received: Mono, down: Down) {
        let Brain::Following(following) = &mut self.brain else { return };
        match down {
            Down::Welcome { have, .. } => {
                following.gone = None;
                following.outbox.acknowledged(have);
                following.send_again();
            }
            Down::Refused { why } => {
                self.terminal.say(format!("the leader refuses this host: {why}"));
                self.cut_off();
            }
            Down::Waiting { told } => self.terminal.say(told),
            Down::Command { number, command } => match following.inbox.receive(number) {
                Received::New => {
                    following.send(Up::Received { number });
                    following.remember();
                    self.tasks.push_back(Task::Command(command));
                }
                Received::Again => {
                    let number = following.inbox.have();
                    following.send(Up::Received { number });
                }
                Received::Gap => following.to = None,
            },
            Down::Entry { seq, at, body } if seq > following.entries => {
                following.entries = seq;
                following.remember();
                let clock = following.clock.clone();
                let body = match *body {
                    // Where it runs and writes is told of this host.
                    Body::Fact(Fact::JobStarted(_)) => Body::Fact(Fact::JobStarted(following.spec.clone())),
                    Body::Fact(fact) => Body::Fact(times(fact, &|at| clock.from_leader(at))),
                    body => body,
                };
                let stamp = Stamp { mono: clock.from_leader(at.mono), wall: at.wall };
                let entry = self.record(stamp, Some(seq), body);
                self.send_entry(entry);
            }
            Down::Entry { .. } => {}
            Down::Received { number } => following.outbox.acknowledged(number),
            Down::Beat { sent, at } => following.clock.round_trip(sent, at, received),
        }
    }

    /// A follower that has had no leader for too long ends by itself.
    pub(super) fn look_for_leader(&mut self) {
        let Brain::Following(following) = &mut self.brain else { return };
        let now = clock::mono();
        if following.cut_off || following.gone.is_none_or(|since| now.since(since) < LEASE) {
            return;
        }
        let endpoint = following.plan.endpoint();
        self.terminal.say(format!(
            "no leader at {endpoint} for {LEASE}: the ranks of this host are stopped. Start the job again on all hosts"
        ));
        self.cut_off();
    }

    fn cut_off(&mut self) {
        let (attempt, hand_back) = (self.attempt, self.settings.policy.hand_back_exit);
        let Brain::Following(following) = &mut self.brain else { return };
        following.cut_off = true;
        if self.ranks.iter().any(|rank| rank.exit.is_none()) {
            self.tasks.push_back(Task::Command(Command::Stop {
                attempt,
                why: StopWhy::Requested,
                save_after: None,
            }));
        } else {
            self.exit = Some(hand_back);
        }
    }

    /// Gives an entry to the agent of this host, which knows the ranks of this host by their processes and no others.
    pub(super) fn send_entry(&mut self, entry: Entry) {
        // While older ones are being read for it, this one comes after those.
        if self.agent_has.is_none() {
            self.send_entry_now(entry);
        }
    }

    pub(super) fn send_entry_now(&mut self, mut entry: Entry) {
        if let Body::Fact(Fact::AttemptStarted { ranks, .. }) = &mut entry.body {
            let seat = &self.crew.seat;
            let here = seat.first_rank..seat.first_rank + self.crew.local_world_size;
            ranks.retain(|started| here.contains(&started.rank.0));
        }
        self.send(crate::link::agent::LinkOrder::Entry(Box::new(entry)));
    }
}
