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
/// Lines between a frame and the exception: the source text and the marks under it.
const MAX_LINES_BELOW: usize = 8;
/// Maximum distance in lines between a frame and the start of its traceback.
const MAX_TRACEBACK_LINES: u64 = 2000;

/// The last frame of a traceback, below which its exception is expected.
#[derive(Clone, Copy, Debug)]
pub(super) struct LastFrame {
    rank: Option<u32>,
    /// Lines below it that were examined.
    looked_at: usize,
}

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

    /// Notes that the line is a frame of a traceback.
    pub(super) fn frame_seen(&mut self, rank: Option<u32>, number: u64) {
        let inside = self
            .traceback
            .is_some_and(|started| number >= started && number - started <= MAX_TRACEBACK_LINES);
        self.last_frame = inside.then_some(LastFrame { rank, looked_at: 0 });
    }

    /// Searches the exception in the lines below the last frame, of any name, such as `Stalled: no batch for 60 s`: it is the first line
    /// there without indent. `below` starts at line `number`. If the text ends first, the search
    /// continues in the next block.
    pub(super) fn look_below_frame(&mut self, below: &[u8], number: u64) {
        let Some(mut last) = self.last_frame.take() else { return };
        let complete = below.strip_suffix(b"\n").unwrap_or(below);
        if complete.is_empty() {
            self.last_frame = Some(last);
            return;
        }
        for (number, raw) in (number..).zip(complete.split(|byte| *byte == b'\n')) {
            last.looked_at += 1;
            if last.looked_at > MAX_LINES_BELOW {
                return;
            }
            let line = lines::clean(raw);
            let prefix = lines::prefix(&line);
            let text = line[prefix.len..].trim_end();
            let of_another = prefix.rank.or(self.findings.rank) != last.rank;
            // One space may separate the launcher's prefix from the text.
            let is_indented = line[..prefix.len].ends_with("  ");
            if of_another || text.is_empty() || is_indented {
                continue;
            }
            if let Some(raised) = traceback::raised_below_frames(text) {
                self.note_exception(&line, number, &raised, false);
            }
            self.traceback = None;
            return;
        }
        self.last_frame = Some(last);
    }

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

#[cfg(test)]
mod tests {
    use super::super::{Kind, Scan};
    use crate::attribution::catalog::Catalog;

    const TRACEBACK: &str = "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    stall()\n    ^^^^^^^\n";

    fn exceptions(text: &str) -> Vec<(String, u64, bool)> {
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let in_pieces = |pieces: &mut dyn Iterator<Item = &str>| -> Vec<(String, u64, bool)> {
            let mut scan = Scan::new(catalog, "log", None, Kind::Log);
            pieces.for_each(|piece| scan.feed(piece.as_bytes()));
            let found = scan.finish().exceptions.into_iter();
            found.map(|exception| (exception.name, exception.spot.line, exception.frame.is_some())).collect()
        };
        let whole = in_pieces(&mut std::iter::once(text));
        assert_eq!(in_pieces(&mut text.split_inclusive('\n')), whole, "the same in whatever pieces it comes");
        whole
    }

    #[test]
    fn an_exception_of_any_name_is_found_below_the_frames_of_a_traceback() {
        let found = |name: &str, line| vec![(name.to_owned(), line, true)];
        assert_eq!(exceptions(&format!("{TRACEBACK}acme.Stalled: no batch\n")), found("acme.Stalled", 5));
        assert_eq!(exceptions(&format!("step 1\n{TRACEBACK}Stalled\nstep 2\n")), found("Stalled", 6));
        assert_eq!(exceptions(&format!("{TRACEBACK}ValueError: bad\n")), found("ValueError", 5), "once");
    }

    #[test]
    fn lines_of_other_ranks_in_between_are_skipped() {
        let of_rank = |rank, text: &str| -> Vec<String> {
            text.lines().map(|line| format!("[rank{rank}]: {line}\n")).collect()
        };
        let mut lines = of_rank(0, TRACEBACK);
        lines.push("[rank1]: Epoch: 3\n".to_owned());
        lines.extend(of_rank(0, "Stalled: no batch\n"));
        assert_eq!(exceptions(&lines.concat()), [("Stalled".to_owned(), 6, true)]);
    }

    #[test]
    fn stacks_without_an_exception_and_log_lines_below_one_are_ignored() {
        let stack = TRACEBACK.split_once('\n').map_or("", |(_, frames)| frames);
        assert_eq!(exceptions(&format!("{stack}Epoch: 3\n")), []);
        assert_eq!(exceptions(&format!("{TRACEBACK}INFO: started again\n")), []);
        assert_eq!(exceptions(&format!("{TRACEBACK}step: 4\n")), []);
    }
}
