//! Floor 3. What is published to readers: the view of the node and the journal.
//!
//! One task owns the [`StateWriter`] and alone changes it; any number of [`StateReader`]s look at snapshots that do not
//! change under them. A job must go on when the journal's disk does not: entries that cannot be written are shown
//! and kept in memory until they can.

mod roster;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainstay_core::base::id::{Attempt, BootId, JobId, Rank};
use mainstay_core::base::time::Stamp;
use mainstay_core::hardware::gpu::GpuView;
use mainstay_core::host::os::changes;
use mainstay_core::model::entry::{Body, Entry, Fact};
use mainstay_core::model::health::Component;
use mainstay_core::model::operator::OperatorAction;
use mainstay_core::model::state_since::StateSince;
use mainstay_core::view::node::{BeatView, JobPhase, NodeView};
use tokio::sync::watch;

pub use roster::{Looking, Roster};

use crate::os::patient::Patient;
use crate::store::forcing::Forced;
use crate::store::journal::{Journal, JournalError, JournalReader, Read, Replayed, Unforced};

/// Jobs that are over and still shown.
pub const FINISHED_JOBS: usize = 32;

/// Entries kept in memory while the journal cannot be written.
pub const UNWRITTEN_ENTRIES: usize = 1024;

/// Entries that are written together at most.
const GATHERED_ENTRIES: usize = 256;

/// How long an entry waits for the journal's file system. Once it has not answered, none waits until it does.
const PATIENCE: Duration = Duration::from_millis(500);

/// The same for the last entries of all, which are forced onto the disk.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// A disk that is busy for less is not worth a word.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// The writing end, owned by the one task of the launcher or the agent.
#[derive(Debug)]
pub struct StateWriter {
    /// Written by a thread of its own: it may be on a file system of a user's.
    journal: Arc<Mutex<Journal>>,
    writing: Patient,
    reads: JournalReader,
    boot: BootId,
    dir: PathBuf,
    /// The number of the oldest entry that the journal holds.
    oldest: u64,
    /// What did not reach the disk and could not be handed back to the journal so far.
    not_forced: Vec<Unforced>,
    view: NodeView,
    newest: u64,
    /// Jobs of the view that are over, in the order in which they ended.
    finished: VecDeque<JobId>,
    /// Entries that wait for the disk, oldest first.
    unwritten: VecDeque<Arc<Entry>>,
    /// Whether the journal was not asked to write some of them so far.
    has_gathered: bool,
    journal_error: Option<Arc<str>>,
    replayed: Replayed,
    publisher: watch::Sender<Published>,
    roster: Roster,
    standing: StateSince,
    /// Whether nothing is shown for the moment, and whether there is something to show.
    is_held: bool,
    is_due: bool,
    /// Since when the journal's file system has not answered.
    silent_since: Option<Instant>,
    /// Entries that the journal never got.
    lost: u64,
}

/// What readers see: never changed, only replaced.
#[derive(Clone, Debug, Default)]
struct Published {
    view: Arc<NodeView>,
    oldest: u64,
    newest: u64,
    unwritten: Arc<[Arc<Entry>]>,
    journal_error: Option<Arc<str>>,
}

impl StateWriter {
    /// A board that shows what the journal tells. Components are not taken over from it: what was not read since
    /// this start is not known. Of those that are found as they were in this boot it is known since when.
    pub fn open(journal: Journal) -> Result<StateWriter, JournalError> {
        let mut board = StateWriter {
            newest: journal.next_seq() - 1,
            writing: Patient::new("journal"),
            reads: journal.reader(),
            boot: journal.boot().clone(),
            dir: journal.dir().to_owned(),
            oldest: journal.oldest().unwrap_or(0),
            not_forced: Vec::new(),
            view: NodeView::default(),
            finished: VecDeque::new(),
            unwritten: VecDeque::new(),
            has_gathered: false,
            journal_error: None,
            replayed: Replayed::default(),
            publisher: watch::Sender::new(Published::default()),
            roster: Roster::default(),
            standing: StateSince::default(),
            is_held: false,
            is_due: false,
            silent_since: None,
            lost: 0,
            journal: Arc::new(Mutex::new(journal)),
        };
        let (reader, boot) = (board.reads.clone(), board.boot.clone());
        board.replayed = reader.replay(|entry| {
            if let Body::Health(change) = &entry.body
                && entry.boot == boot
            {
                board.standing.recall(&change.component);
            }
            board.apply(&entry);
        })?;
        board.view.components.clear();
        board.view.attention.only_of(&boot);
        board.publish();
        Ok(board)
    }

