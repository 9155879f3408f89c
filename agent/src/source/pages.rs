//! A rank's heartbeat page, read: what is new since the last look.

use std::fs::File;
use std::io;
use std::sync::Arc;

use mainstay_core::entry::{Note, StepDone};
use mainstay_core::time::Mono;
use mainstay_core::view::BeatView;
use mainstay_heartbeat::{
    Claim, ExitKind, MAJOR, MINOR, Page, PageWords, Refusal, RefusalReason, StepRecord,
};

use crate::os::mapping::MappedPage;

/// Sections of this name are booked as checkpointing.
const CHECKPOINT_SECTION: &str = "checkpoint";

/// What a look at a page brought to light.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct News {
    /// The client that connected since the last look, and when.
    pub connected: Option<(String, Mono)>,
    /// Why a client refused the page, once.
    pub refused: Option<String>,
    /// Steps completed since the last look, oldest first.
    pub steps: Vec<StepDone>,
    /// The exit note of a rank that raised, once.
    pub raised: Option<Note>,
}

/// A page under watch.
#[derive(Debug)]
pub struct PageReader {
    mapped: MappedPage,
    told: Told,
    records: Vec<StepRecord>,
}

/// What was told already.
#[derive(Debug, Default)]
struct Told {
    records: u64,
    connected: bool,
    refused: bool,
    raised: bool,
}

impl PageReader {
    /// Watches the page in `file`.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn of(file: &File) -> io::Result<PageReader> {
        let mapped = MappedPage::of(file)?;
        Ok(PageReader { mapped, told: Told::default(), records: Vec::new() })
    }

    /// The same, with a page to be read instead while no client has claimed this one.
    #[must_use]
    pub fn with_stand_in(mut self, stand_in: Option<Arc<PageWords>>) -> PageReader {
        self.mapped = self.mapped.with_stand_in(stand_in);
        self
    }

    /// What is new.
    pub fn look(&mut self) -> News {
        let PageReader { mapped, told, records } = self;
        let Ok(page) = mapped.page() else { return News::default() };
        let mut news = News::default();
        if !told.connected {
            news.connected = connected(&page);
            told.connected = news.connected.is_some();
        }
        if !told.refused {
            news.refused = page.refusal().as_ref().map(refused);
            told.refused = news.refused.is_some();
        }
        records.clear();
        told.records = page.records_since(told.records, records).next_cursor;
        news.steps = records.iter().map(|record| step_done(&page, record)).collect();
        if !told.raised {
            news.raised = raised(&page);
            told.raised = news.raised.is_some();
        }
        news
    }

    /// What the page tells now, for people.
    pub fn beat(&self) -> Option<BeatView> {
        let page = self.mapped.page().ok()?;
        let beat = page.beat()?;
        let name = |id| page.section_name(id).unwrap_or_else(|| "?".to_owned());
        Some(BeatView {
            step: beat.step,
            sections: beat.open_sections().iter().map(|open| name(open.id)).collect(),
            at: Mono(beat.mono_ns),
            loss: beat.loss,
        })
    }
}

fn connected(page: &Page<'_>) -> Option<(String, Mono)> {
    match page.claim() {
        Claim::Claimed(by) | Claim::Closed { by, .. } => {
            Some((format!("{} {}", by.language, by.version), Mono(by.claimed_mono_ns)))
        }
        _ => None,
    }
}

fn refused(refusal: &Refusal) -> String {
    let why = match refusal.reason {
        RefusalReason::Major => format!(
            "it speaks page layout {}.{} and this launcher {MAJOR}.{MINOR}: install the client of this version",
            refusal.major, refusal.minor,
        ),
        RefusalReason::Size => "the page file is too short: was it changed by somebody?".to_owned(),
        RefusalReason::Sparse => {
            "the page's memory is not reserved: is the tmpfs of /dev/shm full?".to_owned()
        }
        _ => "for a reason that this launcher does not know".to_owned(),
    };
    format!("client {} (pid {}) refused its page: {why}", refusal.version, refusal.pid)
}

fn step_done(page: &Page<'_>, record: &StepRecord) -> StepDone {
    let is_checkpoint = |id| page.section_name(id).is_some_and(|name| name == CHECKPOINT_SECTION);
    let checkpoint_ns =
        record.sections().iter().filter(|spent| is_checkpoint(spent.id)).map(|spent| spent.ns).sum();
    StepDone {
        step: record.step,
        start: Mono(record.start_mono_ns),
        end: Mono(record.end_mono_ns),
        first: record.first,
        checkpoint_ns,
        loss: record.loss,
    }
}

/// The exit note, if it speaks of an exception.
fn raised(page: &Page<'_>) -> Option<Note> {
    let note = page.exit_note().filter(|note| note.kind == ExitKind::Exception)?;
    Some(Note {
        exception: note.exception,
        message: note.message,
        traceback: note.traceback,
        step: note.step,
        at: Mono(note.mono_ns),
    })
}
