//! The invariants that hold for all failures.

use mainstay_group::record::Record;
use mainstay_recovery::protocol::Command;

use super::launcher::{Brain, Launcher};
use super::{LEASE_SPAN, World};

impl World {
    /// An order of this epoch is carried out. One launcher gives all orders of an epoch.
    pub fn acts_in(&mut self, epoch: u64, leader: usize, command: &Command) {
        let by = self.acted.entry(epoch).or_insert(leader);
        assert_eq!(*by, leader, "two leaders act in epoch {epoch}: {command:?}");
    }

    /// The store elects a launcher. Each epoch has one leader.
    pub fn check_epoch(&mut self, launcher: usize, epoch: u64) {
        let by = self.elected.entry(epoch).or_insert(launcher);
        assert_eq!(*by, launcher, "two leaders write in epoch {epoch}");
    }

    /// The job ends: the store has its status, or a launcher exits with one. All agree, unless an end was not stored.
    pub fn check_end(&mut self, who: usize, exit: i32) {
        let ended = *self.exit.get_or_insert(exit);
        let same = ended == exit || self.ended_unstored;
        assert!(same, "{} ends the job with {exit}, and it ended with {ended}", self.launchers[who].name);
    }

    /// A leader announces the end of the job. If the end is not stored, the store must have been silent for a lease, so
    /// that no other launcher leads. Known limit: a launcher that loses this leader and the store at that time may.
    pub fn check_told_end(&mut self, leader: usize, exit: i32) {
        if self.exit != Some(exit) && !self.ended_unstored {
            let silent = self.silent_for(leader);
            let name = &self.launchers[leader].name;
            assert!(
                silent >= Some(LEASE_SPAN),
                "{name} announces an end that is not stored; store silent for {silent:?}"
            );
            self.ended_unstored = true;
        }
    }

    /// A launcher exits. The end of the job is checked if the launcher still takes part in it.
    pub fn check_exit(&mut self, me: usize, exit: i32) {
        let launcher = &self.launchers[me];
        let finished = match &launcher.brain {
            Brain::Follows(follow) => !follow.is_cut_off(),
            Brain::Leads(lead) => !lead.is_deposed(),
            Brain::Waits(_) | Brain::Gone => false,
        };
        if finished {
            self.check_end(me, exit);
        }
    }

    /// Prints an event if `MAINSTAY_TRACE` is set.
    pub fn trace(&self, what: impl FnOnce(&World) -> String) {
        if self.traces {
            eprintln!("{:9.3} {}", self.now as f64 / super::SECOND as f64, what(self));
        }
    }

    pub fn reported(&self) -> String {
        let launchers = self.launchers.iter().filter(|launcher| launcher.runs()).map(|launcher| {
            let brain = match &launcher.brain {
                Brain::Leads(lead) => format!(
                    "leads in {}, deposed {}, waits for {:?}, attempt {:?}, over {:?}, office {:?}",
                    lead.epoch(),
                    lead.is_deposed(),
                    lead.merge().waits_for(),
                    lead.merge().attempt(),
                    lead.over(),
                    launcher.client.leads_in,
                ),
                Brain::Follows(follow) => format!(
                    "follows {:?}, connected {}, cut off {}",
                    follow.leader(),
                    follow.is_connected(),
                    follow.is_cut_off()
                ),
                Brain::Waits(leader) => format!("waits at {leader:?}"),
                Brain::Gone => String::new(),
            };
            format!(
                "\n{}: {brain}; attempt {:?} living {:?} waiting {:?} exit {:?} connection {:?}",
                launcher.name,
                launcher.attempt,
                launcher.living,
                launcher.waiting,
                launcher.exit,
                launcher.connection
            )
        });
        format!(
            "{} s, store {:?} ended {:?}{}",
            self.now / super::SECOND,
            self.store.leader,
            self.store.ended,
            launchers.collect::<String>()
        )
    }

    /// When a launcher gives up because it has no record of the job, no other launcher could lead.
    pub fn check_nobody_can_lead(&self, me: usize) {
        let could = |(at, launcher): (usize, &Launcher)| {
            let Brain::Follows(follow) = &launcher.brain else { return false };
            let is_seated =
                |record: &Record| record.seats.iter().any(|seated| seated.member.launcher == launcher.name);
            at != me
                && self.silent_for(at).is_none()
                && !follow.is_cut_off()
                && launcher.client.record.as_deref().is_some_and(is_seated)
        };
        let others = self.launchers.iter().enumerate().filter(|of| could(*of));
        let others: Vec<_> = others.map(|(_, launcher)| &launcher.name).collect();
        assert!(others.is_empty(), "it gives up, but {others:?} could lead");
    }
}
