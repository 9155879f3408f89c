//! What is published to readers: the view of the node and the journal.
//!
//! One task owns the [`StateWriter`] and alone changes it; any number of [`StateReader`]s look at snapshots that do
//! not change under them. A job must continue when the journal's disk fails: entries that cannot be written are
//! shown and kept in memory until they can be written.

mod journal_queue;
mod reader;
mod roster;

use std::collections::VecDeque;
use std::sync::Arc;

use mainstay_health::hardware::gpu::GpuView;
use mainstay_health::host::os::changes;
use mainstay_health::retest::Untested;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::health::Component;
use mainstay_model::id::{Attempt, BootId, JobId, Rank};
use mainstay_model::operator::OperatorAction;
use mainstay_model::state_since::StateSince;
use mainstay_model::time::Stamp;
use mainstay_view::node::{BeatView, JobPhase, NodeView};
use tokio::sync::watch;

use journal_queue::JournalQueue;
pub use reader::StateReader;
pub use roster::{Looking, Roster};

use crate::store::journal::{Journal, JournalError, JournalReader, Replayed, Unforced};
use crate::store::sync_thread::Forced;

/// Ended jobs that are still shown.
pub const FINISHED_JOBS: usize = 32;

/// Entries kept in memory while the journal cannot be written.
pub const UNWRITTEN_ENTRIES: usize = 1024;

/// The writing side, owned by the one task of the launcher or the agent.
#[derive(Debug)]
pub struct StateWriter {
    journal: JournalQueue,
    reads: JournalReader,
    boot: BootId,
    journal_bytes: u64,
    view: NodeView,
    newest: u64,
    /// Ended jobs in the view, in the order in which they ended.
    finished: VecDeque<JobId>,
    replayed: Replayed,
    publisher: watch::Sender<Published>,
    roster: Roster,
    standing: StateSince,
    untested: Untested,
    /// The entries from this number on restore what operators acknowledged and silenced.
    operators_from: u64,
    /// Whether publishing is held, and whether there is something to publish.
    is_held: bool,
    is_due: bool,
}

/// What readers see: never modified, only replaced.
#[derive(Clone, Debug, Default)]
struct Published {
    view: Arc<NodeView>,
    oldest: u64,
    newest: u64,
    unwritten: Arc<[Arc<Entry>]>,
    journal_error: Option<Arc<str>>,
}

impl StateWriter {
    /// A snapshot of what is in the journal. Components are not taken from it: the state of anything not read
    /// since this start is unknown. A component that is found in the same state as earlier in this boot keeps its
    /// start time.
    pub fn open(journal: Journal) -> Result<StateWriter, JournalError> {
        let mut snapshots = StateWriter {
            newest: journal.next_seq() - 1,
            reads: journal.reader(),
            boot: journal.boot().clone(),
            journal_bytes: journal.most_bytes(),
            view: NodeView::default(),
            finished: VecDeque::new(),
            replayed: Replayed::default(),
            publisher: watch::Sender::new(Published::default()),
            roster: Roster::default(),
            standing: StateSince::default(),
            untested: Untested::default(),
            operators_from: 0,
            is_held: false,
            is_due: false,
            journal: JournalQueue::new(journal),
        };
        let (reader, boot) = (snapshots.reads.clone(), snapshots.boot.clone());
        snapshots.replayed = reader.replay(|entry| {
            if let Body::Health(change) = &entry.body
                && entry.boot == boot
            {
                snapshots.standing.recall(&change.component);
            }
            snapshots.apply(&entry);
        })?;
        snapshots.view.components.clear();
        snapshots.view.operator_state.only_of(&boot);
        snapshots.publish();
        Ok(snapshots)
    }

    /// Records an entry: appends it to the journal, applies it to the view and publishes both.
    ///
    /// This does not fail. If the journal cannot be written, the entry is kept in memory under its number and
    /// written once that is possible again; [`StateWriter::journal_error`] has the reason.
    pub fn record(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let entry = self.note(at, job, origin_seq, body);
        self.publish();
        entry
    }

