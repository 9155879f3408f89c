//! Searches a log for all signatures in one pass. Accepts text in pieces of any size, so that memory use does not depend on the length
//! of the log. Tolerates invalid bytes and lines without end.

mod caught;
mod completed_steps;
mod findings;
mod folded;
mod short_texts;
mod steps;
mod tracebacks;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use caught::Caught;
use completed_steps::CompletedSteps;
pub use findings::{Exception, Findings, Kind, MIN_HEALTHY_STEPS, Progress, RelevantLine, SignatureMatch};
use steps::place_in_progress;
pub use steps::relate;
use tracebacks::{LastFrame, is_traceback};

use super::catalog::{Catalog, PROGRESS, Role, STRUCTURE, XID};
use super::healthy;
use super::level;
use super::lines::{self, LINE_WINDOW_BYTES};
use super::traceback::{self, Frame};
use mainstay_model::entry::LineTime;

/// Sightings kept per signature and source: this many of the first, and this many of the last.
const MAX_SIGHTINGS: usize = 16;
/// Maximum distance in lines between "Exception ignored" and its exception.
const MAX_IGNORED_DISTANCE: u64 = 60;
/// Sightings after which a signature is ignored in a source.
const MAX_CHECKED_SIGHTINGS: usize = 4096;
/// Maximum number of distinct ranks. A text that names more is no log.
const MAX_RANKS: usize = 131_072;
/// An unfinished line is buffered up to this size, then processed in pieces.
const MAX_UNFINISHED_BYTES: usize = 64 * 1024;
/// The rest of a line that is longer than this is skipped: it is no message of a program. Progress bars write over their line,
/// and so a carriage return ends one too.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum size of a source that is read a second time with its lines joined, against wrapped text.
const MAX_JOINED_BYTES: usize = 64 * 1024;
/// Characters of a line that are kept for quoting.
const MAX_QUOTE_CHARS: usize = 400;

/// Reads one source.
pub struct Scan<'c> {
    catalog: &'c Catalog,
    findings: Findings,
    sighting_index: BTreeMap<usize, usize>,
    frames: BTreeMap<Option<u32>, (u64, Frame)>,
    /// When each line was written, if known.
    times: &'c [LineTime],
    /// The newest sightings of signatures, once there are more than the first ones kept.
    last_spots: BTreeMap<usize, VecDeque<RelevantLine>>,
    /// The line that announces an ignored exception, and the lines of such exceptions.
    ignored: Option<u64>,
    ignored_lines: BTreeSet<u64>,
    steps: CompletedSteps,
    /// The newest exceptions, once there are more than the first ones kept.
    last_exceptions: VecDeque<Exception>,
    /// The rank in the last row of the launcher's table that names one, and its line.
    table: Option<(u64, u32)>,
    /// Whether a label before lines differed from the rank in the same line: it numbers something else.
    labels_mislead: bool,
    /// The first line of the newest traceback, and its last frame so far.
    traceback: Option<u64>,
    last_frame: Option<LastFrame>,
    /// Tracebacks that a logger wrote below its own message.
    caught: Caught,
    /// The rank of a frame whose source text is expected in the next line.
    source_of: Option<Option<u32>>,
    /// The current line is source text that a warning quotes.
    quotes_a_warning: bool,
    unfinished: Vec<u8>,
    /// Bytes of the current line that were examined, and whether its rest is skipped.
    of_line: usize,
    skips: bool,
    plain: Vec<u8>,
    small: Vec<u8>,
    words: Vec<usize>,
}

