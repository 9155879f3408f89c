//! Lines that report a completed step. A long log has millions of them: the scan records the first ones, samples, and the last ones.

use std::ops::Range;

use super::{Progress, Scan, line_around, newlines};
use crate::attribution::{lines, progress};

/// Up to this many progress lines are all recorded; after that, one per stride of bytes.
const PROGRESS_LINES: usize = 256;
const PROGRESS_STRIDE: usize = 64 * 1024;
/// Offsets of progress words that are remembered until the end of a block, so that its last steps are recorded regardless of the
/// stride.
const PROGRESS_LAST: usize = 64;
/// Maximum number of progress lines kept.
const PROGRESS_KEPT: usize = 65_536;

impl Scan<'_> {
    /// Skips a progress word at this offset of the block. The last ones of the block are examined at its end.
    pub(super) fn pass_over_progress(&mut self, at: usize) {
        if self.findings.progress.len() >= PROGRESS_LINES {
            if self.passed_over.len() == PROGRESS_LAST {
                self.passed_over.pop_front();
            }
            self.passed_over.push_back(at);
        }
    }

    /// Records the last skipped lines of a block that report a completed step.
    pub(super) fn last_progress_in(&mut self, block: &[u8]) {
        let places = std::mem::take(&mut self.passed_over);
        for at in places {
            let Range { start, end } = line_around(block, at, 0);
            let number = self.findings.lines + 1 - newlines(&block[start..]);
            if self.findings.progress.last().is_some_and(|last| last.line < number) {
                self.note_progress(&block[start..end], number);
            }
        }
    }

    /// Records a line that reports a completed step.
    pub(super) fn progress_in(&mut self, raw: &[u8], end: usize) {
        if self.note_progress(raw, self.findings.lines + 1) && self.findings.progress.len() >= PROGRESS_LINES
        {
            self.no_progress_until = end + PROGRESS_STRIDE;
        }
    }

    /// Returns whether the line reports a completed step and was recorded.
    fn note_progress(&mut self, raw: &[u8], number: u64) -> bool {
        let line = lines::clean(raw);
        if !progress::is_progress(&line) {
            return false;
        }
        if self.findings.progress.len() >= PROGRESS_KEPT {
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
