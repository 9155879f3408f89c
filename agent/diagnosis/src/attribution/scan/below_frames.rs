//! Exceptions whose names do not look like exceptions, such as `Stalled: no batch for 60 s`. They are recognized by position: the first
//! unindented line below the frames of a traceback.

use super::super::lines;
use super::super::traceback;
use super::Scan;

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
    /// Notes that the line is a frame of a traceback.
    pub(super) fn frame_seen(&mut self, rank: Option<u32>, number: u64) {
        let inside = self
            .traceback
            .is_some_and(|started| number >= started && number - started <= MAX_TRACEBACK_LINES);
        self.last_frame = inside.then_some(LastFrame { rank, looked_at: 0 });
    }

    /// Searches the exception in the lines below the last frame; `below` starts at line `number`. If the text ends first, the search
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
