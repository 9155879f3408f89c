//! The Rust API of the client.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mainstay_heartbeat::{Collective, Measures, Note, SectionId, Writing};

use crate::attach::Attached;
use crate::clock::now_ns;
use crate::error::OpenError;

/// The environment variable that holds the path of this rank's page.
pub const PAGE_VARIABLE: &str = "MAINSTAY_PAGE";

/// How often a rare call (a new section name, the close) yields to the thread that is writing before it is dropped.
const MAX_YIELDS: usize = 1000;

/// A handle to this rank's heartbeat page, or to nothing; cheap to clone, to be used from any thread.
#[derive(Clone, Default)]
pub struct Client {
    attached: Option<&'static Attached>,
    refusal: Option<Arc<OpenError>>,
}

impl Client {
    /// Opens the page that the launcher named in the environment. Never fails: without a usable page, the client
    /// does nothing, and [`refusal`](Self::refusal) returns the reason if there was a page.
    #[must_use]
    pub fn from_env() -> Self {
        Self::from_env_as("rust")
    }

    /// As [`from_env`](Self::from_env), for a binding in another language.
    #[must_use]
    pub fn from_env_as(language: &str) -> Self {
        let path = std::env::var_os(PAGE_VARIABLE).filter(|path| !path.is_empty());
        path.map_or_else(Self::disabled, |path: OsString| Self::open_or_refuse(Path::new(&path), language))
    }

