//! A follower of a large job: what it answers to commands. The followers are not what is measured.

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::checkpoint::inventory::StepKey;
use mainstay_core::recovery::hosts::wire::{Command, Seat};

/// What a follower has to report.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// A rank was killed.
    Died,
    /// Its ranks are stopped.
    Stopped(Attempt),
    /// The port for the ranks' store.
    Opened(Attempt),
    Seated(Attempt, Seat),
    /// What it holds of checkpoints.
    Holding(Attempt),
    Brought(Attempt, StepKey),
    Started(Attempt),
    /// Its ranks' clients have connected.
    Connected(Attempt),
}

#[derive(Debug)]
pub(super) struct Follower {
    host: u32,
    ranks: u32,
    /// The newest report.
    number: u64,
    /// When its newest message arrives.
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

    /// What it reports when a command is carried out.
    pub(super) fn obey(&mut self, command: &Command) -> Vec<Answer> {
        match command {
            Command::Stop { attempt, .. } => vec![Answer::Stopped(*attempt)],
            Command::Open { attempt } => vec![Answer::Opened(*attempt)],
            Command::Seat { attempt, seat } => vec![Answer::Seated(*attempt, seat.clone())],
            Command::Gather { attempt, .. } => vec![Answer::Holding(*attempt)],
            Command::Bring { attempt, step } => vec![Answer::Brought(*attempt, step.clone())],
            Command::Start { attempt, .. } => {
                self.attempt = *attempt;
                vec![Answer::Started(*attempt), Answer::Connected(*attempt)]
            }
            Command::EndRank { .. }
            | Command::TakeEvidence { .. }
            | Command::SaveDue { .. }
            | Command::Look { .. }
            | Command::Finish { .. } => Vec::new(),
        }
    }
}
