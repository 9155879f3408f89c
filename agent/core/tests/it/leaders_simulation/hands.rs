//! What launchers do for a leader, and what they report to it.

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::model::entry::{ExitStatus, Fact};
use mainstay_core::recovery::hosts::wire::{Command, Report};
use mainstay_core::recovery::job::StopWhy;

use super::{BUDGET, World};
use crate::support::cluster;

impl World {
    pub(super) fn command(&mut self, me: usize, seat: usize, command: Command) {
        let epoch = self.leader(me).epoch;
        if seat == me {
            return self.obey(seat, (me, epoch), command);
        }
        let number = self.leader(me).links[seat].commands.push(command.clone()).expect("room");
        let host = &mut self.hosts[seat];
        if host.connected && host.follows.0 == me {
            host.down.push_back((number, epoch, command));
        }
    }

    /// What a host saw goes to its leader, which may be itself.
    pub(super) fn report(&mut self, seat: usize, report: Report) {
        let now = self.now;
        let host = &mut self.hosts[seat];
        if let Report::Fact { fact: Fact::AttemptStarted { .. } | Fact::StartFailed { .. } } = report {
            host.log.clear();
        }
        if !matches!(report, Report::Opened { .. } | Report::Fact { fact: Fact::AttemptEnded { .. } }) {
            host.log.push(report.clone());
        }
        if let Some(leader) = &mut host.leads {
            return leader.merge.report(now, seat as u32, report, &mut leader.next);
        }
        let number = host.reports.push(report.clone()).expect("room");
        if host.connected {
            host.up.push_back((number, report));
        }
    }

    pub(super) fn exited(&mut self, seat: usize, rank: Rank, status: ExitStatus, after_stop: bool) {
        let host = &mut self.hosts[seat];
        let Some(attempt) = host.living.remove(&rank) else { return };
        host.waiting.remove(&rank);
        let fact = cluster::exited(attempt, rank, status, after_stop);
        self.report(seat, Report::Fact { fact });
    }

    pub(super) fn end_attempt(&mut self, seat: usize, attempt: Attempt) {
        let waiting = self.hosts[seat].waiting.iter().copied().collect();
        self.report(seat, Report::Fact { fact: Fact::AttemptEnded { attempt, orphans_killed: 0, waiting } });
    }

    pub(super) fn obey(&mut self, seat: usize, (from, epoch): (usize, u64), command: Command) {
        let fails = self.faults && self.chance.one_in(60);
        assert!(epoch >= self.hosts[seat].follows.1, "an order of a leader that was replaced is obeyed");
        match command {
            Command::Open { attempt } => {
                self.port += 1;
                let port = if fails { Err("no port".to_owned()) } else { Ok(self.port) };
                self.report(seat, Report::Opened { attempt, port });
            }
            Command::Gather { attempt, .. } => {
                self.report(seat, Report::Holding { attempt, copies: Vec::new() });
            }
            Command::Bring { attempt, step } => {
                self.report(seat, Report::Brought { attempt, step, error: None });
            }
            Command::Start { attempt, in_process, master_port, .. } => {
                let leader = self.hosts[from].seated.member.launcher.clone();
                let by = self.started_by.entry(attempt).or_insert(leader.clone());
                assert_eq!(*by, leader, "{attempt} is started by two leaders");
                assert!(attempt.0 == 0 || self.counted.contains(&attempt), "{attempt} was counted by nobody");
                assert!(attempt.0 <= BUDGET, "{attempt} is beyond the budget");
                let host = &mut self.hosts[seat];
                assert!(
                    host.attempt.is_none_or(|before| before < attempt),
                    "{attempt} starts once on a host"
                );
                host.attempt = Some(attempt);
                if !in_process && !host.living.is_empty() {
                    // A host whose leader does not know of its ranks.
                    let fact = Fact::StartFailed { attempt, error: "ranks still run here".to_owned() };
                    return self.report(seat, Report::Fact { fact });
                }
                let living = &host.living;
                assert!(
                    living.keys().all(|rank| host.waiting.contains(rank)),
                    "a rank that does not wait lives at the start of {attempt}"
                );
                if fails {
                    let fact = Fact::StartFailed { attempt, error: "no memory".to_owned() };
                    return self.report(seat, Report::Fact { fact });
                }
                let ranks = host.ranks();
                host.living.extend(ranks.iter().map(|rank| (*rank, attempt)));
                host.waiting.clear();
                let fact = cluster::started(attempt, master_port, ranks.into_iter());
                self.report(seat, Report::Fact { fact });
            }
            Command::Stop { attempt, why, .. } => {
                if self.hosts[seat].attempt.is_none_or(|of| of <= attempt) {
                    // As launchers do: an earlier start of this attempt that comes late is not carried out any more.
                    self.hosts[seat].attempt = Some(attempt);
                    let gather = why == StopWhy::Fault && self.in_process;
                    for rank in self.hosts[seat].ranks() {
                        if gather && self.hosts[seat].living.contains_key(&rank) {
                            self.hosts[seat].waiting.insert(rank);
                        } else {
                            self.exited(seat, rank, ExitStatus::Signal(15), true);
                        }
                    }
                }
                self.end_attempt(seat, attempt);
            }
            Command::EndRank { attempt, rank } => {
                self.exited(seat, rank, ExitStatus::Signal(9), true);
                self.end_attempt(seat, attempt);
            }
            Command::Seat { .. } | Command::TakeEvidence { .. } | Command::SaveDue { .. } => {}
            Command::Finish { exit, .. } => self.hosts[seat].finished = Some(exit),
        }
    }

    pub(super) fn rank_dies(&mut self, seat: usize) {
        let host = &self.hosts[seat];
        if !host.runs() {
            return;
        }
        let living: Vec<Rank> =
            host.living.keys().copied().filter(|rank| !host.waiting.contains(rank)).collect();
        if let Some(rank) = living.get(self.chance.below(living.len())) {
            self.exited(seat, *rank, ExitStatus::Signal(9), false);
        }
    }

    /// All ranks of an attempt that runs are done.
    pub(super) fn finish_ranks(&mut self) {
        for seat in 0..self.hosts.len() {
            let host = &self.hosts[seat];
            let runs = |rank: &Rank| host.runs() && !host.waiting.contains(rank);
            let living: Vec<Rank> = host.living.keys().copied().filter(runs).collect();
            for rank in living {
                self.exited(seat, rank, ExitStatus::Code(0), false);
            }
        }
    }
}
