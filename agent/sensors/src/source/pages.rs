//! Reads a rank's heartbeat page: what is new since the last look.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use mainstay_hang::{Class, Count, OUTPUT_LINES, PhaseId, Phases, RankSample};
use mainstay_heartbeat::layout::NAME_ENTRIES;
use mainstay_heartbeat::{
    Beat, Claim, ExitKind, MAJOR, MINOR, Page, PageSpec, PageWords, Refusal, RefusalReason, SectionId,
    StepRecord, format,
};
use mainstay_model::entry::{Note, Spent, StepDone};
use mainstay_model::time::{Mono, Span};
use mainstay_progress::monitor::Pace;
use mainstay_progress::straggler::SectionKind;
use mainstay_view::node::BeatView;

use mainstay_sys::mapping::MappedPage;

use super::output_lines::begin_round;

/// How many of the last steps show how long a step takes.
const RECENT: usize = 64;

/// Sections of this name count as checkpointing.
const CHECKPOINT_SECTION: &str = "checkpoint";

/// The section of a client that loads a checkpoint.
const RESTORE_SECTION: &str = "restore";

/// What is new in a page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PageChanges {
    /// The client that connected since the last look, and when.
    pub connected: Option<(String, Mono)>,
    /// Why a client refused the page; reported once.
    pub refused: Option<String>,
    /// Steps completed since the last look, oldest first.
    pub steps: Vec<StepDone>,
    /// The exit note of a rank that raised an exception; reported once.
    pub raised: Option<Note>,
    /// The role that the rank reports, and its pipeline stage; at first and after each change.
    pub role: Option<(String, Option<u32>)>,
}

/// A page under watch.
#[derive(Debug)]
pub struct PageReader {
    mapped: MappedPage,
    reported: ReportedPage,
    records: Vec<StepRecord>,
    /// Phases of the sections by their number in this page.
    phases: Vec<Option<PhaseId>>,
    /// Whether a pause or a long phase was announced since the last record.
    was_quiet: bool,
    counts: Vec<Count>,
    /// How long the last steps took, in nanoseconds, and how many there were in all.
    recent: [u64; RECENT],
    seen: usize,
    /// The claim under which an earlier round of the same process reported: nothing of it belongs to this round.
    past_claim: Option<u64>,
    lines: Option<OutputLines>,
}

/// The steps that lines of the rank's output report. They count while its client reports none.
#[derive(Debug)]
struct OutputLines {
    page: Arc<PageWords>,
    /// Records that were reported already.
    records: u64,
    connected: bool,
    /// Whether the records of the last look are of this page.
    are_read: bool,
    /// The last step, for the time of one where not each is printed.
    last_step: Option<u64>,
}

impl OutputLines {
    /// The newest line of this round, unless the rank's own page has a step.
    fn beat(&self, own: Option<&Beat>) -> Option<Beat> {
        let page = Page::new(&self.page).ok()?;
        let beat = page.beat().filter(|beat| Some(beat.claim) == claims(&page))?;
        own.is_none_or(|own| own.step.is_none()).then_some(beat)
    }
}

/// A page in this program's own memory, for what does not write a page itself.
///
/// # Errors
/// None that is known: the format of a page has the length of one.
pub fn page_in_memory(spec: &PageSpec<'_>) -> io::Result<Arc<PageWords>> {
    let bytes = format(spec);
    let words: Box<[AtomicU64]> =
        bytes.as_chunks::<8>().0.iter().map(|word| AtomicU64::new(u64::from_ne_bytes(*word))).collect();
    let words: Box<PageWords> = words.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Arc::from(words))
}

/// What was reported already.
#[derive(Debug, Default)]
struct ReportedPage {
    records: u64,
    connected: bool,
    refused: bool,
    raised: bool,
    role: Option<(String, Option<u32>)>,
}

