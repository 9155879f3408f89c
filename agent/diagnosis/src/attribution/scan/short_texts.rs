//! The second reading of a small source: lines joined with the next, and hints from unexplained lines.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::super::healthy;
use super::super::level;
use super::super::lines::{self, LINE_WINDOW_BYTES};
use super::super::traceback;
use super::super::xids::XidWeight;
use super::Scan;
use super::findings::MIN_HEALTHY_STEPS;
use super::steps::steps_after;

impl Scan<'_> {
    /// Reads a small text again, each line joined with the next: a message may be wrapped anywhere.
    pub(super) fn joined(&mut self, text: &[u8]) {
        let mut plain = Vec::new();
        lines::without_colours(text, &mut plain);
        let lines: Vec<Cow<'_, str>> = plain.split(|byte| *byte == b'\n').map(lines::clean).collect();
        for (at, pair) in lines.windows(2).enumerate() {
            let (first, second) = (pair[0].trim_end(), pair[1].trim());
            if first.is_empty() || second.is_empty() || first.len() + second.len() > 2 * LINE_WINDOW_BYTES {
                continue;
            }
            let number = at as u64 + 1;
            if self.ignored_lines.contains(&number) || self.ignored_lines.contains(&(number + 1)) {
                continue;
            }
            let is_unused = lines.get(at + 2).is_some_and(|line| healthy::is_unused_port(line));
            if is_unused
                || lines::starts_a_message(second)
                || self.states_no_fault(first)
                || self.states_no_fault(&pair[1])
            {
                continue;
            }
            // A frame and the source text below it are not one message.
            let before = at.checked_sub(1).and_then(|before| lines.get(before));
            if traceback::frame(first).is_some()
                || before.is_some_and(|line| traceback::frame(line).is_some())
            {
                continue;
            }
            // Lines that start alike are separate messages: no word continues from one to the next.
            let glues: &[&str] = if begin_alike(first, second) { &[" "] } else { &[" ", ""] };
            for glue in glues {
                let both = format!("{first}{glue}{second}");
                let hits: Vec<(usize, usize)> = self.catalog.hits(both.as_bytes()).collect();
                let in_second = hits.iter().all(|(_, start)| *start >= first.len());
                let words: Vec<usize> = hits.iter().map(|(word, _)| *word).collect();
                let number = at as u64 + 1 + u64::from(in_second);
                self.signatures_of(&both, number, &words, true);
            }
        }
        self.hints(&lines);
    }

    /// Whether the line only states that something is in order.
    fn states_no_fault(&self, line: &str) -> bool {
        healthy::reports_no_fault(line) || self.catalog.weight_of_xid(line) == Some(XidWeight::Note)
    }

    /// Collects hints from the lines that nothing explains.
    fn hints(&mut self, lines: &[Cow<'_, str>]) {
        let explained: BTreeSet<u64> = self
            .findings
            .sightings
            .iter()
            .flat_map(|sighting| sighting.spots.iter().map(|spot| spot.line))
            .collect();
        let mut before: &str = "";
        for (number, line) in (1u64..).zip(lines) {
            // A warning quotes the source in its second line.
            let quoted = line.starts_with(' ') && level::is_python_warning(before);
            before = line;
            let past = steps_after(&self.findings.progress, self.times, number)
                .is_some_and(|steps| steps >= MIN_HEALTHY_STEPS);
            let ignored = self.ignored_lines.contains(&number) || self.caught.has_line(number);
            let speaks = level::complains(line)
                && !self.states_no_fault(line)
                && !(past || ignored || quoted || lines::is_advice(line));
            if explained.contains(&number) || line.trim().is_empty() || !speaks {
                continue;
            }
            self.findings.unexplained = Some(self.spot(line, number));
            let lower = line.to_ascii_lowercase();
            let hints: Vec<usize> = self.catalog.hints(&lower).collect();
            if !hints.is_empty() {
                let spot = self.spot(line, number);
                hints.into_iter().for_each(|hint| self.note(hint, &spot));
            }
        }
    }
}

/// Whether two lines start with the same word, as those of one program do.
fn begin_alike(first: &str, second: &str) -> bool {
    let word = first.split_whitespace().next().unwrap_or_default();
    word.len() > 2 && second.split_whitespace().next() == Some(word)
}