    /// Takes in what happened: appends it to the journal, applies it to the view and publishes both.
    ///
    /// This does not fail. If the journal cannot be written, the entry is kept in memory under its number and
    /// written when that is possible again; [`StateWriter::journal_error`] tells.
    pub fn record(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let entry = self.note(at, job, origin_seq, body);
        self.publish();
        entry
    }

    /// As [`StateWriter::record`], but shown at the next [`StateWriter::publish`]: where several entries come together, readers are
    /// shown them together.
    pub fn note(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let entry = self.take_in(at, job, origin_seq, body);
        self.write();
        entry
    }

    /// As [`StateWriter::record`], but the entry is also written to the journal only when it is shown: where many entries come together,
    /// they are written with one request. Only for entries that another journal has, since a crash before that loses them.
    pub fn gather(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        let entry = self.take_in(at, job, origin_seq, body);
        self.has_gathered = true;
        if self.unwritten.len() >= GATHERED_ENTRIES {
            self.write();
        }
        self.publish();
        entry
    }

    fn take_in(&mut self, at: Stamp, job: Option<&JobId>, origin_seq: Option<u64>, body: Body) -> Entry {
        self.newest = self.newest.saturating_add(1);
        let boot = self.boot.clone();
        let entry = Entry { seq: self.newest, at, boot, job: job.cloned(), origin_seq, body };
        self.unwritten.push_back(Arc::new(entry.clone()));
        self.apply(&entry);
        entry
    }

    /// Takes in what a rank's page told. It is not journaled, and shown at the next [`StateWriter::publish`].
    pub fn sample(&mut self, job: &JobId, attempt: Attempt, rank: Rank, beat: BeatView) {
        self.view.sample(job, attempt, rank, beat);
    }

    /// Takes in a newer reading of a component whose state did not change. It is not journaled, and shown at
    /// the next [`StateWriter::publish`]. A change of state is recorded as a health entry instead.
    pub fn set_component(&mut self, component: Component) {
        self.view.components.insert(component.name.clone(), component);
    }

    /// Takes in the GPUs with their last readings, shown at the next [`StateWriter::publish`]. They are not journaled.
    pub fn set_gpus(&mut self, gpus: Vec<GpuView>) {
        self.view.gpus = gpus.into();
    }

    /// Shows the components as they stand: changes of state go into the journal, fresh readings only into the
    /// view.
    pub fn show_host(&mut self, at: Stamp, mut components: Vec<Component>) {
        components.iter_mut().for_each(|component| self.standing.keep(component));
        for change in changes(&self.view.components, &components) {
            self.note(at, None, None, Body::Health(change));
        }
        for component in components {
            let over = self.view.attention.judged(&component);
            self.set_component(component);
            if let Some(observation) = over {
                self.note(at, None, None, Body::Fact(Fact::Observed(observation)));
            }
        }
        self.publish();
    }

    /// Takes in what an operator says of a component; none if there is no such component.
    pub fn attend(&mut self, at: Stamp, uid: u32, name: &str, word: &OperatorAction) -> Option<Component> {
        let component = self.view.components.get(name)?.clone();
        self.record(at, None, None, Body::Fact(Fact::Observed(word.observation(uid, &component))));
        Some(component)
    }

    /// Ends silences that have run out.
    pub fn end_silences(&mut self, at: Stamp) {
        for over in self.view.attention.run_out(at.wall) {
            self.record(at, None, None, Body::Fact(Fact::Observed(over)));
        }
    }

    /// Shows these components no more.
    pub fn hide(&mut self, names: &[String]) {
        self.view.components.retain(|name, _| !names.contains(name));
        self.publish();
    }

    /// What is published from now on is shown with [`StateWriter::release`] or [`StateWriter::show_due`]: to show a whole board costs
    /// what is on it, and not what is new.
    pub fn hold(&mut self) {
        self.is_held = true;
    }

    /// Shows what was to be shown meanwhile.
    pub fn release(&mut self) {
        self.is_held = false;
        if std::mem::take(&mut self.is_due) {
            self.publish();
        }
    }

