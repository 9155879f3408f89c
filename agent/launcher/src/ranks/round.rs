//! Ranks that stay in their processes during a restart: they are gathered after a fault, counted, and sent into the next round.

use std::time::Duration;

use mainstay_model::entry::{Fact, Note};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::time::Span;
use mainstay_recovery::in_process::{Call, Received, RoundState, Word, is_fit};
use tokio::sync::mpsc;

use crate::ranks::process::RankProcess;
use crate::ranks::stop::{Stop, sweep};
use crate::ranks::warm::with_descendants;
use crate::run::{Ended, Launcher};
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::clock;

/// How long a killed process may take to be gone.
const DEATH_WITHIN: Duration = Duration::from_secs(5);

impl Launcher {
    /// A process sent a message about its round. Only messages from ranks of the current attempt count.
    pub(crate) async fn received(&mut self, pid: Pid, word: Word) {
        let known = self.ranks.living().find(|rank| rank.pid == pid);
        let Some(rank) = known.map(|rank| rank.rank) else {
            tracing::debug!(pid = pid.0, "a process that is not a rank of this attempt sent a round message");
            // It sees its connection end, and acts as it would without a launcher.
            if let Some(round_server) = &self.ranks.round_server {
                round_server.forget(pid);
            }
            return;
        };
        match self.ranks.round.receive(rank, word) {
            Received::Noted => {}
            Received::Late => self.call(&[rank], &Call::Leave { epoch: self.ranks.attempt.0 }),
            Received::PassedOver => {
                tracing::debug!(%rank, "a rank sent a message about a round that is over")
            }
            Received::AllDone(ranks) => self.finished(&ranks),
            Received::Raised(note) => self.raised_in_process(rank, pid, note),
        }
        self.end_attempt_if_over().await;
    }

    fn raised_in_process(&mut self, rank: Rank, pid: Pid, note: Note) {
        // The steps in its page come before what ended them.
        self.look();
        let fit = is_fit(&note);
        for process in self.ranks.processes.iter_mut().filter(|process| process.rank == rank) {
            process.raised = true;
        }
        let data = self.ranks.pages.get(&rank).and_then(PageReader::data);
        self.count_oom_kills();
        self.fact(Fact::RankRaised { attempt: self.ranks.attempt, rank, pid, note, data });
        if !fit {
            self.output
                .terminal
                .print(format!("{rank} cannot go on in its process after this error and gets a new one"));
            let mut force = Stop::gather(clock::mono(), self.settings.grace);
            self.ranks
                .processes
                .iter()
                .filter(|process| process.rank == rank)
                .for_each(|process| force.kill(process));
        }
    }

    /// Has the ranks leave the attempt in their processes, if any of them can. Returns whether any can.
    pub(crate) async fn gather(&mut self) -> bool {
        let can =
            self.ranks.round.can_gather() || self.ranks.processes.iter().any(|rank| self.has_left(rank.rank));
        if self.ranks.round_server.is_none() || !can {
            return false;
        }
        self.stopping.stop = Some(Stop::gather(clock::mono(), self.settings.grace));
        let reported = self.ranks.round.gather();
        let leave = Call::Leave { epoch: self.ranks.attempt.0 };
        self.call(&reported, &leave);
        self.end_attempt_if_over().await;
        true
    }

    fn has_left(&self, rank: Rank) -> bool {
        matches!(self.ranks.round.standing(rank), Some(RoundState::Leaving | RoundState::Ready))
    }

    /// Ends a round when all ranks wait in their processes or are gone: what the lost ranks left is removed too.
    pub(crate) async fn end_round(&mut self) {
        self.stopping.stop = None;
        // The pages stay in use: read what they report of this round before the next one.
        self.look();
        let waiting = self.ranks.round.waiting();
        let lost = waiting.len() < self.ranks.processes.len();
        let orphans_killed = if lost {
            let warm = &self.ranks.warm;
            let spared =
                || with_descendants(&self.not_of_a_lost_rank()).into_iter().chain(warm.processes()).collect();
            // Not by the cgroup: it also contains the ranks that wait.
            let swept = sweep(None, spared, Span::default()).await;
            self.ranks.undying = swept.undying;
            swept.killed
        } else {
            0
        };
        // The next round starts with what is sealed by now.
        self.compare_what_was_saved();
        self.fact(Fact::AttemptEnded { attempt: self.ranks.attempt, orphans_killed, waiting });
    }

