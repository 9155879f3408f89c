//! What the launcher and the agent send each other: entries and verdicts to the agent, the host's evidence to the launcher.

use std::collections::BTreeMap;

use mainstay_health::host::contention::slowdown_hints;
use mainstay_health::host::preflight::Owners;
use mainstay_model::entry::Fact;
use mainstay_model::health::Component;
use mainstay_model::id::Pid;
use mainstay_model::report::SensorReport;
use mainstay_model::verdict::Verdict;

use crate::act::log_files;
use crate::act::port::HeldPort;
use crate::launch::event_loop::{EVIDENCE_TIMEOUT, Launcher};
use crate::launcher_link::agent::{LinkEvent, LinkOrder};
use mainstay_recovery::protocol::{AgentEvidence, Event};
use mainstay_sys::{clock, processes};

/// At most this many entries are read for the agent and sent at once.
const SENT_AT_ONCE: usize = 500;

impl Launcher {
    pub(super) fn consult(&mut self, verdict: Box<Verdict>) {
        let held = self.held();
        self.step(clock::mono(), Event::Held(held));
        if self.send(LinkOrder::Verdict(verdict)) {
            self.ruling_until = Some(tokio::time::Instant::now() + EVIDENCE_TIMEOUT);
        } else {
            self.rule(None);
        }
    }

    /// Resources that the next ranks need and other processes hold, as far as visible without an agent.
    fn held(&mut self) -> Vec<String> {
        self.undying.retain(|pid| processes::is_alive(*pid));
        let mut held: Vec<String> = self.undying.iter().map(|pid| undying(*pid)).collect();
        held.extend(self.process_limits.too_few());
        if let Some(port) = self.settings.master_port {
            // Release our port of the previous attempt first; the next attempt takes it again.
            self.port = None;
            if let Err(error) = HeldPort::take(port) {
                held.push(format!("port {port} for the ranks' store (MASTER_PORT) cannot be taken: {error}"));
            }
        }
        held
    }

    pub(super) fn rule(&mut self, ruling: Option<AgentEvidence>) {
        self.ruling_until = None;
        if ruling.as_ref().is_some_and(|ruling| !ruling.host_evidence.held.is_empty()) {
            self.end_what_escaped();
        }
        self.step(clock::mono(), Event::AgentEvidence(ruling));
    }

    pub(super) fn link(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Absent { why } => self.terminal.print(format!("agent: none: {why}")),
            LinkEvent::Found { socket, version, have_seq, orders } => {
                self.terminal.print(format!("agent: attached ({})", socket.display()));
                self.agent = Some(orders);
                self.agent_has = Some(have_seq);
                self.catch_up();
                self.fact(Fact::AgentFound { version });
            }
            LinkEvent::Lost { reason } => {
                self.agent = None;
                self.hangs.gpus_at_work(&BTreeMap::new(), clock::mono());
                self.fact(Fact::AgentLost { reason });
                if self.ruling_until.is_some() {
                    self.rule(None);
                }
            }
            LinkEvent::AgentEvidence(ruling) => self.rule(Some(ruling)),
            LinkEvent::Late(AgentEvidence { incident, host_evidence, .. }) => {
                self.step(clock::mono(), Event::LateEvidence { incident, host_evidence });
            }
            LinkEvent::RankContext(known) => {
                self.hangs.gpus_at_work(&known.at_work, clock::mono());
                self.step(clock::mono(), Event::RankContext(known));
            }
            LinkEvent::Leave(leave) => self.asked_to_leave(leave),
        }
    }

    pub(super) fn host(&mut self, report: SensorReport) {
        for fact in report.facts {
            match fact {
                // Kills that were counted when a rank ended are already reported.
                Fact::OutOfMemoryKills { .. } => self.count_oom_kills(),
                fact => self.fact(fact),
            }
        }
        self.snapshots.show_host(clock::now(), report.components);
        if self.agent.is_none() {
            // The agent knows more than this: do not replace what it reports.
            let components: Vec<Component> = self.snapshots.view().components.values().cloned().collect();
            let known = slowdown_hints(&[], &Owners::new(), &components, &[]);
            if !known.is_as(&self.rank_context) {
                self.rank_context = known.clone();
                self.step(clock::mono(), Event::RankContext(known));
            }
        }
    }

    /// Sends the agent the next entries that its journal lacks. A journal may be 64 MiB, so it is sent in parts and the
    /// loop goes on between them. Entries recorded meanwhile are sent as part of it.
    pub(super) fn catch_up(&mut self) {
        let (Some(cursor), Some(agent)) = (self.agent_has, &self.agent) else { return self.agent_has = None };
        if agent.capacity() < 2 * SENT_AT_ONCE {
            return;
        }
        self.snapshots.show_due();
        let reader = self.snapshots.reader();
        let read = log_files::ask(move || reader.entries_after(cursor, SENT_AT_ONCE));
        let Some(Ok(read)) = read else {
            // The rest is read when the agent is connected again.
            (self.agent, self.agent_has) = (None, None);
            return;
        };
        self.agent_has = (read.entries.len() >= SENT_AT_ONCE).then_some(read.cursor);
        read.entries.into_iter().for_each(|entry| self.send_entry_now(entry));
    }

    /// Sends to the agent. Returns whether there is one that takes it. A full queue ends the link; what was missed is sent
    /// when the agent is connected again.
    pub(super) fn send(&mut self, order: LinkOrder) -> bool {
        let sent = self.agent.as_ref().is_some_and(|agent| agent.try_send(order).is_ok());
        if !sent {
            self.agent = None;
        }
        sent
    }
}

/// A description of a process that did not die of SIGKILL: what it waits in, and whether it holds a device.
fn undying(pid: Pid) -> String {
    let devices = processes::open_files(pid, "/dev/nvidia");
    let holds = if devices.is_empty() { String::new() } else { format!(" and holds {}", devices.join(", ")) };
    format!(
        "process {} of the previous attempt does not exit; it is {}{holds}",
        pid.0,
        processes::waits_in(pid)
    )
}
