//! Lines that report a completed step. A long log has millions of them: the first ones, some between, and the last ones are noted.

use std::ops::Range;

use super::{Progress, Scan, line_around, newlines};
use crate::failure::attribution::{lines, progress};

/// Progress lines that are all noted; after them one in so many bytes is.
const PROGRESS_LINES: usize = 256;
const PROGRESS_STRIDE: usize = 64 * 1024;
/// Places of words of progress that are remembered at the end of a block: its last steps are noted whatever the stride.
const PROGRESS_LAST: usize = 64;
/// The most progress lines that are kept at a time.
const PROGRESS_KEPT: usize = 65_536;

impl Scan<'_> {
    /// A word of progress at this place of the block is not looked at now; the last ones of the block are, at its end.
    pub(super) fn pass_over_progress(&mut self, at: usize) {
        if self.findings.progress.len() >= PROGRESS_LINES {
            if self.passed_over.len() == PROGRESS_LAST {
                self.passed_over.pop_front();
            }
            self.passed_over.push_back(at);
        }
    }

    /// Notes the last lines of a block that were passed over and report a completed step.
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

    /// Notes a line that reports a completed step.
    pub(super) fn progress_in(&mut self, raw: &[u8], end: usize) {
        if self.note_progress(raw, self.findings.lines + 1) && self.findings.progress.len() >= PROGRESS_LINES
        {
            self.no_progress_until = end + PROGRESS_STRIDE;
        }
    }

    /// Whether the line reported a completed step and was noted.
    fn note_progress(&mut self, raw: &[u8], number: u64) -> bool {
        let line = lines::clean(raw);
        if !progress::is_progress(&line) {
            return false;
        }
        if self.findings.progress.len() >= PROGRESS_KEPT {
            // The newest are worth most: of the older ones every second goes.
            let mut keep = false;
            self.findings.progress.retain(|_| {
                keep = !keep;
                keep
            });
        }
        let (time, step) = (lines::time_of_day(&line), progress::step_of(&line));
        self.findings.progress.push(Progress { line: number, time, step });
        true
    }
}