    /// Starts the next attempt with the ranks that wait, and new processes for those that are lost.
    pub(crate) async fn start_round(
        &mut self,
        attempt: Attempt,
        port: Result<u16, String>,
        ended: &mpsc::UnboundedSender<Ended>,
    ) {
        if self.ranks.processes.iter().all(|rank| rank.exit.is_some()) {
            // On this host no rank continues in its process.
            return self.start_ranks(attempt, port, ended);
        }
        self.ranks.attempt = attempt;
        self.stopping.stop = None;
        if let Some(pool_owner) = &self.checkpoints.pool_owner {
            pool_owner.begin_attempt(attempt.0.into());
        }
        let waiting = self.ranks.round.waiting();
        let lost: Vec<u32> = self
            .ranks
            .processes
            .iter()
            .filter(|rank| rank.exit.is_some())
            .map(|rank| rank.local_rank)
            .collect();
        let port = match port {
            Ok(port) => port,
            Err(error) => return self.fact(Fact::start_failed(attempt, error)),
        };
        let mut page_trouble = None;
        if !lost.is_empty() {
            match self.make_ranks(attempt, port, &lost, ended) {
                Ok((made, trouble)) => {
                    page_trouble = trouble;
                    for process in made {
                        if let Some(place) =
                            self.ranks.processes.iter_mut().find(|old| old.rank == process.rank)
                        {
                            let old = std::mem::replace(place, process);
                            if let Some((path, _)) = old.page {
                                let _ = std::fs::remove_file(path);
                            }
                        }
                    }
                }
                Err(error) => return self.fact(Fact::start_failed(attempt, error)),
            }
        }
        for process in self.ranks.processes.iter_mut().filter(|process| waiting.contains(&process.rank)) {
            process.raised = false;
            if let Some(page) = self.ranks.pages.get_mut(&process.rank) {
                page.begin_round();
            }
        }
        self.attempt_started(port, page_trouble);
        for process in self.ranks.processes.iter().filter(|process| waiting.contains(&process.rank)) {
            let environment =
                self.rank_spec.round_environment(attempt, process.local_rank, &process.files, port);
            if let Some(round_server) = &self.ranks.round_server {
                round_server.send(process.pid, &Call::Go { epoch: attempt.0, environment });
            }
        }
    }

    /// Ends a rank that waits in its process and must not continue in it.
    pub(crate) async fn end_rank(&mut self, rank: Rank) {
        let waits = |process: &&RankProcess| process.rank == rank && process.exit.is_none();
        let Some(process) = self.ranks.processes.iter().find(waits) else { return self.end_round().await };
        let mut stop = Stop::gather(clock::mono(), self.settings.grace);
        stop.kill(process);
        self.stopping.stop = Some(stop);
        let pidfd = process.pidfd.clone();
        // Its end is the last event that the round waited for.
        if tokio::time::timeout(DEATH_WITHIN, pidfd.ended()).await.is_ok() {
            self.rank_ended(&Ended { pid: pidfd.pid(), at: clock::mono() }).await;
        } else {
            self.give_up(rank, pidfd.pid());
            self.end_attempt_if_over().await;
        }
    }

    /// A rank's process is gone: send nothing more to it, and wait for nothing from it.
    pub(crate) fn rank_gone(&mut self, rank: Rank, pid: Pid) {
        for round_server in self.ranks.round_server.iter().chain(&self.drill.server) {
            round_server.forget(pid);
        }
        let done = self.ranks.round.gone(rank);
        self.finished(&done);
    }

    /// Reports to the ranks that all functions have returned.
    fn finished(&self, ranks: &[Rank]) {
        self.call(ranks, &Call::Finished { epoch: self.ranks.attempt.0 });
    }

    fn call(&self, ranks: &[Rank], call: &Call) {
        let Some(round_server) = &self.ranks.round_server else { return };
        for process in self.ranks.processes.iter().filter(|process| ranks.contains(&process.rank)) {
            round_server.send(process.pid, call);
        }
    }
}
