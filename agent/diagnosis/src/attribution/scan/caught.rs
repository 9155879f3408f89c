//! Tracebacks of exceptions that the program caught: its logger wrote a warning or an error directly above them. What a rank printed last
//! was not caught, also below an error of its logger, unless that error says that the program goes on.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{level, lines, progress};
use super::tracebacks::{above_traceback, is_chain};
use super::{Findings, MAX_IGNORED_DISTANCE, MAX_RANKS};

/// After this many lines a rank that printed none of them is taken to live: it prints rarely.
const MIN_LINES_ALIVE: u64 = 10_000;

/// The tracebacks that loggers wrote.
#[derive(Default)]
pub(super) struct Caught {
    /// The newest traceback.
    newest: Option<Newest>,
    /// The lines of such tracebacks. Their words are ignored.
    lines: BTreeSet<u64>,
    /// By rank: the newest traceback after which the rank has not logged or completed a step yet.
    open: BTreeMap<Option<u32>, Open>,
}

/// The newest traceback that a logger wrote.
#[derive(Clone, Copy)]
struct Newest {
    /// Its first line.
    at: u64,
    /// The rank in its prefix.
    rank: Option<u32>,
    /// The logger's own message says that the program goes on.
    goes_on: bool,
}

/// A traceback after which a rank has not shown that it lives.
#[derive(Clone, Copy)]
struct Open {
    /// Its first line.
    from: u64,
    /// The line of its exception.
    exception: u64,
}

impl Caught {
    /// Whether the line of this rank is in a caught traceback, or directly below it.
    pub(super) fn has(&self, number: u64, rank: Option<u32>) -> bool {
        let reaches = |newest: Newest| {
            newest.rank == rank && (newest.at..=newest.at + MAX_IGNORED_DISTANCE).contains(&number)
        };
        self.newest.is_some_and(reaches)
    }

    /// Whether the words of this line are ignored.
    pub(super) fn has_line(&self, number: u64) -> bool {
        self.lines.contains(&number)
    }

    /// The line has the exception of a traceback.
    pub(super) fn raised(&mut self, number: u64, rank: Option<u32>) {
        let Some(Newest { at: from, goes_on, .. }) = self.newest.filter(|_| self.has(number, rank)) else {
            return;
        };
        self.lines.extend(from..=number);
        if self.open.len() < MAX_RANKS && !goes_on {
            let open = self.open.entry(rank).or_insert(Open { from, exception: number });
            open.exception = number;
        }
    }

    /// A traceback starts at this line, below these.
    pub(super) fn traceback_starts(&mut self, before: &[u8], line: &[u8], number: u64) {
        let rank_of = |line: &str| lines::prefix(line).rank;
        let rank = rank_of(&lines::clean(line));
        let above = above_traceback(before);
        if above.as_deref().is_some_and(is_chain) {
            return;
        }
        // A rank that fails again has gone on.
        self.open.remove(&rank);
        let is_owner = |above: &String| rank_of(above) == rank && level::reports_a_caught_exception(above);
        let newest = |above: String| Newest { at: number, rank, goes_on: says_that_it_goes_on(&above) };
        self.newest = above.filter(is_owner).map(newest);
    }

    /// Looks in the block for lines which show that a rank went on after its traceback.
    pub(super) fn look_for_life(&mut self, block: &[u8], first_line: u64) {
        let Some(least) = self.open.values().map(|open| open.exception).min() else { return };
        let complete = block.strip_suffix(b"\n").unwrap_or(block);
        let skipped = usize::try_from((least + 1).saturating_sub(first_line)).unwrap_or(usize::MAX);
        let numbered = (first_line..).zip(complete.split(|byte| *byte == b'\n')).skip(skipped);
        for (number, raw) in numbered {
            if self.open.is_empty() {
                return;
            }
            let line = lines::clean(raw.get(..lines::LINE_WINDOW_BYTES).unwrap_or(raw));
            let rank = lines::prefix(&line).rank;
            let Some(open) = self.open.get(&rank).filter(|open| open.exception < number) else {
                continue;
            };
            let late = number - open.exception > MIN_LINES_ALIVE;
            if late || level::of_program(&line).is_some() || progress::is_progress(&line) {
                self.open.remove(&rank);
            }
        }
    }

    /// What a rank printed last was not caught.
    pub(super) fn free_last_words(&mut self, findings: &mut Findings) {
        let spots = findings.sightings.iter_mut().flat_map(|sighting| &mut sighting.spots);
        let spots = spots.chain(findings.exceptions.iter_mut().map(|exception| &mut exception.spot));
        for spot in spots.filter(|spot| spot.logged) {
            let rank = lines::prefix(&spot.text).rank;
            spot.logged = self.open.get(&rank).is_none_or(|open| spot.line < open.from);
        }
        for open in self.open.values() {
            self.lines.retain(|line| !(open.from..=open.exception).contains(line));
        }
    }
}

