//! A start on all hosts, from its order until all ranks run or it has failed.

use std::collections::VecDeque;

use super::{Merge, Next, Phase, observed};
use mainstay_checkpoint::inventory::StepKey;
use mainstay_model::entry::{Fact, StartedRank};
use mainstay_model::id::Attempt;
use mainstay_model::observation::Weight;
use mainstay_model::time::Mono;
use mainstay_recovery::protocol::{Command, Event, StopWhy};

impl Merge {
    pub(super) fn begin(&mut self, at: Mono, attempt: Attempt, in_process: bool, next: &mut VecDeque<Next>) {
        (self.attempt, self.in_process) = (attempt, in_process);
        (self.ending, self.collecting) = (false, false);
        self.failed_steps.clear();
        self.other_world_done = false;
        for host in &mut self.hosts {
            (host.started, host.ended, host.evidence, host.idle) = (None, None, None, false);
            host.exited.clear();
            host.held.clear();
        }
        self.phase = Phase::Waiting { since: at };
        if self.hosts.iter().any(|host| !host.here) {
            let detail = self.awaited();
            next.push_back(Next::Job(at, Event::Fact(observed("host_awaited", Weight::Warning, detail))));
        }
        self.open_if_all_here(at, next);
    }

    pub(super) fn open_if_all_here(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        if !matches!(self.phase, Phase::Waiting { .. }) || self.awaits(|host| !host.here) {
            return;
        }
        if self.grow(at, next) || self.seat_hosts(at, next) {
            return;
        }
        self.open(next);
    }

    pub(super) fn open(&mut self, next: &mut VecDeque<Next>) {
        self.phase = Phase::Opening;
        next.push_back(Next::Command(0, Command::Open { attempt: self.attempt }));
    }

    pub(super) fn opened(
        &mut self,
        at: Mono,
        seat: u32,
        port: Result<u16, String>,
        next: &mut VecDeque<Next>,
    ) {
        match port {
            Ok(port) if self.peers().is_empty() => self.start(port, None, next),
            Ok(port) => self.gather(at, port, next),
            Err(error) => {
                let error = self.on_host(seat, error);
                self.fail(at, error, next);
            }
        }
    }

    pub(super) fn start(&mut self, port: u16, resume: Option<StepKey>, next: &mut VecDeque<Next>) {
        self.phase = Phase::Starting { port };
        self.copies = Vec::new();
        let first = self.host(0).map(|host| host.seated.member.address.clone());
        let start = Command::Start {
            attempt: self.attempt,
            in_process: self.in_process,
            master_addr: first.unwrap_or_default(),
            master_port: port,
            resume,
            before: self.ran.filter(|before| *before != self.world()),
        };
        self.to_all(&start, next);
    }

    /// A host was lost while ranks start. That is not a failed start, which would fail again. It counts as the loss
    /// of a host with running ranks, however far they have got.
    pub(super) fn count_as_started(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        for host in self.hosts.iter_mut().filter(|host| host.started.is_none()) {
            host.started = Some(host.unseen());
        }
        self.started_if_all_have(at, next);
    }

    pub(super) fn started_if_all_have(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        let Phase::Starting { port } = self.phase else { return };
        if self.awaits(|host| host.started.is_none()) {
            return;
        }
        let mut ranks: Vec<StartedRank> =
            self.hosts.iter().flat_map(|host| host.started.iter().flatten().cloned()).collect();
        ranks.sort_by_key(|started| started.rank);
        self.phase = Phase::Started;
        (self.started_at, self.ran) = (Some(at), Some(self.world()));
        let attempt = self.attempt;
        let hosts = self.hosts_of_ranks();
        let started = Fact::AttemptStarted { attempt, master_port: port, ranks, hosts };
        next.push_back(Next::Job(at, Event::Fact(started)));
        for host in &mut self.hosts {
            // Moves the buffer too: it is 2 KB for each host.
            let held = std::mem::take(&mut host.held);
            next.extend(held.into_iter().map(|(at, event)| Next::Job(at, event)));
        }
    }

    /// Abandons the attempt: what was started is stopped again, then it is reported to the job.
    pub(super) fn abandon(&mut self, error: String, next: &mut VecDeque<Next>) {
        self.phase = Phase::Abandoning { error };
        self.ending = true;
        self.forget_ends();
        self.to_all(&Command::stop(self.attempt, StopWhy::Dismissed), next);
    }

    /// The error with its host, if there are several.
    pub(super) fn on_host(&mut self, seat: u32, error: String) -> String {
        let named = self.host(seat).map(|host| host.named()).unwrap_or_default();
        if self.hosts.len() > 1 { format!("{named}: {error}") } else { error }
    }

    pub(super) fn fail(&mut self, at: Mono, error: String, next: &mut VecDeque<Next>) {
        self.not_started(at, error, Vec::new(), next);
    }

    /// No host took the place of lost ones in time.
    pub(super) fn fail_without(&mut self, at: Mono, next: &mut VecDeque<Next>) {
        let lost = || self.hosts.iter().filter(|host| !host.here);
        let is_one = lost().count() == 1;
        let how = lost().filter(|host| !host.lost.is_empty()).map(|host| match is_one {
            true => format!("; it was lost: {}", host.lost),
            false => format!("; {} was lost: {}", host.named(), host.lost),
        });
        let error = format!(
            "{} did not come back within {}, and no other host took {} place{}",
            self.missing(),
            self.patience,
            if is_one { "its" } else { "their" },
            how.collect::<String>()
        );
        let missing = lost().map(|host| host.seated.member.host.clone()).collect();
        self.not_started(at, error, missing, next);
    }

    fn not_started(&mut self, at: Mono, error: String, missing: Vec<String>, next: &mut VecDeque<Next>) {
        self.phase = Phase::Idle;
        for host in &mut self.hosts {
            host.held.clear();
        }
        let attempt = self.attempt;
        next.push_back(Next::Job(at, Event::Fact(Fact::StartFailed { attempt, error, missing })));
    }
}
