//! Tests that reported that they cannot run here: found in the output of the test programs, and listed by reason.

use std::collections::{BTreeMap, BTreeSet};

/// The start of their lines; `tests/testing` writes them.
const SKIPPED: &str = "test skipped: ";
const SKIPPED_IN_PART: &str = "test skipped in part: ";

/// The tests that were skipped, by reason.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Skips {
    whole: BTreeMap<String, BTreeSet<String>>,
    part: BTreeMap<String, BTreeSet<String>>,
}

impl Skips {
    /// The skips that a text reports.
    pub fn of(printed: &str) -> Skips {
        let mut skips = Skips::default();
        for line in printed.lines() {
            // The harness may have written the start of a line before.
            if let Some((test, reason)) = reported(line, SKIPPED) {
                skips.whole.entry(reason).or_default().insert(test);
            } else if let Some((test, reason)) = reported(line, SKIPPED_IN_PART) {
                skips.part.entry(reason).or_default().insert(test);
            }
        }
        skips
    }

    /// How many tests did not run at all: each counts once, whatever it lacks.
    pub fn count(&self) -> usize {
        self.whole.values().flatten().collect::<BTreeSet<_>>().len()
    }

    /// Adds those of another check.
    pub fn add(&mut self, other: &Skips) {
        for (into, from) in [(&mut self.whole, &other.whole), (&mut self.part, &other.part)] {
            for (reason, tests) in from {
                into.entry(reason.clone()).or_default().extend(tests.iter().cloned());
            }
        }
    }

    /// The list: a reason, and below it its tests.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (what, by_reason) in [("skipped", &self.whole), ("skipped in part", &self.part)] {
            for (reason, tests) in by_reason {
                lines.push(format!("  {what}: {} because {reason}", tests.len()));
                lines.extend(tests.iter().map(|test| format!("      {}", name(test))));
            }
        }
        lines
    }
}

fn reported(line: &str, prefix: &str) -> Option<(String, String)> {
    let (_, rest) = line.split_once(prefix)?;
    let (test, reason) = rest.split_once(": ")?;
    Some((test.to_owned(), reason.to_owned()))
}

/// A test without the hash of its program: `it::kill::of_one_rank`.
fn name(test: &str) -> String {
    let Some((program, name)) = test.split_once("::") else { return test.to_owned() };
    let program = program.rsplit_once('-').map_or(program, |(program, _)| program);
    format!("{program}::{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "running 3 tests\ntest a::b ... \ntest skipped: it-01::a::b: no torch: install it\nok\n\
                        test skipped: it-01::a::b: no client\ntest skipped: it-02::a::b: no client\n\
                        test x ... test skipped in part: it-01::x: no strace\n";

    #[test]
    fn a_test_counts_once_and_is_listed_below_each_reason() {
        let skips = Skips::of(SAID);
        assert_eq!(skips.count(), 2);
        assert_eq!(
            skips.lines(),
            [
                "  skipped: 2 because no client",
                "      it::a::b",
                "      it::a::b",
                "  skipped: 1 because no torch: install it",
                "      it::a::b",
                "  skipped in part: 1 because no strace",
                "      it::x",
            ]
        );
    }

    #[test]
    fn those_of_two_checks_are_summed() {
        let mut skips = Skips::of("test skipped: it-01::a: no torch");
        skips.add(&Skips::of("test skipped: it-02::b: no torch\n"));
        assert_eq!((skips.count(), skips.lines().len()), (2, 3));
    }
}
