//! Leaders that follow each other: what a leader has stored before it acts, how a follower takes the place of a lost leader,
//! and how one that was only slow steps down.

use mainstay_coord::Leader;
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::model::entry::{Body, Fact};
use mainstay_core::model::observation::{Observation, Weight};
use mainstay_core::recovery::hosts::merge::HOSTS;
use mainstay_core::recovery::hosts::record::Record;
use mainstay_core::recovery::hosts::succession::{Adopted, OnElection, OnLeader, Standing};
use mainstay_core::recovery::hosts::wire::Command;
use mainstay_core::recovery::job::{Input, Order, Output, StopWhy, policy_trouble};

use crate::launch::advised;
use crate::launch::brain::{Brain, Task};
use crate::launch::leading::Leading;
use crate::launch::meeting::{Elected, FromStore};
use crate::launch::predecessor::Predecessor;
use crate::launch::shell::Launcher;
use crate::os::clock;

/// The end of a job waits so long for its record.
const END_WITHIN: Span = Span::seconds(3);

impl Leading {
    fn standing(&self) -> Standing<'_> {
        Standing::Leads { epoch: self.epoch }
    }

    /// An order of the job. What starts ranks waits until it is stored that it is to be done: a leader that was replaced is
    /// refused there, and the next one knows of each start.
    pub(super) fn order(&mut self, at: Mono, order: Order) {
        match order {
            Order::StartRanks(_) | Order::StartRound(_) => {
                self.write_record();
                self.held.push_back((self.newest_record, Mono::NEVER, order));
            }
            Order::Finish { exit } => {
                self.over = Some(exit);
                self.write_record();
                self.held.push_back((self.newest_record, at.after(END_WITHIN), order));
            }
            order => self.pass_on(at, order),
        }
    }

    /// Carries out what waited for a record that is stored now, or has waited long enough.
    pub(super) fn release_held(&mut self, now: Mono, written: u64) {
        while self.held.front().is_some_and(|(number, until, _)| *number <= written || now >= *until) {
            let Some((_, _, order)) = self.held.pop_front() else { return };
            self.pass_on(now, order);
        }
    }

    /// A start that waits for the store does not come about any more.
    pub(super) fn give_up_held_start(&mut self, at: Mono) {
        for (number, until, order) in std::mem::take(&mut self.held) {
            match order {
                Order::StartRanks(attempt) | Order::StartRound(attempt) => {
                    let error = "asked to stop while the coordination store did not answer".to_owned();
                    self.tell_job(at, Input::Fact(Fact::StartFailed { attempt, error }));
                }
                order => self.held.push_back((number, until, order)),
            }
        }
    }

    pub(super) fn write_record(&mut self) {
        self.record_due = false;
        self.newest_record += 1;
        let carried = self.job.carried();
        let (job, launch) = self.names.clone();
        let record = Record {
            at: clock::now(),
            seats: self.seats(),
            leader: self.meeting.launcher().to_owned(),
            job,
            launch,
            attempt: carried.attempt,
            running: self.has_started(carried.attempt),
            carried: Some(carried),
            ended: self.over,
        };
        if let Some(office) = &self.office {
            office.write(self.newest_record, &record);
        }
    }
}

impl Launcher {
    /// News from the store for a leader.
    pub(super) fn hear_store_as_leader(&mut self, news: FromStore) {
        let now = clock::mono();
        let Brain::Leading(leading) = &mut self.brain else { return };
        match news {
            FromStore::Written(number) => leading.release_held(now, number),
            FromStore::Deposed(epoch) => {
                if leading.office.as_ref().is_some_and(|office| office.epoch == epoch) {
                    leading.office = None;
                    leading.meeting.campaign();
                    self.terminal.say(
                        "the coordination store does not know this leader any more; training goes on, and nothing is \
                         decided until it does"
                            .to_owned(),
                    );
                }
                return self.step_down_if_replaced();
            }
            FromStore::Elected(elected) => {
                let Elected { office, last, .. } = *elected;
                if leading.standing().on_election(false, last) == OnElection::StepDown {
                    // What is known here is older than what that one has done.
                    self.terminal.say("another launcher has led the job meanwhile".to_owned());
                    return self.step_down();
                }
                // The store was wiped, or away for longer than the lease: what it had is written anew.
                self.terminal.say(format!("this host leads again (epoch {})", office.epoch));
                (leading.epoch, leading.office) = (office.epoch, Some(office));
                leading.write_record();
                let newest = leading.newest_record;
                leading.held.iter_mut().for_each(|held| held.0 = newest);
            }
            FromStore::Leader(_) => return self.step_down_if_replaced(),
            FromStore::Trouble(why) => self.terminal.say(why),
            FromStore::Ended(_) => {}
        }
        self.lead(now);
    }

    fn step_down_if_replaced(&mut self) {
        let Brain::Leading(leading) = &mut self.brain else { return };
        let me = leading.meeting.launcher();
        let replaces = |other: &&Leader| {
            leading.standing().on_leader(me, &other.launch, other.epoch) == OnLeader::StepDown
        };
        if let Some(other) = leading.meeting.leader().filter(replaces) {
            let (host, epoch) = (other.host.clone(), other.epoch);
            self.terminal.say(format!("host {host} leads the job now (epoch {epoch})"));
            self.step_down();
        }
    }

