//! What a follower has seen, for its leader and for the next one.

use super::{Act, Follow};
use crate::base::id::Attempt;
use crate::base::time::Mono;
use crate::hang::RankSeen;
use crate::model::entry::Fact;
use crate::recovery::hosts::wire::{Report, Up};
use crate::recovery::job::ORDERS;

/// What a host has seen of an attempt is kept for the next leader, so much of it at most.
const LOG: usize = 65_536;

impl Follow {
    /// Something that concerns the whole job happened here.
    pub fn report(&mut self, at: Mono, report: Report) {
        if let Report::Looked { launcher, sight } = &report
            && *launcher == self.leader.launcher
        {
            return self.saw_leader(*sight);
        }
        self.runs &= !is_end(&report);
        self.keep(at, &report);
        if self.catches_up {
            // An answer to the new leader: it goes with the rest, also if the connection has just ended. What it ordered is
            // not ordered again.
            if (self.is_connected() || self.stops) && is_end(&report) {
                self.log.push_back((at, report));
            }
            return;
        }
        let (at, report) = (self.clock.to_leader(at), self.clock.report(report));
        match self.outbox.push((at, report.clone())) {
            Ok(number) => self.send(Up::Report { number, at, report }),
            // Far more than a leader that lives leaves unread.
            Err(_) => self.gone = Some(Mono(0)),
        }
    }

    /// Keeps what was seen for a leader to come. What is of earlier attempts is decided.
    fn keep(&mut self, at: Mono, report: &Report) {
        if let Report::Fact { fact: Fact::AttemptStarted { .. } | Fact::StartFailed { .. } } = report {
            self.log
                .retain(|(_, report)| matches!(report, Report::Fact { fact: Fact::StopRequested { .. } }));
        }
        // Steps are many, and the next ones tell of those before. That an attempt has ended is asked for again by whoever has
        // it stopped: an old answer would be taken for the new one.
        let again = match report {
            Report::Steps { .. }
            | Report::Opened { .. }
            | Report::Seated { .. }
            | Report::Holding { .. }
            | Report::Brought { .. }
            | Report::Looked { .. } => false,
            Report::Fact { fact } => !matches!(fact, Fact::AttemptEnded { .. }),
            Report::Role { .. } => true,
        };
        if again && self.log.len() < LOG {
            self.log.push_back((at, report.clone()));
        }
    }

    /// Whether the leader can be told now what ranks are at. Before the first round trip no time can be told.
    pub fn tells_sights(&self) -> bool {
        self.gone.is_none() && self.clock.uncertainty().is_some()
    }

    /// What ranks are at, for the leader, which judges whether they hang.
    pub fn seen(&mut self, attempt: Attempt, ranks: Vec<RankSeen>) {
        if !ranks.is_empty() {
            let clock = &self.clock;
            let ranks = ranks.into_iter().map(|seen| seen.on_clock(&|at| clock.to_leader(at))).collect();
            self.send(Up::Seen { attempt, ranks });
        }
    }

    pub(super) fn send_again(&mut self) {
        if self.open {
            let again = self.outbox.unacknowledged();
            let again =
                again.map(|(number, (at, report))| Up::Report { number, at: *at, report: report.clone() });
            self.acts.extend(again.map(Act::Send));
        }
    }

    /// Tells a new leader what was seen of the current attempt.
    pub(super) fn catch_up(&mut self) {
        self.catches_up = false;
        for (at, report) in self.log.clone() {
            // No more than what a leader that lives leaves unread.
            let _ = self.outbox.push((self.clock.to_leader(at), self.clock.report(report)));
        }
        self.log.retain(|(_, report)| !is_end(report));
        self.send_again();
    }
}

/// Whether this says that an attempt has ended on this host.
fn is_end(report: &Report) -> bool {
    matches!(report, Report::Fact { fact: Fact::AttemptEnded { .. } })
}

/// Whether a fact concerns the whole job, and not only the host on which it was seen.
pub fn concerns_all(fact: &Fact) -> bool {
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
            seen.component == ORDERS || matches!(seen.component.as_str(), "job" | "template")
        }
        _ => false,
    }
}
