//! The limits that hold whatever fails.

use mainstay_core::model::entry::{Body, Fact};
use mainstay_core::recovery::hosts::wire::Command;

use super::World;
use super::launcher::Brain;

impl World {
    /// An order of this epoch is carried out: one launcher gives all of them.
    pub fn acts_in(&mut self, epoch: u64, leader: usize, command: &Command) {
        let by = self.acted.entry(epoch).or_insert(leader);
        assert_eq!(*by, leader, "two leaders act in epoch {epoch}: {command:?}");
    }

    /// The store elects a launcher: each epoch has one leader.
    pub fn check_epoch(&mut self, launcher: usize, epoch: u64) {
        let by = self.elected.entry(epoch).or_insert(launcher);
        assert_eq!(*by, launcher, "two leaders write in epoch {epoch}");
    }

    /// A leader writes an entry of its own.
    pub fn check_entry(&mut self, me: usize, body: &Body) {
        if let Body::Fact(Fact::JobEnded { exit, .. }) = body {
            let ended = *self.exit.get_or_insert(*exit);
            assert_eq!(ended, *exit, "{} ends the job with another status", self.launchers[me].name);
        }
    }

    /// A launcher exits.
    pub fn check_exit(&mut self, me: usize, exit: i32) {
        let launcher = &self.launchers[me];
        let finished = match &launcher.brain {
            Brain::Follows(follow) => !follow.is_cut_off(),
            Brain::Leads(lead) => !lead.is_deposed(),
            Brain::Waits(_) | Brain::Gone => false,
        };
        if finished {
            assert_eq!(Some(exit), self.exit, "all launchers exit with the same status");
        }
    }

    /// What happens, for people: with `MAINSTAY_TRACE` set.
    pub fn trace(&self, what: impl FnOnce(&World) -> String) {
        if self.traces {
            eprintln!("{:9.3} {}", self.now as f64 / super::SECOND as f64, what(self));
        }
    }

    pub fn told(&self) -> String {
        let launchers = self.launchers.iter().filter(|launcher| launcher.runs()).map(|launcher| {
            let brain = match &launcher.brain {
                Brain::Leads(lead) => format!(
                    "leads in {}, deposed {}, waits for {:?}, attempt {:?}, over {:?}, office {:?}",
                    lead.epoch(),
                    lead.is_deposed(),
                    lead.merge().waits_for(),
                    lead.merge().attempt(),
                    lead.over(),
                    launcher.client.office,
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
}