    /// Opens this page.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped, is no page of this layout, or is written by another living process.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_as(path, "rust")
    }

    /// As [`open`](Self::open), for a binding in another language.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_as(path: &Path, language: &str) -> Result<Self, OpenError> {
        Ok(Self { attached: Some(Attached::open(path, language)?), refusal: None })
    }

    pub(crate) fn open_or_refuse(path: &Path, language: &str) -> Self {
        Self::open_as(path, language)
            .unwrap_or_else(|error| Self { attached: None, refusal: Some(Arc::new(error)) })
    }

    /// A client that does nothing.
    #[must_use]
    pub fn disabled() -> Self {
        Self::default()
    }

    /// Whether calls reach a page: false without one, after [`close`](Self::close), and in a forked child.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.ours().is_some()
    }

    /// Why there was a page but it is not used.
    #[must_use]
    pub fn refusal(&self) -> Option<&OpenError> {
        self.refusal.as_deref()
    }

    /// Step `step` is complete.
    #[inline]
    pub fn step(&self, step: u64) {
        self.step_with(step, Measures::default());
    }

    /// Step `step` is complete, with its measures.
    #[inline]
    pub fn step_with(&self, step: u64, measures: Measures) {
        if let Some(mut page) = self.write() {
            page.step(now_ns(), step, measures);
        }
    }

    /// As [`step_with`](Self::step_with), for a step without a number from the training script: the caller counts
    /// steps, from 0 in each process. So the first step after a restart is not treated as repeated work.
    #[inline]
    pub fn counted_step(&self, step: u64, measures: Measures) {
        if let Some(mut page) = self.write() {
            page.counted_step(now_ns(), step, measures);
        }
    }

    /// Alive, though no step is complete.
    #[inline]
    pub fn beat(&self) {
        if let Some(mut page) = self.write() {
            page.beat(now_ns());
        }
    }

    /// The id of a section's name, to be kept and used again. Names beyond the page's room share
    /// [`SectionId::OTHER`].
    #[must_use]
    pub fn intern(&self, name: &str) -> SectionId {
        let Some(attached) = self.ours() else { return SectionId::OTHER };
        attached
            .writer
            .find_section(name)
            .or_else(|| write_patiently(attached).map(|mut page| page.intern(name)))
            .unwrap_or(SectionId::OTHER)
    }

    /// Section `id` starts.
    #[inline]
    pub fn enter(&self, id: SectionId) {
        if let Some(mut page) = self.write() {
            page.enter(now_ns(), id);
        }
    }

    /// Section `id` ends.
    #[inline]
    pub fn leave(&self, id: SectionId) {
        if let Some(mut page) = self.write() {
            page.leave(now_ns(), id);
        }
    }

    /// Enters the section of this name until the guard is dropped.
    #[must_use = "the section ends when the guard is dropped"]
    pub fn section(&self, name: &str) -> SectionGuard {
        let id = self.intern(name);
        self.enter(id);
        SectionGuard { client: self.clone(), id }
    }

    /// Communicator `comm` has entered and completed this many collective operations. The number is the same on all
    /// ranks of the communicator, so that the launcher can see which ranks wait for which.
    pub fn collective(&self, comm: u64, entered: u64, completed: u64) {
        self.collective_with(Collective { comm, entered, completed, signature: 0 });
    }

    /// As [`collective`](Self::collective), with a description of the operation entered last.
    pub fn collective_with(&self, counts: Collective) {
        if let Some(mut page) = self.write() {
            page.collective_with(counts);
        }
    }

    /// Section `id` took `ns` of the current step where the host's clock does not see it: on a device.
    #[inline]
    pub fn spend(&self, id: SectionId, ns: u64) {
        if let Some(mut page) = self.write() {
            page.spend(id, ns);
        }
    }

    /// The next phase takes long, at most `span`: until then, or until [`resume`](Self::resume), no progress is
    /// expected of the job and no hang is reported.
    pub fn expect_long(&self, span: Duration) {
        let now = now_ns();
        let span = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        self.quiet_until(now, now.saturating_add(span));
    }

    /// No hang is reported until [`resume`](Self::resume).
    pub fn pause(&self) {
        self.quiet_until(now_ns(), u64::MAX);
    }

    /// Progress is expected again, after [`expect_long`](Self::expect_long) or [`pause`](Self::pause).
    pub fn resume(&self) {
        self.quiet_until(now_ns(), 0);
    }

    /// A lost call would have a lasting effect, so it is retried.
    fn quiet_until(&self, now_ns: u64, until_ns: u64) {
        let Some(attached) = self.ours() else { return };
        if let Some(mut page) = write_patiently(attached) {
            // A launcher of an older layout does not use it to detect hangs either.
            let _ = page.quiet_until(now_ns, until_ns);
        }
    }

    /// The rank's current position in its data: a number that is the same whenever the same batch is read, at any
    /// step. Call it before the batch is used; it is one store.
    #[inline]
    pub fn data_at(&self, position: u64) {
        if let Some(attached) = self.ours() {
            attached.writer.data_at(position);
        }
    }

    /// The number of steps after which this program ends: with the pace it gives the time that is left. 0 if it is
    /// unknown.
    pub fn total_steps(&self, steps: u64) {
        if let Some(attached) = self.ours() {
            attached.writer.total_steps(steps);
        }
    }

    /// The role of this rank: ranks of one role and pipeline stage do the same work, and are compared with each
    /// other. Call it once, early.
    pub fn role(&self, name: &str, stage: Option<u32>) {
        let Some(attached) = self.ours() else { return };
        if let Some(mut page) = write_patiently(attached) {
            // A launcher of an older layout derives it from the steps, or does not know it.
            let _ = page.role(name, stage);
        }
    }

    /// Whether this rank must save now and end. It becomes true after the same step on all ranks, so that they save
    /// the same step; the launcher waits for ranks that call this when the job must end.
    #[must_use]
    pub fn save_requested(&self) -> bool {
        let Some(attached) = self.ours() else { return false };
        attached.writer.listen_for_saves();
        let page = attached.writer.page();
        let Some(request) = page.save_request() else { return false };
        match request.at_step {
            None => true,
            // A rank that completed no step has no step that others would have to match.
            Some(step) => page.beat().and_then(|beat| beat.step).is_none_or(|done| done >= step),
        }
    }

    /// Whether a save is due by the costs of the job's saves and failures: true once each time, after the same step
    /// on all ranks that ask after each step.
    #[must_use]
    pub fn save_due(&self) -> bool {
        let Some(attached) = self.ours() else { return false };
        let page = attached.writer.page();
        let Some(step) = page.save_due() else { return false };
        if page.beat().and_then(|beat| beat.step).is_none_or(|done| done < step) {
            return false;
        }
        let due = step.saturating_add(1);
        attached.due_answered.swap(due, Ordering::Relaxed) != due
    }

    /// How long this rank has until it is forced to end; none if nothing is requested.
    #[must_use]
    pub fn save_within(&self) -> Option<Duration> {
        let request = self.ours()?.writer.page().save_request()?;
        Some(Duration::from_nanos(request.by_ns.saturating_sub(now_ns())))
    }

    /// Records that this rank calls [`save_requested`](Self::save_requested) after each step.
    pub fn listen_for_saves(&self) {
        if let Some(attached) = self.ours() {
            attached.writer.listen_for_saves();
        }
    }

    /// Leaves a note on how this process ends, and wakes the launcher. Only the first note is kept.
    pub fn exit_note(&self, note: &Note<'_>) {
        let Some(attached) = self.ours() else { return };
        if attached.writer.exit_note(now_ns(), note) {
            attached.ring();
        }
    }

    /// The rank starts again in this process: earlier reports belong to a round that is over. Wakes the launcher.
    pub fn begin_round(&self) {
        let Some(attached) = self.ours() else { return };
        if let Some(mut page) = write_patiently(attached) {
            page.begin_round(now_ns());
        }
        attached.ring();
    }

    /// Closes the page, and wakes the launcher. After this every clone of this client does nothing.
    pub fn close(&self) {
        let Some(attached) = self.ours() else { return };
        if let Some(mut page) = write_patiently(attached) {
            page.close(now_ns());
        }
        attached.token.give_up();
        attached.ring();
    }

    /// The page, if this process may write it.
    #[inline]
    fn ours(&self) -> Option<&'static Attached> {
        self.attached.filter(|attached| attached.token.is_ours())
    }

    #[inline]
    fn write(&self) -> Option<Writing<'static>> {
        let attached = self.ours()?;
        attached.writer.try_write(attached.key)
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("active", &self.is_active()).field("refusal", &self.refusal).finish()
    }
}

/// For calls whose loss would have a lasting effect: yields to the thread that is writing, a bounded number of
/// times.
fn write_patiently(attached: &'static Attached) -> Option<Writing<'static>> {
    (0..MAX_YIELDS).find_map(|_| {
        let page = attached.writer.try_once(attached.key);
        if page.is_none() {
            std::thread::yield_now();
        }
        page
    })
}

/// A section that ends when this is dropped.
#[derive(Debug)]
pub struct SectionGuard {
    client: Client,
    id: SectionId,
}

impl Drop for SectionGuard {
    fn drop(&mut self) {
        self.client.leave(self.id);
    }
}
