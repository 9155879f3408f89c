//! Patterns of names that contain a step: `iter_{step}`, `*step={step}*`.

/// A pattern of names: `{step}` matches a whole run of digits, `*` matches anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    parts: Vec<Part>,
    written: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Any,
    Step,
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// It contains no `{step}`, or more than one, or a `/`.
    pub fn parse(written: &str) -> Result<Pattern, String> {
        let pattern = Pattern::plain(written);
        let steps = pattern.parts.iter().filter(|part| **part == Part::Step).count();
        if steps != 1 || written.contains('/') {
            return Err(format!(
                "{written:?} is not a pattern of names: it needs {{step}} once and no slash"
            ));
        }
        Ok(pattern)
    }

    /// Creates a pattern without checks.
    pub(crate) fn plain(written: &str) -> Pattern {
        let mut parts = Vec::new();
        for (index, around) in written.split("{step}").enumerate() {
            if index > 0 {
                parts.push(Part::Step);
            }
            for (index, text) in around.split('*').enumerate() {
                if index > 0 {
                    parts.push(Part::Any);
                }
                if !text.is_empty() {
                    parts.push(Part::Text(text.to_owned()));
                }
            }
        }
        Pattern { parts, written: written.to_owned() }
    }

    /// Whether names contain their step; otherwise the pattern is the name of a file that is overwritten.
    pub fn has_step(&self) -> bool {
        self.parts.contains(&Part::Step)
    }

    /// The pattern as text.
    pub fn written(&self) -> &str {
        &self.written
    }

    /// The step in `name`; `None` if the name does not match. If several numbers match, the last one.
    pub fn step(&self, name: &str) -> Option<u64> {
        if name.len() > 255 {
            return None;
        }
        numbers(name).into_iter().rev().find_map(|(from, to)| {
            let step: u64 = name[from..to].parse().ok()?;
            let at = self.parts.iter().position(|part| *part == Part::Step)?;
            let (before, after) = (&self.parts[..at], &self.parts[at + 1..]);
            (fits(before, &name[..from]) && fits(after, &name[to..])).then_some(step)
        })
    }
}

/// The start and end of each run of digits.
fn numbers(name: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut from = None;
    for (at, byte) in name.bytes().chain([b' ']).enumerate() {
        match (byte.is_ascii_digit(), from) {
            (true, None) => from = Some(at),
            (false, Some(begin)) => {
                found.push((begin, at));
                from = None;
            }
            _ => {}
        }
    }
    found
}

/// Whether `parts` match all of `text`; none of them is a step.
fn fits(parts: &[Part], text: &str) -> bool {
    match parts.split_first() {
        None => text.is_empty(),
        Some((Part::Text(wanted), rest)) => {
            text.strip_prefix(wanted.as_str()).is_some_and(|left| fits(rest, left))
        }
        Some((_, [])) => true,
        Some((_, rest)) => {
            text.char_indices().map(|(at, _)| at).chain([text.len()]).any(|at| fits(rest, &text[at..]))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn step(pattern: &str, name: &str) -> Option<u64> {
        Pattern::parse(pattern).unwrap().step(name)
    }

    #[test]
    fn the_step_is_a_whole_run_of_digits() {
        assert_eq!(step("iter_{step}", "iter_0000123"), Some(123));
        assert_eq!(step("iter_{step}", "iter_12a"), None);
        assert_eq!(step("iter_{step}", "xiter_12"), None);
        assert_eq!(step("*{step}", "ckpt_v2_100"), Some(100), "the last number, with all its digits");
        assert_eq!(step("*{step}.ckpt", "epoch=3-step=1200.ckpt"), Some(1200));
        assert_eq!(step("*step={step}*", "m-step=7-consumed=99"), Some(7));
        assert_eq!(step("{step}", "5"), Some(5));
        assert_eq!(step("{step}", "99999999999999999999999"), None, "a step does not fit into 64 bits");
        assert_eq!(step("ckpt_{step}_rank*.pt", "ckpt_40_rank12.pt"), Some(40));
    }

    #[test]
    fn a_pattern_needs_exactly_one_step_and_no_slash() {
        assert!(Pattern::parse("last.ckpt").is_err());
        assert!(Pattern::parse("{step}/{step}").is_err());
        assert_eq!(Pattern::parse("a{step}*").unwrap().written(), "a{step}*");
    }

    proptest! {
        #[test]
        fn no_name_makes_the_match_panic(pattern in "[a*é=]{0,8}", name in "\\PC{0,40}") {
            let _ = Pattern::plain(&format!("{pattern}{{step}}{pattern}")).step(&name);
        }
    }
}
