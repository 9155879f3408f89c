//! Lines that report a completed step. A long log has millions of them: the scan records the first ones, samples, and the last ones.

use std::collections::VecDeque;
use std::ops::Range;

use super::{Findings, Progress, line_around, newlines};
use crate::attribution::{lines, progress};

/// Up to this many progress lines are all recorded; after that, one per stride of bytes.
const MAX_DENSE_LINES: usize = 256;
const STRIDE_BYTES: usize = 64 * 1024;
/// Offsets of progress words that are remembered until the end of a block, so that its last steps are recorded regardless of the
/// stride.
const MAX_LAST_OFFSETS: usize = 64;
/// Maximum number of progress lines kept.
const MAX_PROGRESS_LINES: usize = 65_536;

/// The progress lines of a source that are examined.
#[derive(Default)]
pub(super) struct CompletedSteps {
    /// Progress words before this offset of the block are skipped.
    skip_until: usize,
    /// The last offsets of progress words in the block that were skipped.
    skipped: VecDeque<usize>,
}

impl CompletedSteps {
    /// A block starts.
    pub(super) fn block_starts(&mut self) {
        self.skip_until = 0;
    }

    /// Whether the progress word at this offset of the block is skipped.
    pub(super) fn skips(&self, at: usize) -> bool {
        at < self.skip_until
    }

    /// Skips a progress word at this offset of the block. The last ones of the block are examined at its end.
    pub(super) fn skip(&mut self, at: usize, findings: &Findings) {
        if findings.progress.len() >= MAX_DENSE_LINES {
            if self.skipped.len() == MAX_LAST_OFFSETS {
                self.skipped.pop_front();
            }
            self.skipped.push_back(at);
        }
    }

    /// Records the last skipped lines of a block that report a completed step.
    pub(super) fn block_ends(&mut self, block: &[u8], findings: &mut Findings) {
        for at in std::mem::take(&mut self.skipped) {
            let Range { start, end } = line_around(block, at, 0);
            let number = findings.lines + 1 - newlines(&block[start..]);
            if findings.progress.last().is_some_and(|last| last.line < number) {
                record(&block[start..end], number, findings);
            }
        }
    }

    /// Records a line, which ends at this offset of the block, if it reports a completed step.
    pub(super) fn line(&mut self, raw: &[u8], end: usize, findings: &mut Findings) {
        let is_recorded = record(raw, findings.lines + 1, findings);
        let is_dense = findings.progress.len() < MAX_DENSE_LINES;
        self.skip_until = if is_recorded && !is_dense { end + STRIDE_BYTES } else { end };
    }
}

/// Returns whether the line reports a completed step and was recorded.
fn record(raw: &[u8], number: u64, findings: &mut Findings) -> bool {
    let line = lines::clean(raw);
    if !progress::is_progress(&line) {
        return false;
    }
    if findings.progress.len() >= MAX_PROGRESS_LINES {
        // The newest are the most useful: drop every second one of the older ones.
        let mut keep = false;
        findings.progress.retain(|_| {
            keep = !keep;
            keep
        });
    }
    let (rank, time) = (lines::prefix(&line).rank, lines::time_of_day(&line));
    findings.progress.push(Progress { line: number, rank, time, step: progress::step_of(&line) });
    true
}
