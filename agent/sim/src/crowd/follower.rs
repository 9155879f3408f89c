//! A follower of a large job: its answers to commands. The cost of followers is not measured.

use mainstay_checkpoint::inventory::StepKey;
use mainstay_model::id::{Attempt, Rank};
use mainstay_recovery::protocol::{Command, Seat};

/// A report of a follower.
#[derive(Clone, Debug)]
pub(super) enum FollowerReport {
    /// A rank was killed.
    Died,
    /// Its ranks are stopped.
    Stopped(Attempt),
    /// It has opened the port for the store of the ranks.
    Opened(Attempt),
    Seated(Attempt, Seat),
    /// The checkpoints that it holds.
    Holding(Attempt),
    Brought(Attempt, StepKey),
    Started(Attempt),
    /// The clients of its ranks have connected.
    Connected(Attempt),
}

#[derive(Debug)]
pub(super) struct Follower {
    host: u32,
    ranks: u32,
    /// The number of the newest report.
    number: u64,
    /// The time at which its newest message arrives.
    pub(super) last: u64,
    pub(super) attempt: Attempt,
}

impl Follower {
    pub(super) fn new(host: u32, ranks: u32) -> Follower {
        Follower { host, ranks, number: 0, last: 0, attempt: Attempt(0) }
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let first = self.host * self.ranks;
        (first..first + self.ranks).map(Rank)
    }

    /// Its reports after it has carried out a command.
    pub(super) fn obey(&mut self, command: &Command) -> Vec<FollowerReport> {
        match command {
            Command::Stop { attempt, .. } => vec![FollowerReport::Stopped(*attempt)],
            Command::Open { attempt } => vec![FollowerReport::Opened(*attempt)],
            Command::Seat { attempt, seat } => vec![FollowerReport::Seated(*attempt, seat.clone())],
            Command::Gather { attempt, .. } => vec![FollowerReport::Holding(*attempt)],
            Command::Bring { attempt, step } => vec![FollowerReport::Brought(*attempt, step.clone())],
            Command::Start { attempt, .. } => {
                self.attempt = *attempt;
                vec![FollowerReport::Started(*attempt), FollowerReport::Connected(*attempt)]
            }
            Command::EndRank { .. }
            | Command::Consult(_)
            | Command::AskPolicy { .. }
            | Command::Wake { .. }
            | Command::TakeEvidence { .. }
            | Command::AskToSave { .. }
            | Command::SaveDue { .. }
            | Command::Look { .. }
            | Command::Finish { .. } => Vec::new(),
        }
    }
}