    /// Whether something was to be shown and is held.
    pub fn is_due(&self) -> bool {
        self.is_due
    }

    /// Shows what was to be shown, and holds what comes after it.
    pub fn show_due(&mut self) {
        self.release();
        self.hold();
    }

    /// The number of the newest entry, shown or not; 0 before the first.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Shows the present state to the readers.
    pub fn publish(&mut self) {
        if self.is_held {
            self.is_due = true;
            return;
        }
        if self.has_gathered {
            self.write();
        }
        self.publisher.send_replace(Published {
            view: Arc::new(self.view.clone()),
            oldest: self.oldest,
            newest: self.newest,
            unwritten: self.unwritten.iter().cloned().collect(),
            journal_error: self.journal_error.clone(),
        });
    }

    /// Writes what still waits and waits until the disk has everything (fdatasync), but not for ever. An error is told by
    /// [`StateWriter::journal_error`] and repeated by a later call.
    pub fn sync(&mut self) {
        self.writing.settle(LAST_PATIENCE);
        let synced = self.write_waiting().and_then(|()| self.ask(LAST_PATIENCE, Journal::sync)?);
        self.note_journal(synced);
    }

    /// Writes what still waits, and hands out what is to be forced onto the disk elsewhere; none where that cannot be
    /// had, which [`StateWriter::journal_error`] tells.
    pub fn unforced(&mut self) -> Option<Unforced> {
        let before = std::mem::take(&mut self.not_forced);
        let hand_out = move |journal: &mut Journal| {
            before.into_iter().for_each(|unforced| journal.not_forced(unforced));
            journal.unforced()
        };
        let unforced = self.write_waiting().and_then(|()| self.ask(PATIENCE, hand_out)?);
        match unforced {
            Ok(unforced) => Some(unforced),
            Err(error) => {
                self.note_journal(Err(error));
                None
            }
        }
    }

    /// Takes in whether what was handed out is on the disk.
    pub fn forced(&mut self, forced: Forced) {
        let forced = forced.map_err(|(error, unforced)| {
            self.not_forced.push(unforced);
            error
        });
        self.note_journal(forced);
    }

    /// Entries that wait for the journal.
    pub fn unwritten(&self) -> usize {
        self.unwritten.len()
    }

    /// The view as it stands, published or not.
    pub fn view(&self) -> &NodeView {
        &self.view
    }

    /// Where the rooms that watch the host sign on.
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

    /// Why the journal cannot be written at present, if it cannot.
    pub fn journal_error(&self) -> Option<&str> {
        self.journal_error.as_deref()
    }

    /// What was found in the journal at open.
    pub fn replayed(&self) -> Replayed {
        self.replayed
    }

    /// Has what waits written, and keeps no more than may wait.
    fn write(&mut self) {
        let written = self.write_waiting();
        if self.unwritten.len() > UNWRITTEN_ENTRIES
            && let Some(lost) = self.unwritten.pop_front()
        {
            self.lost += 1;
            // Once for each power of two: it goes on for as long as the disk does not come back.
            if self.lost.is_power_of_two() {
                tracing::error!(
                    seq = lost.seq,
                    lost = self.lost,
                    "entries are lost to the journal, which cannot be written"
                );
            }
        }
        self.note_journal(written);
    }

    /// Has what waits written. Of what was still being written when it was last asked, the journal knows what it has.
    fn write_waiting(&mut self) -> Result<(), JournalError> {
        self.has_gathered = false;
        if self.unwritten.is_empty() {
            return Ok(());
        }
        let waiting: Vec<Arc<Entry>> = self.unwritten.iter().cloned().collect();
        let wrote = self.ask(PATIENCE, move |journal| append(journal, &waiting))?;
        self.oldest = wrote.oldest;
        while self.unwritten.front().is_some_and(|entry| entry.seq <= wrote.through) {
            self.unwritten.pop_front();
        }
        wrote.result
    }

