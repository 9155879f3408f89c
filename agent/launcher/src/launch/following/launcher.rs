//! A launcher that follows carries out the leader's orders and reports what it sees.

use mainstay_diagnosis::root_rank::host_missing;
use mainstay_group::follow::{Act, CutOff, concerns_all};
use mainstay_group::wire::{Command, Report};
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::Incident;
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::{Action, DecidedBy, Decision, Verdict};
use mainstay_recovery::job::{Input, StopWhy};

use super::leads;
use crate::hosts::connect::FromLeader;
use crate::launch::decider::{Decider, Task};
use crate::launch::event_loop::Launcher;
use crate::launch::hosts::span;
use crate::launch::store_session::{FromStore, exit_of};
use mainstay_sys::clock;

impl Launcher {
    /// Carries out what the follower wants, until nothing is left.
    pub(in crate::launch) fn follow(&mut self) {
        loop {
            let Decider::Following(following) = &mut self.decider else { return };
            following.remember();
            let Some(act) = following.follow.next_act() else { return };
            match act {
                Act::Send(up) => following.send(up),
                Act::Close => following.to = None,
                Act::Obey(command) => self.tasks.push_back(Task::Command(command)),
                Act::Entry { seq, at, body, is_past } => {
                    let body = match body {
                        // The fact names where this host runs and writes.
                        Body::Fact(Fact::JobStarted(_)) => {
                            Body::Fact(Fact::JobStarted(following.spec.clone()))
                        }
                        body => body,
                    };
                    let line = self.line(&body).filter(|_| !is_past);
                    line.into_iter().for_each(|line| self.terminal.print(line));
                    let entry = self.record(at, Some(seq), body);
                    self.send_entry(entry);
                }
                Act::Print(line) => self.terminal.print(line),
                Act::Campaign => following.store_session.campaign(),
                Act::StandDown => following.store_session.stand_down(),
                Act::RemoveLeader => {
                    let leader = following.follow.leader();
                    tracing::info!(leader = %leader.host, "the launcher that leads is dead");
                    following.store_session.remove_leader(&leader.launcher);
                }
                Act::LookAtLeader => self.look_at_leader(),
                Act::MissLeader(misses) => following.store_session.miss_leader(misses),
                Act::Connect => following.connect(),
                Act::TookSeat => {
                    following.store_session.take_seat();
                    self.has_a_seat();
                }
                Act::Meet { hosts, spares } => self.meet(&hosts, spares),
                Act::LeftSeat => {
                    following.store_session.leave_seat();
                    if self.ranks.iter().any(|rank| rank.exit.is_none()) {
                        // Ranks would wait in their processes forever.
                        let (attempt, why) = (self.attempt, StopWhy::Dismissed);
                        self.tasks.push_back(Task::Command(Command::Stop { attempt, why, save_after: None }));
                    }
                }
                Act::CutOff(why) => self.cut_off(why),
            }
        }
    }

    /// Something happened on this host.
    pub(in crate::launch) fn report_input(&mut self, at: Mono, input: Input) {
        let Decider::Following(following) = &mut self.decider else { return };
        if let Input::Fact(fact) = &input {
            if following.follow.is_cut_off() {
                return self.see_deposed(at, input);
            }
            if !concerns_all(fact) || following.follow.waits_for_a_seat() {
                return self.publish_body(at, Body::Fact(fact.clone()));
            }
        }
        if let Some(report) = Report::of(input) {
            self.report_up(at, report);
        }
    }

    /// Sends a report now, or when there is a connection again.
    pub(in crate::launch) fn report_up(&mut self, at: Mono, report: Report) {
        let Decider::Following(following) = &mut self.decider else { return };
        following.follow.report(at, report);
        self.follow();
    }

    /// Reports to the leader, which judges hangs, what the ranks here are doing.
    pub(in crate::launch) fn report_sights(&mut self) {
        let Decider::Following(following) = &mut self.decider else { return };
        if following.follow.reports_sights() {
            following.follow.seen(self.attempt, self.hangs.due_to_report(clock::mono()));
            self.follow();
        }
    }

    /// Processes a message of the leader, or the loss of the connection.
    pub(in crate::launch) fn leader_sent(&mut self, event: FromLeader) {
        let Decider::Following(following) = &mut self.decider else { return };
        match event {
            FromLeader::Connected { to } => {
                following.to = Some(to);
                following.follow.connected();
            }
            FromLeader::Lost { why, refused } => {
                following.to = None;
                following.follow.disconnected(clock::mono(), &why, refused);
            }
            FromLeader::Received { at, down } => following.follow.receive(at, down),
        }
        self.follow();
    }

