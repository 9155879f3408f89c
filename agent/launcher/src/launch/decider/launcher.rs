//! Passes the events of this host to the decider and carries out its orders here.

use mainstay_group::late_orders::{OnStart, on_start, on_stop};
use mainstay_group::wire::{Command, Report};
use mainstay_model::entry::{Body, Fact};
use mainstay_model::id::Attempt;
use mainstay_model::time::Mono;
use mainstay_recovery::job::{Input, Order, StopWhy};

use super::Decider;
use crate::hosts::{probe, streams};
use crate::launch::event_loop::Launcher;
use mainstay_sys::clock;

impl Launcher {
    /// Processes an event on this host.
    pub(in crate::launch) fn step(&mut self, at: Mono, input: Input) {
        match &mut self.decider {
            Decider::Leading(leading) if leading.lead.is_deposed() => self.see_deposed(at, input),
            Decider::Leading(leading) => {
                leading.lead.see(at, input);
                self.lead(at);
            }
            Decider::Following(_) => self.report_input(at, input),
            Decider::Gone => {}
        }
    }

    /// Sends a report that only leaders need.
    pub(in crate::launch) fn report(&mut self, at: Mono, report: Report) {
        match &mut self.decider {
            Decider::Gone => {}
            Decider::Leading(leading) => {
                leading.lead.report_of_mine(at, report);
                self.lead(at);
            }
            Decider::Following(_) => self.report_up(at, report),
        }
    }

    pub(in crate::launch) fn publish_body(&mut self, at: Mono, body: Body) {
        let line = self.line(&body);
        line.into_iter().for_each(|line| self.terminal.print(line));
        let entry = self.record(clock::stamp_of(at), None, body);
        self.send_entry(entry);
    }

    /// " on host NAME" in a job of several hosts, whose other terminals show it too.
    pub(in crate::launch) fn on_host(&self) -> String {
        let several = self.decider.has_other_hosts();
        let name = nix::unistd::gethostname().ok().filter(|_| several);
        name.map_or_else(String::new, |name| format!(" on host {}", name.to_string_lossy()))
    }

    /// Carries out a command of the leader.
    pub(in crate::launch) async fn obey_command(
        &mut self,
        command: Command,
        ended: &tokio::sync::mpsc::UnboundedSender<crate::launch::event_loop::Ended>,
    ) {
        match command {
            Command::Seat { attempt, seat } => self.take_seat(attempt, seat).await,
            Command::Open { attempt } => {
                let port = self.take_port();
                self.report(clock::mono(), Report::Opened { attempt, port });
            }
            Command::Gather { attempt, peers } => self.gather_checkpoints(attempt, peers),
            Command::Bring { attempt, step } => self.bring_checkpoint(attempt, step),
            Command::Start { attempt, in_process, master_addr, master_port, resume, before } => {
                let running = self.ranks.iter().any(|rank| rank.exit.is_none());
                match on_start(attempt, self.attempt, !self.ranks.is_empty(), running, in_process) {
                    OnStart::Ignore => {
                        tracing::warn!(%attempt, "a start of an attempt that is over is ignored");
                        return;
                    }
                    OnStart::Refuse => {
                        self.attempt = attempt;
                        let error = "ranks of an earlier attempt still run on this host".to_owned();
                        return self.fact(Fact::start_failed(attempt, error));
                    }
                    OnStart::Start => {}
                }
                self.rank_spec.master_addr = master_addr;
                self.rank_spec.ran_before = before;
                let port = self.resume_from(resume.as_ref()).map(|()| master_port);
                self.start(attempt, port, in_process, ended).await;
            }
            Command::EndRank { attempt, rank } => {
                self.carry_out_order(Order::EndRank { attempt, rank }, ended).await;
            }
            Command::Stop { attempt, why, save_after } => {
                self.save_after = save_after;
                self.stop_attempt(attempt, why, ended).await;
            }
            Command::AskToSave { attempt, save_after } => {
                self.save_after = save_after;
                self.carry_out_order(Order::AskToSave(attempt), ended).await;
            }
            Command::TakeEvidence { attempt } => {
                self.carry_out_order(Order::TakeEvidence(attempt), ended).await;
            }
            Command::SaveDue { attempt, step } if attempt == self.attempt && self.stop.is_none() => {
                crate::launch::save::request_save_after(&self.ranks, step);
            }
            Command::SaveDue { .. } => {}
            Command::Look { launcher, address } => self.look_at_launcher(launcher, address),
            Command::Finish { exit, summary } => {
                if let Decider::Following(following) = &mut self.decider {
                    following.summary = summary.map(|summary| *summary);
                }
                self.exit = Some(exit);
            }
        }
    }

    /// Checks outside the loop whether another launcher is alive, and reports the result.
    pub(in crate::launch) fn look_at_launcher(&mut self, launcher: String, address: String) {
        let Some(token) = self.decider.token() else { return };
        let sights = self.sights.0.clone();
        streams().spawn(async move {
            let sight = probe::probe(address, token).await;
            // The receiver goes only when the launcher does.
            let _ = sights.send((launcher, sight));
        });
    }

    async fn stop_attempt(
        &mut self,
        attempt: Attempt,
        why: StopWhy,
        ended: &tokio::sync::mpsc::UnboundedSender<crate::launch::event_loop::Ended>,
    ) {
        if on_stop(attempt, self.attempt) {
            self.attempt = attempt;
            self.carry_out_order(Order::StopRanks { attempt, why }, ended).await;
        } else {
            // It is over on this host.
            self.fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() });
        }
    }
}
