//! What the launcher and the agent send each other: entries and verdicts to the agent, the host's evidence to the launcher.

use std::collections::BTreeMap;
use std::ops::Range;

use mainstay_health::host::contention::slowdown_hints;
use mainstay_health::host::preflight::Owners;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::health::Component;
use mainstay_model::id::Pid;
use mainstay_model::report::SensorReport;
use mainstay_model::verdict::Verdict;

use crate::agent_link::stream::{LinkEvent, LinkOrder};
use crate::log_files;
use crate::ranks::port::HeldPort;
use crate::run::{EVIDENCE_TIMEOUT, Launcher};
use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_journal::state::StateWriter;
use mainstay_recovery::protocol::{AgentEvidence, Event};
use mainstay_sys::{clock, processes};
use tokio::sync::mpsc;

/// The agent of this host.
#[derive(Debug, Default)]
pub(crate) struct AgentLink {
    /// The channel to it, while there is one.
    pub(crate) orders: Option<mpsc::Sender<LinkOrder>>,
    /// The last entry that it has, while it is being sent what it lacks.
    pub(crate) has: Option<u64>,
    /// Until when its evidence is awaited.
    pub(crate) ruling_until: Option<tokio::time::Instant>,
    /// How long steps of a rank took since the last sample.
    pub(crate) step_times: Vec<StepTime>,
    /// What was last seen here without an agent and may explain slow ranks.
    pub(crate) rank_context: SlowdownHints,
}

/// At most this many entries are read for the agent and sent at once.
const SENT_AT_ONCE: usize = 500;

impl Launcher {
    pub(crate) fn consult(&mut self, verdict: Box<Verdict>) {
        let held = self.held();
        self.step(clock::mono(), Event::Held(held));
        if self.agent.send(LinkOrder::Verdict(verdict)) {
            self.agent.ruling_until = Some(tokio::time::Instant::now() + EVIDENCE_TIMEOUT);
        } else {
            self.rule(None);
        }
    }

    /// Resources that the next ranks need and other processes hold, as far as visible without an agent.
    fn held(&mut self) -> Vec<String> {
        self.ranks.undying.retain(|pid| processes::is_alive(*pid));
        let mut held: Vec<String> = self.ranks.undying.iter().map(|pid| undying(*pid)).collect();
        held.extend(self.ranks.limits.too_few());
        if let Some(port) = self.settings.master_port {
            // Release our port of the previous attempt first; the next attempt takes it again.
            self.ranks.port = None;
            if let Err(error) = HeldPort::take(port) {
                held.push(format!("port {port} for the ranks' store (MASTER_PORT) cannot be taken: {error}"));
            }
        }
        held
    }

    pub(crate) fn rule(&mut self, ruling: Option<AgentEvidence>) {
        self.agent.ruling_until = None;
        if ruling.as_ref().is_some_and(|ruling| !ruling.host_evidence.held.is_empty()) {
            self.end_what_escaped();
        }
        self.step(clock::mono(), Event::AgentEvidence(ruling));
    }

    pub(crate) fn link(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Absent { why } => self.output.terminal.print(format!("agent: none: {why}")),
            LinkEvent::Found { socket, version, have_seq, orders } => {
                self.output.terminal.print(format!("agent: attached ({})", socket.display()));
                self.agent.orders = Some(orders);
                self.agent.has = Some(have_seq);
                self.agent.catch_up(&mut self.journal.snapshots, self.rank_spec.own_ranks());
                self.fact(Fact::AgentFound { version });
            }
            LinkEvent::Lost { reason } => {
                self.agent.orders = None;
                self.hang.judge.gpus_at_work(&BTreeMap::new(), clock::mono());
                self.fact(Fact::AgentLost { reason });
                if self.agent.ruling_until.is_some() {
                    self.rule(None);
                }
            }
            LinkEvent::AgentEvidence(ruling) => self.rule(Some(ruling)),
            LinkEvent::Late(AgentEvidence { incident, host_evidence, .. }) => {
                self.step(clock::mono(), Event::LateEvidence { incident, host_evidence });
            }
            LinkEvent::RankContext(known) => {
                self.hang.judge.gpus_at_work(&known.at_work, clock::mono());
                self.step(clock::mono(), Event::RankContext(known));
            }
            LinkEvent::Leave(leave) => self.asked_to_leave(leave),
        }
    }

    pub(crate) fn host(&mut self, report: SensorReport) {
        for fact in report.facts {
            match fact {
                // Kills that were counted when a rank ended are already reported.
                Fact::OutOfMemoryKills { .. } => self.count_oom_kills(),
                fact => self.fact(fact),
            }
        }
        self.journal.snapshots.show_host(clock::now(), report.components);
        if self.agent.orders.is_none() {
            // The agent knows more than this: do not replace what it reports.
            let components: Vec<Component> =
                self.journal.snapshots.view().components.values().cloned().collect();
            let known = slowdown_hints(&[], &Owners::new(), &components, &[]);
            if !known.is_as(&self.agent.rank_context) {
                self.agent.rank_context = known.clone();
                self.step(clock::mono(), Event::RankContext(known));
            }
        }
    }
}

impl AgentLink {
    /// Sends it an entry; it knows only the ranks of its host by their processes.
    pub(crate) fn send_entry(&mut self, entry: Entry, own: Range<u32>) {
        // While older entries are being read for it, this one follows them.
        if self.has.is_none() {
            self.send_entry_now(entry, own);
        }
    }

    fn send_entry_now(&mut self, mut entry: Entry, own: Range<u32>) {
        if let Body::Fact(Fact::AttemptStarted { ranks, hosts, .. }) = &mut entry.body {
            ranks.retain(|started| own.contains(&started.rank.0));
            hosts.retain(|host| own.contains(&host.first_rank.0));
        }
        self.send(LinkOrder::Entry(Box::new(entry)));
    }

    /// Sends it the next entries that its journal lacks. A journal may be 64 MiB, so it is sent in parts and the loop goes on
    /// between them. Entries recorded meanwhile are sent as part of it.
    pub(crate) fn catch_up(&mut self, snapshots: &mut StateWriter, own: Range<u32>) {
        let (Some(cursor), Some(agent)) = (self.has, &self.orders) else { return self.has = None };
        if agent.capacity() < 2 * SENT_AT_ONCE {
            return;
        }
        snapshots.show_due();
        let reader = snapshots.reader();
        let read = log_files::ask(move || reader.entries_after(cursor, SENT_AT_ONCE));
        let Some(Ok(read)) = read else {
            // The rest is read when the agent is connected again.
            (self.orders, self.has) = (None, None);
            return;
        };
        self.has = (read.entries.len() >= SENT_AT_ONCE).then_some(read.cursor);
        read.entries.into_iter().for_each(|entry| self.send_entry_now(entry, own.clone()));
    }

    /// Sends to the agent. Returns whether there is one that takes it. A full queue ends the link; what was missed is sent
    /// when the agent is connected again.
    pub(crate) fn send(&mut self, order: LinkOrder) -> bool {
        let sent = self.orders.as_ref().is_some_and(|agent| agent.try_send(order).is_ok());
        if !sent {
            self.orders = None;
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
