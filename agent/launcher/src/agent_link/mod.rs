//! The link between launcher and agent: entries and verdicts go to the agent, the host's evidence comes to the launcher.

mod absence;
pub mod checkpoint;
pub mod handover;
pub mod implicated;
pub mod lent_files;
pub mod stream;
pub mod trust;
pub mod wire;

use std::ops::Range;
use std::time::Duration;

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_health::host::contention::SlowdownHints;
use mainstay_journal::state::StateWriter;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::verdict::Verdict;
use mainstay_view::node::BeatView;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::log_files;
use stream::LinkOrder;

/// How long an agent may take to answer with its evidence before the launcher decides alone.
pub(crate) const EVIDENCE_TIMEOUT: Duration = Duration::from_millis(250);

/// At most this many entries are read for the agent and sent at once.
const MAX_ENTRIES_PER_SEND: usize = 500;

/// At most this many steps between two samples are reported to the agent: the newest.
const MAX_STEP_TIMES: usize = 128;

/// The agent of this host.
#[derive(Debug, Default)]
pub(crate) struct AgentLink {
    /// The channel to it, while there is one.
    orders: Option<mpsc::Sender<LinkOrder>>,
    /// The last entry that it has, while it is being sent what it lacks.
    has: Option<u64>,
    /// Until when its evidence is awaited.
    pub(crate) ruling_until: Option<Instant>,
    /// How long steps of a rank took since the last sample, for the agent, which compares them with its own activity.
    step_times: Vec<StepTime>,
    /// What was last seen here without an agent and may explain slow ranks.
    pub(crate) rank_context: SlowdownHints,
}

impl AgentLink {
    pub(crate) fn is_attached(&self) -> bool {
        self.orders.is_some()
    }

    /// Whether it is being sent what it lacks.
    pub(crate) fn is_behind(&self) -> bool {
        self.has.is_some()
    }

    /// An agent is there, with the entries up to this one.
    pub(crate) fn found(&mut self, orders: mpsc::Sender<LinkOrder>, has: u64) {
        (self.orders, self.has) = (Some(orders), Some(has));
    }

    pub(crate) fn lost(&mut self) {
        self.orders = None;
    }

    /// Asks it for its evidence. Returns whether to wait for it.
    pub(crate) fn ask(&mut self, verdict: Box<Verdict>) -> bool {
        let asked = self.send(LinkOrder::Verdict(verdict));
        if asked {
            self.ruling_until = Some(Instant::now() + EVIDENCE_TIMEOUT);
        }
        asked
    }

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
        if agent.capacity() < 2 * MAX_ENTRIES_PER_SEND {
            return;
        }
        snapshots.show_due();
        let reader = snapshots.reader();
        let read = log_files::ask(move || reader.entries_after(cursor, MAX_ENTRIES_PER_SEND));
        let Some(Ok(read)) = read else {
            // The rest is read when the agent is connected again.
            (self.orders, self.has) = (None, None);
            return;
        };
        self.has = (read.entries.len() >= MAX_ENTRIES_PER_SEND).then_some(read.cursor);
        read.entries.into_iter().for_each(|entry| self.send_entry_now(entry, own.clone()));
    }

    /// A rank of this host completed steps.
    pub(crate) fn stepped(&mut self, times: Vec<StepTime>) {
        self.step_times.extend(times);
        let surplus = self.step_times.len().saturating_sub(MAX_STEP_TIMES);
        self.step_times.drain(..surplus);
    }

    pub(crate) fn sample(&mut self, attempt: Attempt, beats: Vec<(Rank, BeatView)>) {
        let steps = std::mem::take(&mut self.step_times);
        self.send(LinkOrder::Beats { attempt, beats, steps });
    }

    /// Sends to the agent. Returns whether there is one that takes it. A full queue ends the link; what was missed is sent
    /// when the agent is connected again.
    fn send(&mut self, order: LinkOrder) -> bool {
        let sent = self.orders.as_ref().is_some_and(|agent| agent.try_send(order).is_ok());
        if !sent {
            self.orders = None;
        }
        sent
    }
}