impl PageReader {
    /// Watches the page in `file`.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn map(file: &File) -> io::Result<PageReader> {
        let mapped = MappedPage::map(file)?;
        Ok(PageReader {
            mapped,
            reported: ReportedPage::default(),
            records: Vec::new(),
            phases: vec![None; NAME_ENTRIES],
            was_quiet: false,
            counts: Vec::new(),
            recent: [0; RECENT],
            seen: 0,
            past_claim: None,
            lines: None,
        })
    }

    /// The same, with a page of the steps that the rank prints. They count while its client reports none.
    #[must_use]
    pub fn with_output_lines(mut self, page: Option<Arc<PageWords>>) -> PageReader {
        self.lines = page.map(|page| OutputLines {
            page,
            records: 0,
            connected: false,
            are_read: false,
            last_step: None,
        });
        self
    }

    /// The same, with another page to read while no client has claimed this one.
    #[must_use]
    pub fn with_substitute(mut self, substitute: Option<Arc<PageWords>>) -> PageReader {
        self.mapped = self.mapped.with_substitute(substitute);
        self
    }

    /// Starts a round in which the rank continues in its process, with the same page: it claims the page again, and what it
    /// reported under the old claim is over.
    pub fn begin_round(&mut self) {
        let claim = self.mapped.page().ok().and_then(|page| claims(&page));
        self.past_claim = claim.or(self.past_claim);
        (self.reported.connected, self.reported.raised) = (false, false);
        self.reported.role = None;
        self.was_quiet = false;
        if let Some(lines) = &mut self.lines {
            (lines.connected, lines.last_step) = (false, None);
            begin_round(&lines.page);
        }
    }

    /// Returns what is new.
    pub fn look(&mut self) -> PageChanges {
        let mut news = self.look_at_page();
        self.look_at_lines(&mut news);
        news
    }

    /// The newest beat of this round in the rank's own page.
    fn own_beat(&self) -> Option<Beat> {
        let page = self.mapped.page().ok()?;
        page.beat().filter(|beat| Some(beat.claim) != self.past_claim)
    }

    fn look_at_lines(&mut self, news: &mut PageChanges) {
        let own = self.own_beat();
        let PageReader { lines: Some(lines), records, recent, seen, .. } = self else { return };
        lines.are_read = false;
        let (beat, Ok(page)) = (lines.beat(own.as_ref()), Page::new(&lines.page)) else { return };
        let Some(beat) = beat else { return };
        lines.are_read = true;
        records.clear();
        lines.records = page.records_since(lines.records, records).next_cursor;
        records.retain(|record| u64::from(record.claim) == beat.claim & u64::from(u32::MAX));
        for record in records.iter() {
            let steps = lines.last_step.and_then(|last| record.step.checked_sub(last)).unwrap_or(1).max(1);
            lines.last_step = Some(record.step);
            if !record.first {
                recent[*seen % RECENT] = record.end_mono_ns.saturating_sub(record.start_mono_ns) / steps;
                *seen = seen.wrapping_add(1);
            }
        }
        news.steps = records.iter().map(|record| step_done(&page, record)).collect();
        if !lines.connected && beat.step.is_some() {
            lines.connected = true;
            news.connected.get_or_insert((OUTPUT_LINES.to_owned(), Mono(beat.mono_ns)));
        }
    }

    fn look_at_page(&mut self) -> PageChanges {
        let PageReader { mapped, reported, records, recent, seen, past_claim, .. } = self;
        let Ok(page) = mapped.page() else { return PageChanges::default() };
        let mut news = PageChanges::default();
        records.clear();
        if past_claim.is_some() && claims(&page) == *past_claim {
            reported.records = page.records_since(reported.records, records).next_cursor;
            records.clear();
            return news;
        }
        if !reported.connected {
            news.connected = connected(&page);
            reported.connected = news.connected.is_some();
        }
        if let Some(role) = page.role().map(|role| (role.name, role.stage))
            && reported.role.as_ref() != Some(&role)
        {
            reported.role = Some(role.clone());
            news.role = Some(role);
        }
        if !reported.refused {
            news.refused = page.refusal().as_ref().map(refused);
            reported.refused = news.refused.is_some();
        }
        records.clear();
        reported.records = page.records_since(reported.records, records).next_cursor;
        if let Some(past) = *past_claim {
            records.retain(|record| u64::from(record.claim) != past & u64::from(u32::MAX));
        }
        for record in records.iter().filter(|record| !record.first) {
            recent[*seen % RECENT] = record.end_mono_ns.saturating_sub(record.start_mono_ns);
            *seen = seen.wrapping_add(1);
        }
        news.steps = records.iter().map(|record| step_done(&page, record)).collect();
        if !reported.raised {
            news.raised = raised(&page);
            reported.raised = news.raised.is_some();
        }
        news
    }

    /// What the page shows the judge of hangs now, and its collective counters.
    pub fn sample(&mut self, known: &mut Phases) -> (RankSample, &[Count]) {
        self.counts.clear();
        let mut sample = self.sample_page(known);
        if let Some(lines) = &self.lines
            && let Some(beat) = lines.beat(self.own_beat().as_ref())
        {
            if sample.phase <= PhaseId::STEP {
                sample.phase = known.section(OUTPUT_LINES);
                sample.since = sample.since.max(Mono(beat.step_mono_ns.unwrap_or(beat.mono_ns)));
            }
            sample.registered = true;
            sample.claim = sample.claim.wrapping_add(beat.claim);
            sample.beats = sample.beats.wrapping_add(beat.count);
            sample.beat_at = sample.beat_at.max(Mono(beat.mono_ns));
            sample.step = beat.step;
        }
        (sample, &self.counts)
    }

    fn sample_page(&mut self, known: &mut Phases) -> RankSample {
        let Ok(page) = self.mapped.page() else { return RankSample::default() };
        let (by, closed) = match page.claim() {
            Claim::Claimed(by) if Some(by.claims) != self.past_claim => (by, false),
            Claim::Closed { by, .. } if Some(by.claims) != self.past_claim => (by, true),
            _ => return RankSample::default(),
        };
        self.counts.extend(page.collectives().iter().map(|collective| Count {
            comm: collective.comm,
            entered: collective.entered,
            completed: collective.completed,
            signature: collective.signature,
        }));
        let mut sample = RankSample {
            registered: true,
            closed,
            claim: by.claims,
            since: Mono(by.claimed_mono_ns),
            ..RankSample::default()
        };
        // Without a beat of the new claimant, the page has the last beat of the previous one.
        let Some(beat) = page.beat().filter(|beat| beat.claim == by.claims) else { return sample };
        let stepped = beat.step_mono_ns.unwrap_or(by.claimed_mono_ns);
        (sample.beats, sample.beat_at, sample.step) = (beat.count, Mono(beat.mono_ns), beat.step);
        (sample.phase, sample.since) = (PhaseId::STEP, Mono(stepped));
        sample.quiet_until = Mono(beat.quiet_until_ns);
        self.was_quiet |= beat.quiet_until_ns > 0;
        for open in beat.open_sections() {
            let phase = phase_of(&page, &mut self.phases, known, open.id);
            if known.class(phase) == Class::Long {
                sample.long.get_or_insert(phase);
            }
            // A section that spans steps is judged by its part in the present step.
            (sample.phase, sample.since) = (phase, Mono(open.start_mono_ns.max(stepped)));
        }
        sample
    }

    /// Reports to the judge of hangs how long the steps of the last look took.
    pub fn teach(&mut self, known: &mut Phases) {
        let was_quiet = std::mem::take(&mut self.was_quiet) && !self.records.is_empty();
        let Ok(page) = self.mapped.page() else { return };
        if was_quiet {
            // Time that was announced as unusual must not be learned.
            return;
        }
        if self.lines.as_ref().is_some_and(|lines| lines.are_read) {
            for record in &self.records {
                let took = record.end_mono_ns.saturating_sub(record.start_mono_ns);
                let phase = if record.first { PhaseId::FIRST_STEP } else { known.section(OUTPUT_LINES) };
                // Of lines that came together, the first one has the time of all.
                if took > 0 {
                    known.learn(phase, record.step, Span(took));
                }
            }
            return;
        }
        for record in &self.records {
            let mut took = record.end_mono_ns.saturating_sub(record.start_mono_ns);
            for spent in record.sections() {
                let phase = phase_of(&page, &mut self.phases, known, spent.id);
                known.learn(phase, record.step, Span(spent.ns));
                if known.class(phase) == Class::Long {
                    took = took.saturating_sub(spent.ns);
                }
            }
            let phase = if record.first { PhaseId::FIRST_STEP } else { PhaseId::STEP };
            known.learn(phase, record.step, Span(took));
        }
    }

    /// The last steps that are kept, the newest last, at most `most`: number and nanoseconds.
    pub fn last_steps(&self, most: usize) -> Vec<(u64, u64)> {
        let lines = self.lines.as_ref().filter(|lines| lines.beat(self.own_beat().as_ref()).is_some());
        let (page, reported) = match lines {
            Some(lines) => (Page::new(&lines.page), lines.records),
            None => (self.mapped.page(), self.reported.records),
        };
        let Ok(page) = page else { return Vec::new() };
        let mut records = Vec::new();
        page.records_since(reported.saturating_sub(most as u64), &mut records);
        let took = |record: &StepRecord| record.end_mono_ns.saturating_sub(record.start_mono_ns);
        records.iter().rev().take(most).rev().map(|record| (record.step, took(record))).collect()
    }

    /// Where in the page the word of its claimant's lifeline is, if it has one.
    pub fn lifeline(&self) -> Option<usize> {
        self.mapped.page().ok()?.lifeline()
    }

    /// The rank's position in its data, if it reported one.
    pub fn data(&self) -> Option<u64> {
        self.mapped.page().ok().filter(|page| claims(page) != self.past_claim)?.data()
    }

    /// Whether the rank checks for requests to save.
    pub fn listens_for_saves(&self) -> bool {
        self.mapped.page().is_ok_and(|page| page.listens_for_saves())
    }

    fn median_step(&self) -> Option<Span> {
        let mut recent = self.recent;
        let known = recent.get_mut(..self.seen.min(RECENT)).filter(|known| !known.is_empty())?;
        let middle = known.len() / 2;
        Some(Span(*known.select_nth_unstable(middle).1))
    }

    /// The page's present state, for people.
    pub fn beat(&self) -> Option<BeatView> {
        let page = self.mapped.page().ok()?;
        let own = self.own_beat();
        let lines = self.lines.as_ref().and_then(|lines| lines.beat(own.as_ref()));
        let name = |id| page.section_name(id).unwrap_or_else(|| "?".to_owned());
        let mut sections: Vec<String> =
            own.iter().flat_map(Beat::open_sections).map(|open| name(open.id)).collect();
        // A rank that has printed no step yet shows nothing.
        let lines = lines.filter(|beat| beat.step.is_some());
        if lines.is_some() && sections.is_empty() {
            sections.push(OUTPUT_LINES.to_owned());
        }
        let at = own.iter().chain(&lines).map(|beat| Mono(beat.mono_ns)).max();
        let beat = lines.or(own)?;
        Some(BeatView {
            step: beat.step,
            sections,
            at: at.unwrap_or_default(),
            loss: beat.loss,
            median_step: self.median_step(),
            pace: Pace::default(),
            stage: page.role().and_then(|role| role.stage),
            total_steps: page.total_steps(),
        })
    }
}

