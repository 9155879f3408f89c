//! Starting the ranks of an attempt: plainly, from the template, or in the processes in which they wait.

use mainstay_model::entry::{Fact, StartedRank};
use mainstay_model::id::{Attempt, Pid};
use mainstay_recovery::in_process::{Call, Round};
use mainstay_sys::{clock, limits, processes};
use tokio::sync::mpsc;

use super::port::HeldPort;
use super::process::{PageProblem, RankProcess};
use super::{Ended, Ranks, Reports, exhausted};
use crate::group::Group;
use crate::pages::files;

/// A start of an attempt on this host.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) attempt: Attempt,
    /// Whether ranks go on in their processes.
    pub(crate) in_process: bool,
    /// The port of the ranks' store, or why there is none.
    pub(crate) port: Result<u16, String>,
}

impl Ranks {
    /// Takes the port of the next attempt; `fixed`: only this one. It releases the old one first, since a fixed port is
    /// taken again.
    pub(crate) fn take_port(&mut self, fixed: Option<u16>, group: &mut Group) -> Result<u16, String> {
        self.port = None;
        let taken = HeldPort::take(fixed.unwrap_or(0));
        if let Err(error) = &taken
            && limits::is_exhaustion(error)
        {
            group.fact(exhausted(format!("taking a port for the ranks' store: {error}")));
        }
        let port = taken.map_err(|error| {
            let wanted = fixed.map_or("any free port".to_owned(), |port| port.to_string());
            format!(
                "taking port {wanted} for the ranks' store (MASTER_PORT): {error}; \
                 leave out --master-port to have a free one chosen"
            )
        })?;
        Ok(self.port.insert(port).number())
    }

    /// Starts the ranks of an attempt; none goes on in its process if all have ended on this host.
    pub(crate) fn start(&mut self, start: Start, to: &mut Reports<'_>) {
        let Start { attempt, in_process, port } = start;
        let in_process = in_process && self.are_running();
        self.attempt = attempt;
        self.stopping.stop = None;
        if !in_process {
            for rank in std::mem::take(&mut self.processes) {
                self.forget(rank.pid);
            }
            if let (Some(directory), Some(old)) = (&self.spec.page_dir, attempt.0.checked_sub(2)) {
                files::remove(directory, old);
            }
        }
        let started = port.and_then(|port| match in_process {
            true => self.start_round(port, to),
            false => self.start_anew(port, to),
        });
        if let Err(error) = started {
            to.group.fact(Fact::start_failed(attempt, error));
        }
    }

    /// Starts all ranks in new processes.
    fn start_anew(&mut self, port: u16, to: &mut Reports<'_>) -> Result<(), String> {
        self.pages.clear();
        to.output.spoken.forget_files();
        if let Some((aside, why)) = self.spec.choose_logs(self.attempt) {
            to.output.terminal.print(format!(
                "the log directory {} {why}: the ranks of attempt {} write to {}",
                self.spec.run_dir.display(),
                self.attempt.0,
                aside.display()
            ));
        }
        let (ranks, page_problem) = self.make(port, &self.spec.all_ranks(), to)?;
        self.processes = ranks;
        self.report_start(port, page_problem, to);
        Ok(())
    }

    /// Starts the ranks that wait, and new processes for those that are lost.
    fn start_round(&mut self, port: u16, to: &mut Reports<'_>) -> Result<(), String> {
        let attempt = self.attempt;
        let waiting = self.round.waiting();
        let lost = self.processes.iter().filter(|rank| rank.exit.is_some());
        let lost: Vec<u32> = lost.map(|rank| rank.local_rank).collect();
        let mut page_problem = None;
        if !lost.is_empty() {
            let (made, problem) = self.make(port, &lost, to)?;
            page_problem = problem;
            for process in made {
                let Some(place) = self.processes.iter_mut().find(|old| old.rank == process.rank) else {
                    continue;
                };
                if let Some((path, _)) = std::mem::replace(place, process).page {
                    let _ = std::fs::remove_file(path);
                }
            }
        }
        for process in self.processes.iter_mut().filter(|process| waiting.contains(&process.rank)) {
            process.raised = false;
            if let Some(page) = self.pages.readers.get_mut(&process.rank) {
                page.begin_round();
            }
        }
        self.report_start(port, page_problem, to);
        for process in self.processes.iter().filter(|process| waiting.contains(&process.rank)) {
            let environment = self.spec.round_environment(attempt, process.local_rank, port);
            if let Some(round_server) = &self.round_server {
                round_server.send(process.pid, &Call::Go { epoch: attempt.0, environment });
            }
        }
        Ok(())
    }

    /// Creates processes for these ranks, from the template if there is one, and watches them.
    fn make(
        &mut self,
        port: u16,
        which: &[u32],
        to: &mut Reports<'_>,
    ) -> Result<(Vec<RankProcess>, PageProblem), String> {
        let attempt = self.attempt;
        self.pages.listen_to_nvrx(&self.spec, attempt, which);
        let spared = self.live_and_helper_pids(to);
        let warm = match self.warm.start(&self.spec, attempt, port, which, &spared) {
            Some(Ok(started)) => Some(started),
            Some(Err(fact)) => {
                to.group.fact(fact);
                None
            }
            None => None,
        };
        let made = warm.map_or_else(|| self.spec.start(attempt, port, which), Ok);
        let (ranks, problem) = made.map_err(|error| {
            if error.kernel_error().is_some_and(limits::is_exhaustion) {
                to.group.fact(exhausted(error.to_string()));
            }
            error.to_string()
        })?;
        for rank in &ranks {
            self.pages.add(rank, &self.spec, attempt);
            watch(rank, self.ended.0.clone());
            if let Some(guardian) = &mut self.guardian {
                guardian.guard(rank.pid);
            }
            to.output.watch(rank);
        }
        Ok((ranks, problem))
    }

    /// The helpers, and ranks that live.
    pub(super) fn live_and_helper_pids(&self, to: &Reports<'_>) -> Vec<Pid> {
        let living = self.living().map(|rank| rank.pid);
        living.chain(self.helpers(to.group, to.policy)).collect()
    }

    /// Reports that all ranks of an attempt are started.
    fn report_start(&mut self, port: u16, page_problem: PageProblem, to: &mut Reports<'_>) {
        let attempt = self.attempt;
        self.round = Round::begin(attempt, self.processes.iter().map(|rank| rank.rank));
        to.hang.begin_attempt(attempt, clock::mono());
        to.output.spoken.begin_attempt();
        let ranks = self.processes.iter().map(started_rank).collect();
        // The leader adds the hosts of a job of several.
        to.group.fact(Fact::AttemptStarted { attempt, master_port: port, ranks, hosts: Vec::new() });
        if let Some(reason) = page_problem {
            to.group.fact(Fact::PagesUnavailable { reason });
        }
    }
}

fn started_rank(process: &RankProcess) -> StartedRank {
    StartedRank {
        rank: process.rank,
        local_rank: process.local_rank,
        pid: process.pid,
        page: process.page.as_ref().map(|(path, _)| path.display().to_string()),
        start_ticks: processes::start_ticks(process.pid),
    }
}

/// Reports a rank's end as soon as the kernel does.
fn watch(rank: &RankProcess, ended: mpsc::UnboundedSender<Ended>) {
    let pidfd = rank.pidfd.clone();
    tokio::task::spawn_local(async move {
        if pidfd.ended().await.is_ok() {
            // The receiver goes only when the launcher does.
            let _ = ended.send(Ended { pid: pidfd.pid(), at: clock::mono() });
        }
    });
}