    /// Another launcher leads, or this one is cut off: its ranks are stopped, and nothing more is decided here.
    pub(super) fn step_down(&mut self) {
        let (attempt, hand_back) = (self.attempt, self.settings.policy.hand_back_exit);
        let Brain::Leading(leading) = &mut self.brain else { return };
        if leading.deposed {
            return;
        }
        leading.deposed = true;
        (leading.office, leading.held) = (None, std::collections::VecDeque::new());
        leading.meeting.stand_down();
        leading.spares.clear();
        leading.links.iter_mut().for_each(|link| (link.connection, link.gone) = (None, None));
        self.terminal.say("this launcher leads no more: the ranks of this host are stopped".to_owned());
        if self.ranks.iter().any(|rank| rank.exit.is_none()) {
            let why = StopWhy::Requested;
            self.tasks.push_back(Task::Command(Command::Stop { attempt, why, save_after: None }));
        } else {
            self.exit = Some(hand_back);
        }
    }

    /// What happens on this host after another launcher has taken over is for this host's journal alone.
    pub(super) fn see_deposed(&mut self, at: Mono, input: Input) {
        let Input::Fact(fact) = input else { return };
        if matches!(fact, Fact::AttemptEnded { .. }) {
            self.exit = Some(self.settings.policy.hand_back_exit);
        }
        self.publish_body(at, Body::Fact(fact));
    }

    /// A leader that neither the store nor any follower answers is cut off.
    pub(super) fn look_at_store(&mut self) {
        let Brain::Leading(leading) = &mut self.brain else { return };
        let followed = leading.links.len() == 1 || leading.links.iter().any(|link| link.connection.is_some());
        let lease = leading.plan.lease;
        if !followed && leading.meeting.silent_for().is_some_and(|silent| silent >= lease) {
            let endpoint = leading.plan.endpoint();
            self.terminal.say(format!("neither {endpoint} nor any other host has answered for {lease:?}"));
            self.step_down();
        }
    }

    /// The leader is lost, and this launcher was elected: it goes on from the leader's record and from what hosts report again.
    pub(super) fn take_over(&mut self, elected: Elected) {
        let Elected { office, record, .. } = elected;
        let Brain::Following(following) = &mut self.brain else { return };
        let gives_back =
            following.standing().on_election(following.is_connected(), None) == OnElection::GiveBack;
        if gives_back || following.cut_off {
            // The leader is there after all. The office goes back to the store with this.
            return;
        }
        let epoch = office.epoch;
        let Some(record) = record else {
            self.terminal.say("the leader is lost and has left no record".to_owned());
            return self.cut_off();
        };
        let now = clock::now();
        let spec = following.spec.clone();
        let me = self.crew.seat.group_rank;
        let adopted = Adopted::of(&record, me, following.member(), self.attempt, now);
        let patience = following.plan.join_timeout;
        let (mut job, merge) = adopted.resume(now.mono, spec, self.policy(), patience);
        let mut out = Vec::new();
        if let Some(file) = &self.settings.policy_file {
            let (advisor, trouble) = advised::read(file);
            job.advised_by(advisor);
            out.extend(trouble.map(|trouble| Output::Record(Body::Fact(policy_trouble(&trouble)))));
        }
        self.recall(&mut job);
        let before = std::mem::replace(&mut self.brain, Brain::Gone);
        let Brain::Following(following) = before else { return };
        let parts = following.into_parts();
        let names = (record.job.clone(), record.launch.clone());
        let mut leading =
            Leading::of(job, merge, me, parts.listener, parts.plan, names, parts.meeting, office);
        let reader = self.board.reader();
        let entries =
            reader.entries_after(parts.since, usize::MAX).map(|read| read.entries).unwrap_or_default();
        leading.predecessor = Some(Predecessor::new(parts.leader, &entries, reader.newest()));
        let host = adopted.lost.as_ref().map(|seated| seated.member.host.clone()).unwrap_or_default();
        self.terminal
            .say(format!("host {host}, which led the job, is lost: this host leads now (epoch {epoch})"));
        leading.begin_with(now.mono, out);
        leading.tell_job(now.mono, Input::Fact(leader_replaced(&host, me, epoch)));
        for (at, report) in parts.log {
            leading.report_of_mine(at, report);
        }
        if let Some(exit) = record.ended {
            leading.over = Some(exit);
            self.exit = Some(exit);
        }
        leading.write_record();
        if let Some(seat) = adopted.lost.map(|seated| seated.seat.group_rank).filter(|seat| *seat != me) {
            leading.lose(now.mono, seat as usize, "its launcher, which led the job, is lost");
        }
        leading.give_up_start(now.mono);
        self.hangs.judge_all(leading.seats().iter(), now.mono);
        self.brain = Brain::Leading(Box::new(leading));
        self.lead(now.mono);
    }
}

fn leader_replaced(host: &str, seat: u32, epoch: u64) -> Fact {
    let detail = format!("host {host} is lost; node rank {seat} leads the job now (epoch {epoch})");
    Fact::Observed(Observation {
        component: HOSTS.to_owned(),
        event: "leader_replaced".to_owned(),
        weight: Weight::Warning,
        detail,
        ..Observation::default()
    })
}