    /// As [`StateWriter::record`], but published with the next [`StateWriter::publish`]: readers see several
    /// entries together.
    pub fn note(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let entry = self.take_in(at, job, origin_seq, body);
        self.journal.append(entry.clone());
        entry
    }

    /// As [`StateWriter::record`], but the entry is also written to the journal only when it is published: several
    /// entries are written with one request. Only for entries that another journal has, since a crash before that
    /// loses them.
    pub fn gather(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let entry = self.take_in(at, job, origin_seq, body);
        self.journal.gather(entry.clone());
        self.publish();
        entry
    }

    /// Applies an entry to the view and publishes it, without the journal: it is not there after a restart. It has
    /// the number of the entry before it.
    pub fn show(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let boot = self.boot.clone();
        let entry = Entry { seq: self.newest, at, boot, job: job.cloned(), origin_seq, body };
        self.apply(&entry);
        self.publish();
        entry
    }

    fn take_in(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        self.newest = self.newest.saturating_add(1);
        let boot = self.boot.clone();
        let entry = Entry { seq: self.newest, at, boot, job: job.cloned(), origin_seq, body };
        self.apply(&entry);
        entry
    }

    /// Stores a reading of a rank's page. It is not journaled, and published with the next
    /// [`StateWriter::publish`].
    pub fn sample(&mut self, job: &JobId, attempt: Attempt, rank: Rank, beat: BeatView) {
        self.view.sample(job, attempt, rank, beat);
    }

    /// The same for several ranks.
    pub fn samples(
        &mut self,
        job: &JobId,
        attempt: Attempt,
        beats: impl IntoIterator<Item = (Rank, BeatView)>,
    ) {
        self.view.samples(job, attempt, beats);
    }

    /// Stores a newer reading of a component whose state did not change. It is not journaled, and published with
    /// the next [`StateWriter::publish`]. A change of state is recorded as a health entry instead.
    pub fn set_component(&mut self, component: Component) {
        self.view.components.insert(component.name.clone(), component);
    }

    /// Stores the GPUs with their last readings, published with the next [`StateWriter::publish`]. They are not
    /// journaled.
    pub fn set_gpus(&mut self, gpus: Vec<GpuView>) {
        self.view.gpus = gpus.into();
    }

    /// Stores the current components: changes of state go into the journal, fresh readings only into the view. Returns
    /// the entries of the changes.
    pub fn show_host(&mut self, at: Stamp, mut components: Vec<Component>) -> Vec<Entry> {
        let mut changed = Vec::new();
        for component in &mut components {
            self.untested.keep(component);
            self.standing.keep(component);
        }
        for change in changes(&self.view.components, &components) {
            changed.push(self.note(at, None, None, Body::Health(change)));
        }
        for component in components {
            let over = self.view.operator_state.component_reported(&component);
            self.set_component(component);
            if let Some(observation) = over {
                self.note(at, None, None, Body::Fact(Fact::Observed(observation)));
            }
        }
        self.publish();
        changed
    }

    /// Applies an operator's statement about a component; none if there is no such component.
    pub fn attend(&mut self, at: Stamp, uid: u32, name: &str, word: &OperatorAction) -> Option<Component> {
        let component = self.view.components.get(name)?.clone();
        self.record(at, None, None, Body::Fact(Fact::Observed(word.observation(uid, &component))));
        Some(component)
    }

    /// Ends silences that have expired.
    pub fn end_silences(&mut self, at: Stamp) {
        for over in self.view.operator_state.run_out(at.wall) {
            self.record(at, None, None, Body::Fact(Fact::Observed(over)));
        }
    }

    /// Removes these components from the view.
    pub fn hide(&mut self, names: &[String]) {
        self.view.components.retain(|name, _| !names.contains(name));
        self.publish();
    }

    /// Holds what is published from now on until [`StateWriter::release`] or [`StateWriter::show_due`]: publishing
    /// costs time for the whole snapshot, not only for what is new.
    pub fn hold(&mut self) {
        self.is_held = true;
    }

    /// Publishes what was held.
    pub fn release(&mut self) {
        self.is_held = false;
        if std::mem::take(&mut self.is_due) {
            self.publish();
        }
    }

