//! Names with a step in them: `iter_{step}`, `*step={step}*`.

/// A pattern of names: `{step}` stands for all digits at its place, `*` for anything.
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
    /// Reads a pattern.
    ///
    /// # Errors
    /// It has no `{step}`, or several, or a `/`.
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

    /// Of words that are known to be one.
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

    /// Whether names tell their step: others are those of files that are written over.
    pub fn has_step(&self) -> bool {
        self.parts.contains(&Part::Step)
    }

    /// As it was written.
    pub fn written(&self) -> &str {
        &self.written
    }

    /// The step in `name`; none if it is no such name. Where there are several numbers, the last that fits.
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

/// Where runs of digits begin and end.
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

/// Whether `text` is all of these parts, none of which is a step.
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
    fn the_step_is_all_digits_at_its_place() {
        assert_eq!(step("iter_{step}", "iter_0000123"), Some(123));
        assert_eq!(step("iter_{step}", "iter_12a"), None);
        assert_eq!(step("iter_{step}", "xiter_12"), None);
        assert_eq!(step("*{step}", "ckpt_v2_100"), Some(100), "all digits, and the last number");
        assert_eq!(step("*{step}.ckpt", "epoch=3-step=1200.ckpt"), Some(1200));
        assert_eq!(step("*step={step}*", "m-step=7-consumed=99"), Some(7));
        assert_eq!(step("{step}", "5"), Some(5));
        assert_eq!(step("{step}", "99999999999999999999999"), None, "no step is so large");
        assert_eq!(step("ckpt_{step}_rank*.pt", "ckpt_40_rank12.pt"), Some(40));
    }

    #[test]
    fn a_pattern_without_a_step_is_refused() {
        assert!(Pattern::parse("last.ckpt").is_err());
        assert!(Pattern::parse("{step}/{step}").is_err());
        assert_eq!(Pattern::parse("a{step}*").unwrap().written(), "a{step}*");
    }

    proptest! {
        #[test]
        fn no_name_makes_it_panic(pattern in "[a*é=]{0,8}", name in "\\PC{0,40}") {
            let _ = Pattern::plain(&format!("{pattern}{{step}}{pattern}")).step(&name);
        }
    }
}