/// Whether a logger's message announces what the program does instead: such an exception was caught, also if the rank
/// printed nothing after it.
fn says_that_it_goes_on(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    [
        "skip",
        "retry",
        "retries",
        "goes on",
        "go on",
        "going on",
        "continu",
        "ignor",
        "fall back",
        "falling back",
    ]
    .iter()
    .any(|word| message.contains(word))
}

#[cfg(test)]
mod tests {
    use crate::attribution::catalog::Catalog;
    use crate::attribution::class::Class;
    use crate::attribution::{Evidence, attribute, exit, scan};

    const RAISED: &str = "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    x = b\nNameError: name 'b' is not defined\n";

    /// The class that a log of ranks that a signal ended shows, read at once or in two pieces.
    fn killed(log: &str) -> Class {
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let class = |pieces: &[&str]| {
            let mut scan = scan::Scan::new(catalog, "log", None, scan::Kind::Log);
            pieces.iter().for_each(|piece| scan.feed(piece.as_bytes()));
            let exits = exit::from_text("SIGABRT");
            attribute(catalog, &Evidence { findings: vec![scan.finish()], exits, ..Evidence::default() })
                .class
        };
        let below = log.find("not defined\n").map_or(0, |at| at + "not defined\n".len());
        let (traceback, rest) = log.split_at(below);
        assert_eq!(class(&[traceback, rest]), class(&[log]));
        class(&[log])
    }

    fn of_rank(rank: u32, text: &str) -> String {
        text.lines().map(|line| format!("[rank{rank}]: {line}\n")).collect()
    }

    #[test]
    fn a_note_above_a_traceback_does_not_mean_that_it_was_caught() {
        for above in [
            "2026-01-01 10:00:00,1 - train - INFO - the epoch starts\n",
            "[2026-01-01 10:00:00,731] [INFO] [comm.py:7:init] ready\n",
            "W0101 10:00:00.123456 4711 torch/distributed/run.py:793] *****\n",
            "[W0101 10:00:00.612 socket.cpp:12] [c10d] a warning of a native thread\n",
        ] {
            let log = format!("{above}{RAISED}INFO:root:a thread goes on\n");
            assert_eq!(killed(&log), Class::UserCode, "{above}");
        }
    }

    #[test]
    fn a_traceback_was_caught_if_its_message_says_that_the_program_goes_on() {
        let log = |above: &str| format!("{above}{RAISED}");
        assert_ne!(killed(&log("WARNING:root:skipping a record\n")), Class::UserCode);
        assert_eq!(killed(&log("WARNING:root:a record is wrong\n")), Class::UserCode);
    }

    #[test]
    fn a_traceback_below_a_warning_was_caught_if_its_rank_went_on() {
        let above = "ERROR:root:the evaluation failed\n";
        assert_ne!(killed(&format!("{above}{RAISED}INFO:root:next epoch\n")), Class::UserCode);
        assert_ne!(killed(&format!("{above}{RAISED}step: 3 loss: 2.1\n")), Class::UserCode);
        // Nothing of that rank shows that it went on.
        assert_eq!(killed(&format!("{above}{RAISED}")), Class::UserCode);
        let native =
            "terminate called without an active exception\n[E0101 10:00:00.1 watchdog.cpp:3] timeout\n";
        assert_eq!(killed(&format!("{above}{RAISED}{native}")), Class::UserCode);
        let other = of_rank(0, "INFO:root:next epoch\n");
        assert_eq!(killed(&(of_rank(2, above) + &of_rank(2, RAISED) + &other)), Class::UserCode);
        assert_eq!(
            killed(&(of_rank(0, above) + &of_rank(2, RAISED) + &of_rank(2, "INFO:root:on\n"))),
            Class::UserCode
        );
    }

    #[test]
    fn one_step_clears_a_caught_exception_only_if_its_own_rank_made_it() {
        let judged = |log: &str| crate::attribution::judged(log).class;
        let caught = of_rank(2, "ERROR:root:the evaluation failed\n") + &of_rank(2, RAISED);
        assert_eq!(judged(&(caught.clone() + &of_rank(0, "step: 3 loss: 2.1\n"))), Class::UserCode);
        assert_ne!(judged(&(caught + &of_rank(2, "step: 3 loss: 2.1\n"))), Class::UserCode);
    }
}