    /// Whether something to publish is held.
    pub fn is_due(&self) -> bool {
        self.is_due
    }

    /// Publishes what was held, and holds what comes after it.
    pub fn show_due(&mut self) {
        self.release();
        self.hold();
    }

    /// The number of the newest entry, published or not; 0 before the first.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Publishes the present state to the readers.
    pub fn publish(&mut self) {
        if self.is_held {
            self.is_due = true;
            return;
        }
        self.journal.write_gathered();
        self.carry_over();
        self.publisher.send_replace(Published {
            view: Arc::new(self.view.clone()),
            oldest: self.journal.oldest(),
            newest: self.newest,
            unwritten: self.journal.unwritten().iter().cloned().collect(),
            journal_error: self.journal.error().cloned(),
        });
    }

    /// Writes queued entries and waits, with a time limit, until the disk has everything (fdatasync).
    /// [`StateWriter::journal_error`] has its error, which a later call repeats.
    pub fn sync(&mut self) {
        self.journal.sync();
    }

    /// Writes queued entries, and returns what has to be synced to disk elsewhere; none if that is not available,
    /// with the reason in [`StateWriter::journal_error`].
    pub fn unforced(&mut self) -> Option<Unforced> {
        self.journal.unforced()
    }

    /// Records whether what was returned is on the disk.
    pub fn forced(&mut self, forced: Forced) {
        self.journal.forced(forced);
    }

    /// How large the journal may become, in bytes.
    pub fn journal_bytes(&self) -> u64 {
        self.journal_bytes
    }

    /// Entries that are queued for the journal.
    pub fn unwritten(&self) -> usize {
        self.journal.unwritten().len()
    }

    /// The current view, published or not.
    pub fn view(&self) -> &NodeView {
        &self.view
    }

    /// Where the sensors that watch the host register.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// A reader of what is published.
    pub fn reader(&self) -> StateReader {
        StateReader {
            journal: self.reads.clone(),
            published: self.publisher.subscribe(),
            roster: self.roster.clone(),
        }
    }

    /// Why the journal cannot be written at the moment, if it cannot.
    pub fn journal_error(&self) -> Option<&str> {
        self.journal.error().map(|error| &**error)
    }

    /// What was found in the journal at open.
    pub fn replayed(&self) -> Replayed {
        self.replayed
    }

    /// Records what operators said once more before the journal deletes it: it applies for as long as they said,
    /// however much is recorded in the meantime.
    fn carry_over(&mut self) {
        let operators = &self.view.operator_state;
        if operators.is_empty() || self.operators_from >= self.journal.oldest_after_deletion() {
            return;
        }
        let observations = operators.observations();
        self.operators_from = self.newest.saturating_add(1);
        for (at, observation) in observations {
            self.note(at, None, None, Body::Fact(Fact::Observed(observation)));
        }
    }

    fn apply(&mut self, entry: &Entry) {
        if self.view.operator_state.is_empty() {
            self.operators_from = entry.seq;
        }
        self.view.apply(entry);
        match (&entry.job, &entry.body) {
            (Some(job), _) => self.note_phase(job),
            (None, Body::Health(change)) => self.untested.recall(&change.component),
            (None, Body::Fact(Fact::Observed(observation))) => self.untested.recall_observation(observation),
            (None, _) => {}
        }
    }

    /// Keeps the order in which jobs ended, and removes those that ended long ago from the view.
    fn note_phase(&mut self, id: &JobId) {
        let Some(job) = self.view.jobs.get(id) else { return };
        let over = matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost);
        let noted = self.finished.iter().position(|finished| finished == id);
        match (over, noted) {
            (true, None) => self.finished.push_back(id.clone()),
            (false, Some(place)) => drop(self.finished.remove(place)),
            (true, Some(_)) | (false, None) => {}
        }
        while self.finished.len() > FINISHED_JOBS {
            if let Some(oldest) = self.finished.pop_front() {
                self.view.jobs.remove(&oldest);
            }
        }
    }
}