    /// Processes news from the store for a follower.
    pub(in crate::launch) fn store_sent_to_follower(&mut self, update: FromStore) {
        let newest = self.snapshots.newest();
        let Decider::Following(following) = &mut self.decider else { return };
        match update {
            FromStore::Leader(Some(leader)) => following.follow.led_by(clock::mono(), leads(&leader), newest),
            FromStore::Elected(elected) => self.take_over(*elected),
            FromStore::LeaderMissed => following.follow.leader_is_missed(),
            // With a connection, the leader itself reports the end.
            FromStore::Ended(ended)
                if (following.follow.waits_for_a_seat() || !following.follow.is_connected())
                    && !following.follow.is_cut_off() =>
            {
                self.terminal.print(format!("the job has ended: {}", ended.why));
                following.cut_off = Some(ended.why.clone());
                self.exit = Some(exit_of(&ended));
            }
            FromStore::Trouble(why) => self.terminal.print(why),
            FromStore::Leader(None) | FromStore::Deposed(_) | FromStore::Written(_) | FromStore::Ended(_) => {
            }
        }
        self.follow();
    }

    /// Ends a follower that is cut off from the leader.
    pub(in crate::launch) fn look_for_leader(&mut self) {
        let Decider::Following(following) = &mut self.decider else { return };
        let store_session = &mut following.store_session;
        let silent = store_session.silent_for().map(span);
        let led = store_session.leader().is_some_and(|leader| !store_session.is_me(leader));
        following.follow.look(clock::mono(), silent, led);
        self.follow();
    }

    /// Checks whether the leader is alive, if this launcher has a say on it.
    fn look_at_leader(&mut self) {
        let Decider::Following(following) = &self.decider else { return };
        let (store_session, follows) = (&following.store_session, &following.follow.leader().launcher);
        let Some(leader) =
            store_session.leader().filter(|leader| store_session.has_vote() && leader.launch == *follows)
        else {
            return;
        };
        if let Some(address) = leader.addresses.first().cloned() {
            self.look_at_launcher(leader.launch.clone(), address);
        }
    }

    fn cut_off(&mut self, why: CutOff) {
        let Decider::Following(following) = &mut self.decider else { return };
        let (endpoint, lease) = (following.plan.endpoint(), following.plan.lease());
        let (reason, is_without_leader) = match why {
            CutOff::NoLeader => (format!("no leader at {endpoint} for {lease}"), true),
            CutOff::Replaced => ("this host's place in the job was given to another one".to_owned(), false),
            CutOff::Refused(why) => (format!("the leader refuses this host: {why}"), false),
            CutOff::NoRecord => {
                ("the leader is lost, and no host that has a record of the job leads it".to_owned(), true)
            }
        };
        following.cut_off = Some(reason.clone());
        self.terminal.print(format!("the ranks of this host are stopped: {reason}"));
        if is_without_leader {
            self.leader_is_lost(&reason);
        }
        self.stop_and_hand_back();
    }

    /// Records the end of the job for this host: no launcher can lead it.
    fn leader_is_lost(&mut self, reason: &str) {
        let Decider::Following(following) = &self.decider else { return };
        let (at, host) = (clock::mono(), following.follow.leader().host.clone());
        let headline = format!("host {host}, which leads the job, is lost");
        self.snapshots.show_due();
        let view = self.snapshots.reader().view();
        let last = view.jobs.get(&self.id).and_then(|job| job.last_verdict.as_ref());
        let incident = Incident(last.map_or(0, |verdict| verdict.incident.0) + 1);
        let exit = self.settings.policy.hand_back_exit;
        let decision = Decision {
            incident,
            action: Action::HandBack { exit },
            after: Span::default(),
            why: "no other host can lead the job; start it again on all hosts".to_owned(),
            by: DecidedBy::Launcher,
            agent_evidence: false,
        };
        let verdict = host_missing(incident, self.attempt, host, &headline, at);
        let verdict = Verdict { evidence: vec![reason.to_owned()], ..verdict };
        self.publish_body(at, Body::Verdict(verdict));
        self.publish_body(at, Body::Decision(decision));
    }

    /// Stops the ranks of this host and hands it back to the scheduler. Nothing more is decided for it.
    pub(in crate::launch) fn stop_and_hand_back(&mut self) {
        if self.ranks.iter().any(|rank| rank.exit.is_none()) {
            let (attempt, why) = (self.attempt, StopWhy::Requested);
            self.tasks.push_back(Task::Command(Command::Stop { attempt, why, save_after: None }));
        } else {
            self.exit = Some(self.settings.policy.hand_back_exit);
        }
    }

    /// Sends an entry to the agent of this host, which knows only the ranks of this host by their processes.
    pub(in crate::launch) fn send_entry(&mut self, entry: Entry) {
        // While older entries are being read for it, this one follows them.
        if self.agent_has.is_none() {
            self.send_entry_now(entry);
        }
    }

    pub(in crate::launch) fn send_entry_now(&mut self, mut entry: Entry) {
        if let Body::Fact(Fact::AttemptStarted { ranks, hosts, .. }) = &mut entry.body {
            let seat = &self.rank_spec.seat;
            let here = seat.first_rank..seat.first_rank + self.rank_spec.local_world_size;
            ranks.retain(|started| here.contains(&started.rank.0));
            hosts.retain(|host| here.contains(&host.first_rank.0));
        }
        self.send(crate::launcher_link::agent::LinkOrder::Entry(Box::new(entry)));
    }
}
