//! Lines that report a completed step. A long log has millions of them: the scan records the first ones, samples, and the last ones.

use std::ops::Range;

use super::{Progress, Scan, line_around, newlines};
use crate::attribution::{lines, progress};

/// Up to this many progress lines are all recorded; after that, one per stride of bytes.
const MAX_DENSE_LINES: usize = 256;
const STRIDE_BYTES: usize = 64 * 1024;
/// Offsets of progress words that are remembered until the end of a block, so that its last steps are recorded regardless of the
/// stride.
const MAX_LAST_OFFSETS: usize = 64;
/// Maximum number of progress lines kept.
const MAX_PROGRESS_LINES: usize = 65_536;

impl Scan<'_> {
    /// Skips a progress word at this offset of the block. The last ones of the block are examined at its end.
    pub(super) fn pass_over_progress(&mut self, at: usize) {
        if self.findings.progress.len() >= MAX_DENSE_LINES {
            if self.passed_over.len() == MAX_LAST_OFFSETS {
                self.passed_over.pop_front();
            }
            self.passed_over.push_back(at);
        }
    }

    /// Records the last skipped lines of a block that report a completed step.
    pub(super) fn last_progress_in(&mut self, block: &[u8]) {
        let sighting_index = std::mem::take(&mut self.passed_over);
        for at in sighting_index {
            let Range { start, end } = line_around(block, at, 0);
            let number = self.findings.lines + 1 - newlines(&block[start..]);
            if self.findings.progress.last().is_some_and(|last| last.line < number) {
                self.note_progress(&block[start..end], number);
            }
        }
    }

    /// Records a line that reports a completed step.
    pub(super) fn progress_in(&mut self, raw: &[u8], end: usize) {
        if self.note_progress(raw, self.findings.lines + 1) && self.findings.progress.len() >= MAX_DENSE_LINES
        {
            self.no_progress_until = end + STRIDE_BYTES;
        }
    }

    /// Returns whether the line reports a completed step and was recorded.
    fn note_progress(&mut self, raw: &[u8], number: u64) -> bool {
        let line = lines::clean(raw);
        if !progress::is_progress(&line) {
            return false;
        }
        if self.findings.progress.len() >= MAX_PROGRESS_LINES {
            // The newest are the most useful: drop every second one of the older ones.
            let mut keep = false;
            self.findings.progress.retain(|_| {
                keep = !keep;
                keep
            });
        }
        let (rank, time) = (lines::prefix(&line).rank, lines::time_of_day(&line));
        self.findings.progress.push(Progress { line: number, rank, time, step: progress::step_of(&line) });
        true
    }
}