impl<'c> Scan<'c> {
    /// Starts a scan of one source.
    pub fn new(catalog: &'c Catalog, source: &str, rank: Option<u32>, kind: Kind) -> Scan<'c> {
        Scan {
            catalog,
            findings: Findings { source: source.to_owned(), rank, kind, ..Findings::default() },
            sighting_index: BTreeMap::new(),
            frames: BTreeMap::new(),
            times: &[],
            last_spots: BTreeMap::new(),
            ignored: None,
            ignored_lines: BTreeSet::new(),
            steps: CompletedSteps::default(),
            last_exceptions: VecDeque::new(),
            table: None,
            labels_mislead: false,
            traceback: None,
            last_frame: None,
            caught: Caught::default(),
            source_of: None,
            quotes_a_warning: false,
            unfinished: Vec::new(),
            of_line: 0,
            skips: false,
            plain: Vec::new(),
            small: Vec::new(),
            words: Vec::new(),
        }
    }

    /// Scans a whole text at once.
    pub fn of_text(
        catalog: &'c Catalog,
        source: &str,
        rank: Option<u32>,
        kind: Kind,
        text: &[u8],
    ) -> Findings {
        let mut scan = Scan::new(catalog, source, rank, kind);
        scan.feed(text);
        scan.finish()
    }

    /// Scans the last lines of a rank's output. `times` holds when each line was written; it is as long as `lines`, or empty if
    /// unknown.
    pub fn of_lines(
        catalog: &'c Catalog,
        source: &str,
        rank: Option<u32>,
        lines: &[String],
        times: &'c [LineTime],
    ) -> Findings {
        let mut scan = Scan::new(catalog, source, rank, Kind::Log);
        scan.times = times;
        scan.feed(lines.join("\n").as_bytes());
        scan.finish()
    }

    /// Processes the next piece, which may end anywhere.
    pub fn feed(&mut self, piece: &[u8]) {
        self.findings.bytes += piece.len() as u64;
        if self.findings.bytes <= MAX_JOINED_BYTES as u64 {
            self.small.extend_from_slice(piece);
        }
        let mut rest = piece;
        if self.skips {
            let Some(end) = memchr::memchr2(b'\n', b'\r', rest) else { return };
            rest = &rest[end..];
            self.skips = false;
        }
        if !self.unfinished.is_empty() {
            let end = memchr::memchr(b'\n', rest).map_or(rest.len(), |at| at + 1);
            self.unfinished.extend_from_slice(&rest[..end]);
            rest = &rest[end..];
            if self.unfinished.ends_with(b"\n") || self.unfinished.len() > MAX_UNFINISHED_BYTES {
                let line = std::mem::take(&mut self.unfinished);
                self.part(&line);
            }
        }
        let end = match memchr::memrchr(b'\n', rest) {
            Some(at) => at + 1,
            None if rest.len() > MAX_UNFINISHED_BYTES => rest.len(),
            None => 0,
        };
        self.part(&rest[..end]);
        self.unfinished.extend_from_slice(&rest[end..]);
    }

    /// Examines a block that may end within a line.
    fn part(&mut self, block: &[u8]) {
        self.block(block);
        self.of_line = match memchr::memrchr2(b'\n', b'\r', block) {
            Some(end) => block.len() - end - 1,
            None => self.of_line + block.len(),
        };
        self.skips = self.of_line > MAX_LINE_BYTES;
    }

    /// Ends the text and returns the findings.
    pub fn finish(mut self) -> Findings {
        let mut last = std::mem::take(&mut self.unfinished);
        if !last.is_empty() {
            last.push(b'\n');
            self.block(&last);
        }
        self.findings.exceptions.extend(std::mem::take(&mut self.last_exceptions));
        for (index, spots) in std::mem::take(&mut self.last_spots) {
            self.findings.sightings[index].spots.extend(spots);
        }
        self.caught.free_last_words(&mut self.findings);
        self.drop_misleading_labels();
        if self.findings.bytes <= MAX_JOINED_BYTES as u64 {
            let text = std::mem::take(&mut self.small);
            self.joined(&text);
        }
        place_in_progress(&mut self.findings, self.times);
        self.findings
    }

    fn block(&mut self, block: &[u8]) {
        if block.is_empty() {
            return;
        }
        if memchr::memchr(0x1b, block).is_none() {
            self.plain_block(block);
        } else {
            let mut plain = std::mem::take(&mut self.plain);
            lines::without_colours(block, &mut plain);
            self.plain_block(&plain);
            self.plain = plain;
        }
    }

    /// Finds the words of all signatures and examines the lines that contain some.
    fn plain_block(&mut self, block: &[u8]) {
        let catalog = self.catalog;
        let (mut counted, mut start, mut end) = (0, 0, 0);
        let first_line = self.findings.lines + 1;
        self.steps.block_starts();
        self.source_below(block);
        self.look_below_frame(block, self.findings.lines + 1);
        for (word, at) in catalog.hits(block) {
            if PROGRESS.contains(&word) && (self.steps.skips(at) || self.findings.kind != Kind::Log) {
                self.steps.skip(at, &self.findings);
                continue;
            }
            if at >= end {
                self.look_at(block, start, end);
                let least = end;
                Range { start, end } = line_around(block, at, least);
                if let Some(record) = folded::record(block, least, &(start..end)) {
                    Range { start, end } = record;
                }
                self.findings.lines += newlines(&block[counted..start]);
                counted = start;
                let quoted = |line: &str| level::is_python_warning(line);
                self.quotes_a_warning = block[start] == b' ' && follows(&block[..start], quoted);
                if is_traceback(&block[start..end]) {
                    let number = self.findings.lines + 1;
                    self.traceback = Some(number);
                    self.caught.traceback_starts(&block[..start], &block[start..end], number);
                }
            }
            if PROGRESS.contains(&word) {
                self.steps.line(&block[start..end], end, &mut self.findings);
                continue;
            }
            self.words.push(word);
        }
        self.look_at(block, start, end);
        self.findings.lines += newlines(&block[counted..]);
        self.steps.block_ends(block, &mut self.findings);
        self.caught.look_for_life(block, first_line);
    }

    /// Examines a line of the block, and the lines below it if it is a frame.
    fn look_at(&mut self, block: &[u8], start: usize, end: usize) {
        let line = block.get(start..end).unwrap_or_default();
        let is_record = !self.words.is_empty() && folded::record(block, start, &(start..end)).is_some();
        match is_record.then(|| folded::lines(line)).flatten() {
            Some(text) => {
                self.words.clear();
                self.take_record(&text);
            }
            None => self.scan_line(line),
        }
        let below = block.get(end + 1..).unwrap_or_default();
        self.source_below(below);
        if self.last_frame.is_some() {
            self.look_below_frame(below, self.findings.lines + 2);
        }
    }

    /// Takes over what the lines of a record show, all at the line of the record.
    fn take_record(&mut self, text: &str) {
        let number = self.findings.lines + 1;
        let findings_of_text =
            Scan::of_text(self.catalog, "", self.findings.rank, self.findings.kind, text.as_bytes());
        for sighting in findings_of_text.sightings {
            for mut spot in sighting.spots {
                spot.line = number;
                self.note(sighting.signature, &spot);
            }
        }
        for mut exception in findings_of_text.exceptions {
            exception.spot.line = number;
            self.keep_exception(exception);
        }
        self.findings.in_table.extend(findings_of_text.in_table);
    }

    /// Examines a line that contains some of the words.
    fn scan_line(&mut self, raw: &[u8]) {
        if self.words.is_empty() {
            return;
        }
        let mut words = std::mem::take(&mut self.words);
        words.sort_unstable();
        words.dedup();
        let worthwhile = words.iter().any(|word| {
            *word < STRUCTURE.len()
                || self
                    .catalog
                    .signatures_by_word(*word)
                    .iter()
                    .any(|signature| self.sighting_count(*signature) < MAX_CHECKED_SIGHTINGS as u64)
        });
        if worthwhile {
            let number = self.findings.lines + 1;
            let line = lines::clean(raw);
            self.labels_mislead |= lines::prefix(&line).label_differs;
            if self.is_ignored(&line, number) {
                words.clear();
                self.words = words;
                return;
            }
            let known =
                !self.is_program_text(&line, number) && self.signatures_of(&line, number, &words, false);
            if words.first().is_some_and(|word| *word < STRUCTURE.len()) {
                self.structure_of(&line, number, known);
            }
        }
        words.clear();
        self.words = words;
    }

    /// Whether the line is source text that a traceback quotes below a frame, and no message of the run.
    fn is_program_text(&self, line: &str, number: u64) -> bool {
        let prefix = lines::prefix(line);
        let rank = prefix.rank.or(self.findings.rank);
        let below = self.frames.get(&rank).is_some_and(|(at, _)| at + 1 == number);
        let text = &line[prefix.len..];
        // Abridged tracebacks lack the source text: `acme.errors.FrobError: gone` is no program text.
        let is_exception = || traceback::raised(text).is_some_and(|raised| !raised.embedded);
        below && text.starts_with(|first: char| !first.is_ascii_uppercase()) && !is_exception()
    }

    /// Whether the line is an exception that Python ignored during cleanup. Such an exception ends nothing.
    fn is_ignored(&mut self, line: &str, number: u64) -> bool {
        let Some(at) = self.ignored.filter(|at| number > *at) else { return false };
        if number - at > MAX_IGNORED_DISTANCE {
            self.ignored = None;
            return false;
        }
        let is_exception = traceback::raised(&line[lines::prefix(line).len..]).is_some();
        if is_exception {
            self.ignored = None;
            self.ignored_lines.extend(at..=number);
        }
        is_exception
    }

    fn sighting_count(&self, signature: usize) -> u64 {
        self.sighting_index.get(&signature).map_or(0, |index| self.findings.sightings[*index].count)
    }

    /// Records each signature that the line matches. Returns whether one explains the line.
    fn signatures_of(&mut self, line: &str, number: u64, words: &[usize], only_new: bool) -> bool {
        let mut candidates: Vec<usize> =
            words.iter().flat_map(|word| self.catalog.signatures_by_word(*word).iter().copied()).collect();
        candidates.sort_unstable();
        candidates.dedup();
        let xid = words.contains(&XID);
        if candidates.is_empty() && !xid {
            return false;
        }
        let lower = line.to_ascii_lowercase();
        candidates.retain(|index| self.catalog.confirms(*index, &lower));
        if xid {
            candidates.extend(self.catalog.xids_in(&lower));
        }
        if only_new {
            candidates.retain(|index| !self.sighting_index.contains_key(index));
        }
        if candidates.is_empty() {
            return false;
        }
        if healthy::reports_no_fault(line) {
            return true;
        }
        if xid {
            self.catalog.weigh_xid(line, &mut candidates);
            if candidates.is_empty() {
                return true;
            }
        }
        // A line that healthy runs print matches nothing else.
        let benign = |index: &usize| self.catalog.signatures()[*index].role == Role::Benign;
        if candidates.iter().any(benign) {
            candidates.retain(benign);
        }
        let spot = self.spot(line, number);
        let explained = candidates.iter().any(|index| self.catalog.explains(*index));
        for index in candidates {
            self.note(index, &spot);
        }
        explained
    }

    fn note(&mut self, signature: usize, spot: &RelevantLine) {
        let sightings = &mut self.findings.sightings;
        let index = *self.sighting_index.entry(signature).or_insert_with(|| {
            sightings.push(SignatureMatch { signature, spots: Vec::new(), count: 0, ranks: BTreeSet::new() });
            sightings.len() - 1
        });
        let sighting = &mut sightings[index];
        sighting.count += 1 + lines::repeated_elsewhere(&spot.text);
        if sighting.ranks.len() < MAX_RANKS {
            sighting.ranks.extend(spot.rank);
        }
        if sighting.spots.len() < MAX_SIGHTINGS {
            sighting.spots.push(spot.clone());
            return;
        }
        let last = self.last_spots.entry(index).or_default();
        if last.len() == MAX_SIGHTINGS {
            last.pop_front();
        }
        last.push_back(spot.clone());
    }

    fn spot(&self, line: &str, number: u64) -> RelevantLine {
        let prefix = lines::prefix(line);
        let elsewhere = || self.findings.rank.or_else(|| self.in_table(line, number));
        let rank = prefix.rank.or_else(|| lines::rank_in(line)).or_else(elsewhere);
        let own = prefix.rank.filter(|_| !prefix.by_label);
        let rank_without_label = own.or_else(|| lines::rank_called_so(line)).or_else(elsewhere);
        let text: String = line.trim().chars().take(MAX_QUOTE_CHARS).collect();
        let mild = self.findings.kind == Kind::Log && (self.quotes_a_warning || level::is_mild(line));
        let logged = self.caught.has(number, prefix.rank);
        let time = lines::time_of_day(line);
        let (line_time, steps_after, stepped) = (None, None, false);
        RelevantLine {
            line: number,
            rank,
            rank_without_label,
            time,
            mild,
            line_time,
            steps_after,
            stepped,
            logged,
            text,
        }
    }
}

/// Whether the line before satisfies `is`.
fn follows(before: &[u8], is: impl Fn(&str) -> bool) -> bool {
    let before = before.strip_suffix(b"\n").unwrap_or(before);
    let begin = memchr::memrchr(b'\n', before).map_or(0, |at| at + 1);
    let begin = begin.max(before.len().saturating_sub(LINE_WINDOW_BYTES));
    is(&lines::clean(&before[begin..]))
}

/// The line that contains an offset: from `least` on, and limited to the window on either side.
fn line_around(block: &[u8], at: usize, least: usize) -> Range<usize> {
    let from = least.max(at.saturating_sub(LINE_WINDOW_BYTES));
    let start = memchr::memrchr(b'\n', &block[from..at]).map_or(from, |newline| from + newline + 1);
    let until = block.len().min(at + LINE_WINDOW_BYTES);
    let end = memchr::memchr(b'\n', &block[at..until]).map_or(until, |newline| at + newline);
    start..end
}

fn newlines(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}