fn phase_of(page: &Page<'_>, seen: &mut [Option<PhaseId>], known: &mut Phases, id: SectionId) -> PhaseId {
    // Under `other` the page counts all sections that found no room for their names: they have nothing in common.
    if id == SectionId::OTHER {
        return PhaseId::STEP;
    }
    let Some(slot) = seen.get_mut(usize::from(id.get())) else { return PhaseId::STEP };
    *slot.get_or_insert_with(|| page.section_name(id).map_or(PhaseId::STEP, |name| known.section(&name)))
}

fn connected(page: &Page<'_>) -> Option<(String, Mono)> {
    match page.claim() {
        Claim::Claimed(by) | Claim::Closed { by, .. } => {
            Some((format!("{} {}", by.language, by.version), Mono(by.claimed_mono_ns)))
        }
        _ => None,
    }
}

/// How often the page was claimed.
fn claims(page: &Page<'_>) -> Option<u64> {
    match page.claim() {
        Claim::Claimed(by) | Claim::Closed { by, .. } => Some(by.claims),
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
    let (mut checkpoint_ns, mut restore_ns) = (0_u64, 0_u64);
    let mut spent = Spent::default();
    let (mut covered_ns, mut has_backward, mut on_device) = (0_u64, false, false);
    for section in record.sections() {
        let Some(name) = page.section_name(section.id) else { continue };
        covered_ns = covered_ns.saturating_add(section.ns);
        has_backward |= name == "backward";
        on_device |= name.ends_with("@device");
        if name == CHECKPOINT_SECTION {
            checkpoint_ns += section.ns;
        } else if name == RESTORE_SECTION {
            restore_ns += section.ns;
        }
        match SectionKind::from_name(&name) {
            SectionKind::Wait => spent.wait_ns += section.ns,
            SectionKind::Pause => spent.pause_ns += section.ns,
            SectionKind::Data | SectionKind::Compute => spent.alone_ns += section.ns,
            SectionKind::Work => {}
        }
    }
    // Ranks exchange gradients in the backward pass, so outside all sections a rank works by itself. With a device
    // this does not hold: the host waits for it, and so for other ranks, anywhere.
    if has_backward && !on_device {
        let took = record.end_mono_ns.saturating_sub(record.start_mono_ns);
        spent.alone_ns = spent.alone_ns.saturating_add(took.saturating_sub(covered_ns));
    }
    StepDone {
        step: record.step,
        start: Mono(record.start_mono_ns),
        end: Mono(record.end_mono_ns),
        first: record.first,
        counted: record.counted,
        checkpoint_ns,
        restore_ns,
        spent,
        loss: record.loss,
        grad_norm: record.grad_norm,
        digest: record.digest,
    }
}

/// The exit note, if it is about an exception.
fn raised(page: &Page<'_>) -> Option<Note> {
    let note = page.exit_note().filter(|note| note.kind == ExitKind::Exception)?;
    Some(Note {
        exception: note.exception,
        message: note.message,
        traceback: note.traceback,
        step: note.step,
        at: Mono(note.mono_ns),
        file: None,
    })
}
