//! The store: who leads, what the leader wrote, and who takes over.

use mainstay_core::base::id::Attempt;
use mainstay_core::base::time::{Stamp, Wall};
use mainstay_core::model::entry::JobSpec;
use mainstay_core::recovery::hosts::record::Record;
use mainstay_core::recovery::hosts::round::Seated;
use mainstay_core::recovery::hosts::succession::{Adopted, OnElection, OnLeader, Standing};

use super::host::leader;
use super::{PATIENCE, World, settings};

/// The coordination store: who leads, and what the leader wrote.
#[derive(Default)]
pub(super) struct Store {
    pub(super) away: bool,
    pub(super) leader: Option<(usize, u64)>,
    pub(super) record: Option<Record>,
    /// The epoch of whom was elected last.
    pub(super) record_epoch: u64,
    /// What launchers last read of it: it counts where the store lost the record.
    pub(super) read: Option<Record>,
}

pub(super) fn record(me: usize, seats: &[Seated], ended: Option<i32>, running: bool) -> Record {
    Record {
        at: Stamp::default(),
        seats: seats.to_vec(),
        leader: seats[me].member.launcher.clone(),
        job: "job".to_owned(),
        launch: "launch".to_owned(),
        attempt: Attempt(0),
        running,
        carried: None,
        ended,
    }
}

impl World {
    pub(super) fn reaches_store(&self, seat: usize) -> bool {
        !self.store.away && !self.hosts[seat].cut && self.hosts[seat].runs()
    }

    /// A launcher learns who leads.
    pub(super) fn read_store(&mut self, seat: usize) {
        if !self.reaches_store(seat) {
            return;
        }
        let Some(now) = self.store.leader else { return };
        let leader = self.hosts[now.0].seated.member.launcher.clone();
        let host = &mut self.hosts[seat];
        match host.standing().on_leader(&host.seated.member.launcher, &leader, now.1) {
            OnLeader::Nothing => {}
            OnLeader::NewEpoch => host.follows.1 = now.1,
            OnLeader::Follow => host.follow(now, &leader),
            // It was only slow: its ranks end with it.
            OnLeader::StepDown => host.crash(),
        }
    }

    /// A leader has its record stored, and carries out what waited for it.
    pub(super) fn write_record(&mut self, seat: usize) {
        if !self.reaches_store(seat) || self.hosts[seat].leads.is_none() {
            return;
        }
        let mine = self.leader(seat).epoch;
        let standing = Standing::Leads { epoch: mine };
        match self.store.leader {
            Some((of, epoch)) if of == seat && epoch == mine => {}
            // The store lost it: it is elected again, if no one else is.
            None => {
                if standing.on_election(false, Some(self.store.record_epoch)) == OnElection::StepDown {
                    return self.hosts[seat].crash();
                }
                self.highest_epoch += 1;
                let epoch = self.highest_epoch;
                (self.store.leader, self.store.record_epoch) = (Some((seat, epoch)), epoch);
                self.leader(seat).epoch = epoch;
                self.hosts[seat].follows = (seat, epoch);
            }
            Some(_) => return self.hosts[seat].crash(),
        }
        let now = self.now;
        let leader = self.leader(seat);
        let carried = leader.job.carried();
        let running = leader.merge.has_started() && leader.merge.attempt() == carried.attempt;
        let seats: Vec<Seated> = leader.merge.seats().cloned().collect();
        for order in std::mem::take(&mut leader.held) {
            leader.merge.order(now, order, &mut leader.next);
        }
        let over = leader.over;
        let written = Record { ended: over, carried: Some(carried), ..record(seat, &seats, None, running) };
        let attempt = written.carried.as_ref().expect("written").attempt;
        self.store.record = Some(Record { attempt, ..written });
        self.store.read.clone_from(&self.store.record);
    }

    /// The store forgets a leader that it does not hear of.
    pub(super) fn lease_ends(&mut self) {
        let Some((of, _)) = self.store.leader else { return };
        if !self.store.away && !self.reaches_store(of) {
            self.store.leader = None;
        }
    }

    /// A follower without a leader takes its place.
    pub(super) fn elect(&mut self, seat: usize) {
        let host = &self.hosts[seat];
        let takes_over = host.standing().on_election(host.connected, None) == OnElection::TakeOver;
        if !takes_over || host.finished.is_some() || !self.reaches_store(seat) || self.store.leader.is_some()
        {
            return;
        }
        let Some(record) = self.store.record.clone().or_else(|| self.store.read.clone()) else { return };
        let now = Stamp { mono: self.now, wall: Wall(i64::try_from(self.now.0).expect("small")) };
        self.highest_epoch += 1;
        self.leaders += 1;
        let epoch = self.highest_epoch;
        (self.store.leader, self.store.record_epoch) = (Some((seat, epoch)), epoch);
        let member = host.seated.member.clone();
        let adopted = Adopted::of(&record, seat as u32, member, host.attempt.unwrap_or_default(), now);
        let spec = JobSpec { world_size: record.seats[0].seat.world_size, ..JobSpec::default() };
        let (job, merge) = adopted.resume(self.now, spec, settings(), PATIENCE);
        let log = std::mem::take(&mut self.hosts[seat].log);
        let me = self.hosts[seat].seated.member.launcher.clone();
        self.hosts[seat].follow((seat, epoch), &me);
        let mut leader = leader(job, merge, epoch);
        for report in &log {
            leader.merge.report(self.now, seat as u32, report.clone(), &mut leader.next);
        }
        if let Some(before) = adopted.lost.filter(|before| before.seat.group_rank as usize != seat) {
            leader.merge.lost(self.now, before.seat.group_rank, "it led the job", &mut leader.next);
        }
        leader.merge.give_up_start(self.now, &mut leader.next);
        let host = &mut self.hosts[seat];
        (host.log, host.leads) = (log, Some(Box::new(leader)));
    }

    pub(super) fn end_trouble(&mut self, seat: usize) {
        let host = &mut self.hosts[seat];
        (host.stalled, host.cut, self.store.away) = (false, false, false);
    }
}
