//! What a leader stores before it acts, how it continues for a lost leader, and how it steps down.

use super::{Act, Here, Lead, LeaderSettings, SteppedDown};
use crate::merge::Next;
use crate::record::Record;
use crate::succession::{Adopted, LeadershipRole, OnElection, OnLeader};
use mainstay_model::entry::{Fact, HostLoss};
use mainstay_model::time::{Mono, Span, Stamp};
use mainstay_recovery::protocol::{Command, Event};

/// A job that is over waits at most this many leases for the store to accept its end, whatever the store answers.
const LEASES_TO_END: u64 = 6;

/// A command that waits until its record is stored.
#[derive(Clone, Debug)]
pub(super) struct PendingCommand {
    record: u64,
    since: Mono,
    command: Command,
}

impl Lead {
    fn standing(&self) -> LeadershipRole<'_> {
        LeadershipRole::Leads { epoch: self.leader_settings.epoch }
    }

    /// Handles a command of the job. One that starts ranks or ends the job waits until it is stored: the store refuses
    /// a leader that was replaced, and the next leader knows of each start.
    pub(super) fn order(&mut self, at: Mono, mut command: Command, here: &dyn Here) {
        match &mut command {
            Command::Finish { exit, .. } => self.over = Some(*exit),
            Command::AskToSave { save_after, .. } => *save_after = here.save_after(),
            Command::Stop { why, save_after, .. } if why.lets_save() => *save_after = here.save_after(),
            _ => {}
        }
        let is_recorded = matches!(command, Command::Start { .. } | Command::Finish { .. });
        if is_recorded && self.leader_settings.has_store {
            self.write_record();
            let record = self.leader_settings.newest_record;
            self.held.push_back(PendingCommand { record, since: at, command });
        } else {
            self.carry_out(at, command);
        }
    }

    /// Has the hosts carry out a command, or the leader's host one that is only for it.
    fn carry_out(&mut self, at: Mono, mut command: Command) {
        if let Command::Finish { summary, .. } = &mut command {
            *summary = Some(Box::new(self.job.summary(at)));
        }
        match command {
            Command::Consult(_) | Command::AskPolicy { .. } | Command::Wake { .. } => {
                self.next.push_back(Next::Command(self.leader_settings.seat, command));
            }
            command => self.merge.order(at, command, &mut self.next),
        }
    }

    /// Carries out the orders that waited for this record.
    fn release_held(&mut self, now: Mono, stored: u64) {
        while let Some(held) = self.held.pop_front_if(|held| held.record <= stored) {
            self.carry_out(now, held.command);
        }
    }

    /// Ends a job without storing its end once, as far as can be known here, no other launcher can lead it to a
    /// different one: the store has been silent for a lease. Before that, this launcher may be cut off from a store
    /// that has elected another. `silent`: how long the store has not answered.
    pub(super) fn end_without_record(&mut self, now: Mono, silent: Option<Span>) {
        let LeaderSettings { lease, .. } = self.leader_settings;
        // A store that answers accepts the record or names the new leader, even if that is a leader which was just
        // re-elected.
        let within = match silent.is_some_and(|silent| silent >= lease) {
            true => lease,
            false => Span(LEASES_TO_END.saturating_mul(lease.0)),
        };
        let is_due = |held: &mut PendingCommand| {
            matches!(held.command, Command::Finish { .. }) && now.since(held.since) >= within
        };
        if let Some(held) = self.held.pop_front_if(is_due) {
            self.carry_out(now, held.command);
        }
    }

    /// Whether the job is over here, and the store does not know it yet.
    fn holds_end(&self) -> bool {
        self.held.iter().any(|held| matches!(held.command, Command::Finish { .. }))
    }

    /// Drops a start that waits for the store.
    pub(super) fn give_up_held_start(&mut self, at: Mono) {
        for held in std::mem::take(&mut self.held) {
            match held.command {
                Command::Start { attempt, .. } => {
                    let error =
                        "asked to stop before the coordination store had a record of this attempt".to_owned();
                    self.fact(at, Fact::start_failed(attempt, error));
                }
                _ => self.held.push_back(held),
            }
        }
    }

    pub(super) fn write_record(&mut self) {
        self.record_due = false;
        if !self.leader_settings.has_store {
            return;
        }
        self.leader_settings.newest_record += 1;
        let carried = self.job.carried();
        let (job, launch) = self.leader_settings.names.clone();
        let record = Record {
            at: Stamp::default(),
            seats: self.seats().cloned().collect(),
            leader: self.leader_settings.launcher.clone(),
            job,
            launch,
            attempt: carried.attempt,
            running: self.has_started(carried.attempt),
            carried: Some(carried),
            ended: self.over,
        };
        if self.is_registered {
            self.acts.push_back(Act::Store(self.leader_settings.newest_record, Box::new(record)));
        }
    }

    /// This record is stored.
    pub fn stored(&mut self, now: Mono, number: u64) {
        self.release_held(now, number);
        if self.seats_due.is_some_and(|due| due <= number) {
            self.seats_are_stored(now);
        }
    }

    /// The store no longer knows the leader of this epoch.
    pub fn forgotten(&mut self, epoch: u64) {
        if !self.is_registered || self.leader_settings.epoch != epoch {
            return;
        }
        self.is_registered = false;
        self.acts.push_back(Act::Campaign);
        let message = "the coordination store no longer knows this leader; training goes on, and nothing is \
                    decided until a leader is elected";
        self.acts.push_back(Act::Print(message.to_owned()));
    }

    /// This launcher was elected again. `last`: the epoch of the record in the store.
    pub fn elected(&mut self, epoch: u64, last: Option<u64>) {
        if self.standing().on_election(false, last) == OnElection::StepDown {
            // That leader's actions are newer than what this launcher knows.
            return self.step_down(SteppedDown::LedMeanwhile);
        }
        // The store was wiped, or unavailable for longer than the lease: its contents are written again.
        self.acts.push_back(Act::Print(format!("this host leads again (epoch {epoch})")));
        (self.leader_settings.epoch, self.is_registered) = (epoch, true);
        self.write_record();
        let newest = self.leader_settings.newest_record;
        self.held.iter_mut().for_each(|held| held.record = newest);
        self.seats_due = self.seats_due.map(|_| newest);
    }

    /// The store names the leader.
    pub fn led_by(&mut self, launcher: &str, host: &str, epoch: u64) {
        if self.standing().on_leader(&self.leader_settings.launcher, launcher, epoch) == OnLeader::StepDown {
            self.step_down(SteppedDown::Replaced { host: host.to_owned(), epoch });
        }
    }

    /// The store records the end of the job. Unless this launcher wrote it, another one has led the job to its end,
    /// and there will be no leader again.
    pub fn ended(&mut self, exit: i32) {
        if self.over.is_none() || self.holds_end() {
            self.step_down(SteppedDown::Ended { exit });
        }
    }

    /// A leader is cut off if neither the store nor any follower answers, unless followers have left because the job
    /// is over.
    pub(super) fn look_at_store(&mut self, silent: Option<Span>) {
        if self.over.is_some() && !self.holds_end() {
            return;
        }
        let followed = self.links.len() == 1 || self.links.iter().any(|link| link.connection.is_some());
        if !followed && silent.is_some_and(|silent| silent >= self.leader_settings.lease) {
            self.step_down(SteppedDown::CutOff);
        }
    }

    fn step_down(&mut self, why: SteppedDown) {
        if self.deposed {
            return;
        }
        (self.deposed, self.is_registered) = (true, false);
        self.held.clear();
        self.close_all();
        self.acts.push_back(Act::StepDown(why));
    }

    /// Continues for a lost leader: from its record, and from what this host saw of the attempt.
    pub fn continue_from(
        &mut self,
        now: Mono,
        adopted: &Adopted,
        ended: Option<i32>,
        seen: impl IntoIterator<Item = (Mono, Event)>,
    ) {
        for (at, event) in seen {
            self.step(at, event);
        }
        self.over = self.over.or(ended);
        self.write_record();
        let lost = adopted.lost.as_ref().map(|seated| seated.seat.group_rank);
        if let Some(seat) = lost.filter(|seat| *seat != self.leader_settings.seat) {
            let how = (HostLoss::ReplacedLeader, "its launcher, which led the job, is lost");
            self.lose(now, seat as usize, how);
        }
        self.merge.give_up_start(now, &mut self.next);
    }
}
