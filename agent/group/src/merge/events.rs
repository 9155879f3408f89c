//! Events of hosts: the leader answers them, combines them with those of other hosts, or passes them to the job.

use std::collections::VecDeque;

use super::{HELD, Merge, Next, Phase};
use mainstay_hang::{ACTIVITY, PlaceGroup, Waits, fold};
use mainstay_model::entry::Fact;
use mainstay_model::id::Attempt;
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::protocol::Event;

/// The evidence that hosts have collected.
#[derive(Clone, Debug, Default)]
pub(super) struct Evidence {
    pub(super) file: Option<String>,
    pub(super) groups: Vec<PlaceGroup>,
    pub(super) waits: Vec<Waits>,
    pub(super) summary: Vec<String>,
    pub(super) took: Span,
}

impl Merge {
    /// Something happened on the host at this seat.
    pub fn step(&mut self, at: Mono, seat: u32, event: Event, next: &mut VecDeque<Next>) {
        match event {
            Event::Opened { attempt, port } if attempt == self.attempt && self.phase == Phase::Opening => {
                self.opened(at, seat, port, next);
            }
            Event::Holding { attempt, copies } if attempt == self.attempt => {
                self.holds(at, seat, copies, next);
            }
            Event::Brought { attempt, step, error } if attempt == self.attempt => {
                self.brought(at, seat, &step, error, next);
            }
            Event::Seated { attempt, seat: has } if attempt == self.attempt => {
                self.has_seat(seat, &has, next);
            }
            Event::Opened { .. }
            | Event::Seated { .. }
            | Event::Holding { .. }
            | Event::Brought { .. }
            | Event::Looked { .. } => {}
            Event::Fact(fact) => self.fact(at, seat, fact, next),
            event => self.pass(at, seat, event, next),
        }
    }

    fn fact(&mut self, at: Mono, seat: u32, fact: Fact, next: &mut VecDeque<Next>) {
        let current = self.attempt;
        match fact {
            Fact::AttemptStarted { attempt, ranks, .. } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.started = Some(ranks);
                self.started_if_all_have(at, next);
            }
            Fact::StartFailed { attempt, error, .. } if attempt == current => {
                if matches!(self.phase, Phase::Starting { .. }) {
                    let error = self.on_host(seat, error);
                    match self.hosts.len() {
                        // No other host has started ranks.
                        1 => self.fail(at, error, next),
                        _ => self.abandon(error, next),
                    }
                }
            }
            Fact::AttemptEnded { attempt, orphans_killed, waiting } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.ended = Some((orphans_killed, waiting));
                self.end_if_over(at, next);
            }
            Fact::EvidenceTaken { attempt, file, groups, waits, summary, took } if attempt == current => {
                let Some(host) = self.host(seat) else { return };
                host.evidence = Some(Evidence { file, groups, waits, summary, took });
                self.evidence_if_complete(at, next);
            }
            Fact::RanksHung { attempt, ref hang, .. } if attempt == current && hang.phase == ACTIVITY => {
                // Each host judges ranks without heartbeats itself, by the activity of their processes: ranks that
                // wait for another host do nothing.
                if let Some(host) = self.host(seat) {
                    host.idle = true;
                }
                if self.hosts.iter().all(|host| host.idle || !host.here) {
                    self.pass(at, seat, Event::Fact(fact), next);
                }
            }
            Fact::HangPassed { attempt, .. } if attempt == current => {
                if let Some(host) = self.host(seat) {
                    host.idle = false;
                }
                self.collecting = false;
                self.pass(at, seat, Event::Fact(fact), next);
            }
            Fact::StopRequested { .. } => {
                if matches!(self.phase, Phase::Waiting { .. }) {
                    // The job waits for a start that may never happen.
                    let missing = self.missing();
                    self.fail(at, format!("asked to stop while {missing} was missing"), next);
                }
                if matches!(self.phase, Phase::Arranged | Phase::Seating { .. }) {
                    self.fail(at, "asked to stop while hosts got other ranks".to_owned(), next);
                }
                if matches!(self.phase, Phase::Gathering { .. } | Phase::Bringing { .. }) {
                    self.fail(at, "asked to stop while checkpoints were restored".to_owned(), next);
                }
                next.push_back(Next::Job(at, Event::Fact(fact)));
            }
            Fact::RankExited { attempt, rank, .. } if attempt == current => {
                if let Some(host) = self.host(seat) {
                    host.exited.insert(rank);
                }
                self.pass(at, seat, Event::Fact(fact), next);
            }
            fact => self.pass(at, seat, Event::Fact(fact), next),
        }
    }

    /// Passes on events about ranks; during a start only after all hosts have started.
    pub(super) fn pass(&mut self, at: Mono, seat: u32, event: Event, next: &mut VecDeque<Next>) {
        if !self.of_the_attempt(&event) || matches!(self.phase, Phase::Started | Phase::Idle) {
            return next.push_back(Next::Job(at, event));
        }
        let Some(host) = self.host(seat) else { return };
        if host.held.len() < HELD {
            host.held.push_back((at, event));
        } else {
            self.dropped += 1;
        }
    }

    fn of_the_attempt(&self, event: &Event) -> bool {
        let attempt = match event {
            Event::Steps { attempt, .. } | Event::Role { attempt, .. } => Some(*attempt),
            Event::Fact(fact) => of_ranks(fact),
            _ => None,
        };
        attempt == Some(self.attempt)
    }

    pub(super) fn evidence_if_complete(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !self.collecting || self.awaits(|host| host.here && host.evidence.is_none()) {
            return;
        }
        self.collecting = false;
        let mut all = Evidence::default();
        let several = self.hosts.len() > 1;
        for host in &mut self.hosts {
            let named = host.named();
            let Some(Evidence { file, groups, waits, summary, took }) = host.evidence.take() else {
                continue;
            };
            all.file = all.file.or_else(|| file.clone());
            all.summary.extend(file.filter(|_| several).map(|file| format!("{named}: {file}")));
            all.groups.extend(groups);
            all.waits.extend(waits);
            all.summary.extend(summary);
            all.took = all.took.max(took);
        }
        let Evidence { file, groups, waits, summary, took } = all;
        let of_group =
            |group: PlaceGroup| group.ranks.into_iter().map(move |rank| (rank, group.place.clone()));
        let groups = fold(groups.into_iter().flat_map(of_group));
        let attempt = self.attempt;
        let taken = Fact::EvidenceTaken { attempt, file, groups, waits, summary, took };
        next.push_back(Next::Job(at, Event::Fact(taken)));
    }
}

/// The attempt of a fact about ranks that the job understands only when it knows them.
fn of_ranks(fact: &Fact) -> Option<Attempt> {
    match fact {
        Fact::RankConnected { attempt, .. }
        | Fact::RankRefused { attempt, .. }
        | Fact::RankRaised { attempt, .. }
        | Fact::RankEnding { attempt, .. }
        | Fact::RankExited { attempt, .. }
        | Fact::HostLost { attempt, .. }
        | Fact::RanksHung { attempt, .. }
        | Fact::HangPassed { attempt, .. } => Some(*attempt),
        _ => None,
    }
}
