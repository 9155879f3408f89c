//! Tracebacks in a log: frames, exceptions, the line above them, and the launcher's table that names ranks.

use std::collections::BTreeSet;

use super::{Exception, LINE_WINDOW_BYTES, MAX_RANKS, Scan, SignatureMatch};
use crate::attribution::lines;
use crate::attribution::traceback::{self, Raised};

/// Exceptions kept per source: this many of the first, and this many of the last.
const MAX_EXCEPTIONS: usize = 128;
/// Rows of a rank in the launcher's table.
const TABLE_ROWS: u64 = 4;
/// Maximum distance in lines between a traceback's last frame and its exception.
const MAX_FRAME_DISTANCE: u64 = 12;
/// The signature of a task that srun reports as ended.
const TASK_EXIT: &str = "srun.task_exit";
/// How Python starts a traceback.
const TRACEBACK: &[u8] = b"Traceback (most recent";

impl Scan<'_> {
    /// The rank of the launcher's table whose rows contain the line: `  exitcode  : -9`, below `  rank      : 4`.
    pub(super) fn in_table(&self, line: &str, number: u64) -> Option<u32> {
        let (at, rank) = self.table?;
        // Below the label of `srun --label`.
        let line = line.trim_start_matches(|letter: char| letter.is_ascii_digit()).trim_start_matches(':');
        let row = line.starts_with(' ') || line.starts_with("exitcode") || line.starts_with("traceback");
        (row && line.contains(':') && number > at && number - at <= TABLE_ROWS).then_some(rank)
    }

    /// Records frames and exceptions.
    pub(super) fn structure_of(&mut self, line: &str, number: u64, known: bool) {
        if line.contains("Exception ignored in") {
            self.ignored = Some(number);
            return;
        }
        if line.contains("(local_rank:") {
            let prefix = lines::prefix(line);
            let text = &line[prefix.len..];
            let rank = lines::rank_in(text).or_else(|| lines::rank_at_start(text));
            self.table = rank.map(|rank| (number, rank));
            self.labels_mislead |= prefix.by_label && rank.is_some() && rank != prefix.rank;
            if self.findings.in_table.len() < MAX_RANKS {
                self.findings.in_table.extend(rank);
            }
            return;
        }
        let prefix = lines::prefix(line);
        let rank = prefix.rank.or(self.findings.rank);
        let text = &line[prefix.len..];
        if let Some(frame) = traceback::frame(text) {
            if self.frames.len() >= MAX_RANKS {
                self.frames.clear();
            }
            let same_traceback = |at: u64| {
                number.saturating_sub(at) <= MAX_FRAME_DISTANCE
                    && self.traceback.is_none_or(|start| at > start)
            };
            let caller = self.frames.get(&rank).filter(|(at, _)| same_traceback(*at));
            let frame = frame.called_by(caller.map(|(_, caller)| caller));
            self.frames.insert(rank, (number, frame));
            self.source_of = Some(rank);
            self.frame_seen(rank, number);
            return;
        }
        if let Some(raised) = traceback::raised(text) {
            self.note_exception(line, number, &raised, known);
        }
    }

    /// Reads the source text of the last frame from the line below it, if that is known already.
    pub(super) fn source_below(&mut self, below: &[u8]) {
        let Some(rank) = self.source_of.filter(|_| !below.is_empty()) else { return };
        self.source_of = None;
        let raw = below.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let line = lines::clean(&raw[..raw.len().min(LINE_WINDOW_BYTES)]);
        let prefix = lines::prefix(&line);
        let text = &line[prefix.len..];
        let is_source = prefix.rank.or(self.findings.rank) == rank
            && line[..prefix.len].ends_with("    ")
            && traceback::frame(text).is_none();
        if let Some((_, frame)) = self.frames.get_mut(&rank).filter(|_| is_source) {
            frame.raises = Some(text.starts_with("raise "));
        }
    }

    pub(super) fn note_exception(&mut self, line: &str, number: u64, raised: &Raised<'_>, known: bool) {
        let of_line = lines::prefix(line).rank;
        let rank = of_line.or(self.findings.rank);
        let frame = self
            .frames
            .get(&rank)
            .filter(|(at, _)| !raised.embedded && number.saturating_sub(*at) <= MAX_FRAME_DISTANCE)
            .map(|(_, frame)| frame.clone());
        self.caught.raised(number, of_line);
        let exception = Exception {
            name: raised.name.to_owned(),
            spot: self.spot(line, number),
            frame,
            embedded: raised.embedded,
            known,
        };
        self.keep_exception(exception);
    }

    pub(super) fn keep_exception(&mut self, exception: Exception) {
        if self.findings.exceptions.len() < MAX_EXCEPTIONS {
            self.findings.exceptions.push(exception);
            return;
        }
        if self.last_exceptions.len() == MAX_EXCEPTIONS {
            self.last_exceptions.pop_front();
        }
        self.last_exceptions.push_back(exception);
    }
}

impl Scan<'_> {
    /// Whether ranks raised exceptions and only tasks with other numbers ended with an error: a task runs several ranks.
    fn tasks_mislead(&self) -> bool {
        let raised: BTreeSet<u32> = self
            .findings
            .exceptions
            .iter()
            .filter_map(|exception| exception.spot.rank_without_label)
            .collect();
        let is_exit = |sighting: &&SignatureMatch| {
            self.catalog
                .signatures()
                .get(sighting.signature)
                .is_some_and(|signature| signature.id == TASK_EXIT)
        };
        let mut ended = self
            .findings
            .sightings
            .iter()
            .filter(is_exit)
            .flat_map(|sighting| sighting.ranks.iter())
            .peekable();
        !raised.is_empty() && ended.peek().is_some() && !ended.any(|task| raised.contains(task))
    }

    /// Where labels have differed from ranks, such as those of `srun --label` around torchrun, no label is a rank.
    pub(super) fn drop_misleading_labels(&mut self) {
        if !self.labels_mislead && !self.tasks_mislead() {
            return;
        }
        let spots = self.findings.sightings.iter_mut().flat_map(|sighting| &mut sighting.spots);
        let spots = spots.chain(self.findings.exceptions.iter_mut().map(|exception| &mut exception.spot));
        spots.for_each(|spot| spot.rank = spot.rank_without_label);
        for sighting in &mut self.findings.sightings {
            sighting.ranks = sighting.spots.iter().filter_map(|spot| spot.rank).collect();
        }
    }
}

/// The line above a traceback that shows where it comes from. Skips separators between that line and a worker's traceback.
pub(super) fn above_traceback(before: &[u8]) -> Option<String> {
    let lines = before.strip_suffix(b"\n")?.rsplit(|byte| *byte == b'\n').take(4);
    let text = |line: &[u8]| {
        let line = lines::clean(&line[line.len().saturating_sub(LINE_WINDOW_BYTES)..]).into_owned();
        let text = line[lines::prefix(&line).len..].trim();
        let passes = text.is_empty() || text == "\"\"\"" || text.ends_with("RemoteTraceback:");
        (!passes).then_some(line)
    };
    lines.filter_map(text).next()
}

/// Whether the line joins two tracebacks of one exception.
pub(super) fn is_chain(line: &str) -> bool {
    line.contains("the direct cause of the following")
        || line.contains("During handling of the above exception")
}

/// Whether the line starts a Python traceback.
pub(super) fn is_traceback(line: &[u8]) -> bool {
    line.windows(TRACEBACK.len()).any(|window| window == TRACEBACK)
}
