//! Tests that reported that they cannot run here: found in the output of the test programs, and listed by
//! reason.

use std::collections::{BTreeMap, BTreeSet};

/// The start of their lines; `tests/testing` writes them.
const SKIPPED: &str = "test skipped: ";
const SKIPPED_IN_PART: &str = "test skipped in part: ";

/// The tests that were skipped, in whole or in part, by reason.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Skips([BTreeMap<String, BTreeSet<String>>; 2]);

impl Skips {
    /// The skips that a text reports.
    pub fn of(printed: &str) -> Skips {
        let mut skips = Skips::default();
        for (of, prefix) in skips.0.iter_mut().zip([SKIPPED, SKIPPED_IN_PART]) {
            // The harness may have written the start of a line before.
            let rest = printed.lines().filter_map(|line| line.split_once(prefix)?.1.split_once(": "));
            rest.for_each(|(test, reason)| _ = of.entry(reason.into()).or_default().insert(test.into()));
        }
        skips
    }

    /// How many tests did not run at all: each counts once, whatever it lacks.
    pub fn count(&self) -> usize {
        self.0[0].values().flatten().collect::<BTreeSet<_>>().len()
    }

    pub fn add(&mut self, other: &Skips) {
        for (into, from) in self.0.iter_mut().zip(&other.0) {
            for (reason, tests) in from {
                into.entry(reason.clone()).or_default().extend(tests.iter().cloned());
            }
        }
    }

    /// The list: a reason, and below it its tests.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (what, by_reason) in ["skipped", "skipped in part"].iter().zip(&self.0) {
            for (reason, tests) in by_reason {
                lines.push(format!("  {what}: {} because {reason}", tests.len()));
                lines.extend(tests.iter().map(|test| format!("      {}", name(test))));
            }
        }
        lines
    }
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