    /// What comes of work on the journal, if its file system answers.
    fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce(&mut Journal) -> T + Send + 'static,
    ) -> Result<T, JournalError> {
        let journal = Arc::clone(&self.journal);
        let answer = self.writing.ask(patience, move || work(&mut lock(&journal)));
        answer.ok_or_else(|| JournalError::Silent { dir: self.dir.clone() })
    }

    /// Logs when the journal fails and when it is well again, not each time in between.
    fn note_journal(&mut self, result: Result<(), JournalError>) {
        if let Err(JournalError::Silent { .. }) = result {
            if self.silent_since.get_or_insert_with(Instant::now).elapsed() < TOLD_AFTER {
                return;
            }
        } else {
            self.silent_since = None;
        }
        match (result, &self.journal_error) {
            (Ok(()), None) => {}
            (Ok(()), Some(_)) => {
                tracing::info!(dir = %self.dir.display(), "the journal can be written again");
                self.journal_error = None;
            }
            (Err(error), before) => {
                let text: Arc<str> = error.to_string().into();
                if before.is_none() {
                    tracing::error!(%error, "the journal cannot be written; entries are kept in memory");
                }
                self.journal_error = Some(text);
            }
        }
    }

    fn apply(&mut self, entry: &Entry) {
        self.view.apply(entry);
        if let Some(job) = &entry.job {
            self.note_phase(job);
        }
    }

    /// Keeps the order in which jobs ended, and drops from the view those that ended long ago.
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

/// What came of appending entries.
struct Wrote {
    /// All entries up to this number were written, or cannot be.
    through: u64,
    oldest: u64,
    result: Result<(), JournalError>,
}

fn append(journal: &mut Journal, entries: &[Arc<Entry>]) -> Wrote {
    let mut result = Ok(());
    let mut through = journal.next_seq() - 1;
    for entry in entries {
        if entry.seq < journal.next_seq() {
            continue;
        }
        match journal.append_entry(entry) {
            Err(error) if error.is_disk() => {
                result = Err(error);
                break;
            }
            // Time will not mend this entry; it must not hold up those behind it.
            Err(error) => {
                tracing::error!(%error, seq = entry.seq, "an entry is lost to the journal");
                result = Err(error);
            }
            Ok(()) => {}
        }
        through = entry.seq;
    }
    Wrote { through, oldest: journal.oldest().unwrap_or(0), result }
}

/// A panic of another holder leaves the journal as the next append finds it after a crash.
fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reading end. Each clone notices changes on its own.
#[derive(Clone, Debug)]
pub struct StateReader {
    journal: JournalReader,
    published: watch::Receiver<Published>,
    roster: Roster,
}

impl StateReader {
    /// Whether nothing will ever be published again.
    pub fn is_gone(&self) -> bool {
        self.published.has_changed().is_err()
    }

    /// Which rooms watch the host, and how far they are.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// The view as it was last published.
    pub fn view(&self) -> Arc<NodeView> {
        self.published.borrow().view.clone()
    }

    /// Waits until something is published that this reader has not waited for before. False once the board is
    /// gone: nothing will ever be published again.
    pub async fn changed(&mut self) -> bool {
        self.published.changed().await.is_ok()
    }

    /// Waits until there is an entry with a number above `cursor`. False once the board is gone.
    pub async fn newer_than(&mut self, cursor: u64) -> bool {
        self.published.wait_for(|published| published.newest > cursor).await.is_ok()
    }

    /// At most `limit` entries with numbers above `cursor`, those included that wait for the disk. Reads files:
    /// where that may take long, call it where blocking is allowed.
    pub fn entries_after(&self, cursor: u64, limit: usize) -> Result<Read, JournalError> {
        // Taken before the files are read: what is written in between is found there.
        let waiting = self.published.borrow().unwritten.clone();
        let mut read = self.journal.entries_after(cursor, limit)?;
        for entry in waiting.iter().filter(|entry| entry.seq > read.cursor.max(cursor)) {
            if read.entries.len() >= limit {
                break;
            }
            read.entries.push(Entry::clone(entry));
        }
        read.cursor = read.entries.last().map_or(read.cursor, |last| last.seq.max(read.cursor));
        Ok(read)
    }

    /// The number of the newest entry; 0 before the first.
    pub fn newest(&self) -> u64 {
        self.published.borrow().newest
    }

    /// The number of the oldest entry that the journal holds; 0 while it is empty.
    pub fn oldest(&self) -> u64 {
        self.published.borrow().oldest
    }

    /// Why the journal cannot be written at present, if it cannot.
    pub fn journal_error(&self) -> Option<Arc<str>> {
        self.published.borrow().journal_error.clone()
    }
}
