//! Completed steps in a program's output, by an expression of the user (`--progress`): for programs that no client
//! and no hook reports.

use std::str::FromStr;

use regex::bytes::{Captures, Regex, RegexBuilder};

use crate::attribution::lines::without_colours;

/// The group whose text is the loss.
const LOSS: &str = "loss";

/// Which lines report a completed step.
#[derive(Clone, Debug)]
pub struct ProgressRule {
    expression: Regex,
    /// The first group that is not the loss.
    step: Option<usize>,
}

/// A line that reports a completed step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LineReport {
    /// The number of the step; `None` if the rule has no group for it.
    pub step: Option<u64>,
    /// The loss; NaN is a value.
    pub loss: Option<f64>,
}

impl FromStr for ProgressRule {
    type Err = String;

    fn from_str(text: &str) -> Result<ProgressRule, String> {
        // Lines are bytes: a program may print any.
        let expression = RegexBuilder::new(text).unicode(false).build().map_err(|error| error.to_string())?;
        if expression.is_match(b"") {
            return Err("it matches each line: name a word of the lines that report a step".to_owned());
        }
        let step = expression
            .capture_names()
            .enumerate()
            .skip(1)
            .find(|(_, name)| *name != Some(LOSS))
            .map(|(group, _)| group);
        Ok(ProgressRule { expression, step })
    }
}

impl ProgressRule {
    /// The step that a line reports. `None` if it reports none, or if what should be its number is not one.
    pub fn read(&self, line: &[u8]) -> Option<LineReport> {
        if memchr::memchr(0x1b, line).is_some() {
            let mut plain = Vec::with_capacity(line.len());
            without_colours(line, &mut plain);
            return self.report(&self.expression.captures(&plain)?);
        }
        self.report(&self.expression.captures(line)?)
    }

    fn report(&self, found: &Captures<'_>) -> Option<LineReport> {
        let step = match self.step {
            Some(group) => Some(number(found.get(group)?.as_bytes())?),
            None => None,
        };
        let loss = found.name(LOSS).and_then(|loss| number(loss.as_bytes()));
        Some(LineReport { step, loss })
    }
}

fn number<T: FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// Numbers of steps that only grow, from those that a program prints.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrintedSteps {
    /// The last number as it was printed, and as it counts.
    last: Option<(u64, u64)>,
}

impl PrintedSteps {
    /// The number of the step that a line reports. `None` if it is the same step again. Numbers that start again, as
    /// in each epoch, go on from the last one.
    pub fn next(&mut self, printed: Option<u64>) -> Option<u64> {
        let (printed, counts) = match (self.last, printed) {
            (None, printed) => (printed.unwrap_or(0), printed.unwrap_or(0)),
            (Some((_, last)), None) => (last.saturating_add(1), last.saturating_add(1)),
            (Some((before, _)), Some(printed)) if printed == before => return None,
            (Some((before, last)), Some(printed)) => {
                let ahead = printed.checked_sub(before).unwrap_or(1);
                (printed, last.saturating_add(ahead))
            }
        };
        self.last = Some((printed, counts));
        Some(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> ProgressRule {
        text.parse().expect("a rule")
    }

    fn step(step: u64) -> Option<LineReport> {
        Some(LineReport { step: Some(step), loss: None })
    }

    #[test]
    fn the_first_group_is_the_step() {
        let rule = rule(r"step (\d+)");
        assert_eq!(rule.read(b"INFO step 12/100 took 3 s"), step(12));
        assert_eq!(rule.read(b"INFO \x1b[32mstep \x1b[0m7"), step(7));
        assert_eq!(rule.read(b"loading"), None);
        assert_eq!(rule.read(b"step 99999999999999999999999"), None, "no number of a step");
    }

    #[test]
    fn the_group_named_loss_is_the_loss_wherever_it_is() {
        let rule = rule(r"loss=(?P<loss>\S+) at it(?:er)? (\d+)");
        let read = |line: &str| rule.read(line.as_bytes()).expect("a report");
        assert_eq!(read("loss=2.5 at iter 3"), LineReport { step: Some(3), loss: Some(2.5) });
        assert!(read("loss=nan at it 4").loss.is_some_and(f64::is_nan));
        assert_eq!(read("loss=tensor(1) at it 5"), LineReport { step: Some(5), loss: None });
    }

    #[test]
    fn a_rule_without_a_group_counts_lines() {
        let line = rule("^done$").read(b"done");
        assert_eq!(line, Some(LineReport { step: None, loss: None }));
    }

    #[test]
    fn a_rule_that_is_none_is_refused() {
        for wrong in ["step (", "", ".*", r"(\d*)"] {
            wrong.parse::<ProgressRule>().expect_err(wrong);
        }
    }

    #[test]
    fn steps_only_grow() {
        let counted = |printed: &[Option<u64>]| {
            let mut steps = PrintedSteps::default();
            printed.iter().map(|printed| steps.next(*printed)).collect::<Vec<_>>()
        };
        let some = |numbers: &[u64]| numbers.iter().copied().map(Some).collect::<Vec<_>>();
        assert_eq!(counted(&some(&[10, 20, 30])), some(&[10, 20, 30]));
        assert_eq!(counted(&some(&[8, 9, 0, 1])), some(&[8, 9, 10, 11]), "the next epoch");
        assert_eq!(counted(&some(&[5, 5, 6])), [Some(5), None, Some(6)]);
        assert_eq!(counted(&[None, None, None]), some(&[0, 1, 2]));
        assert_eq!(counted(&some(&[u64::MAX, 3])), some(&[u64::MAX, u64::MAX]));
    }
}
