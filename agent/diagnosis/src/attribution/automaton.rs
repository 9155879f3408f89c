//! Finds all words of the catalog in one pass over a text, ignoring ASCII case. The Aho-Corasick automaton covers the
//! first [`PREFIX_BYTES`] letters of each word; the rest of a word is compared after a match of its prefix. An automaton of
//! the whole words, 5,000 with 110,000 letters, would take many times as long to build.

use std::array;
use std::collections::BTreeMap;
use std::fmt;

use aho_corasick::automaton::{Automaton as _, StateID};
use aho_corasick::dfa::DFA;
use aho_corasick::{Anchored, BuildError, StartKind};

/// The number of letters of a word that are in the automaton.
const PREFIX_BYTES: usize = 4;

/// Parts of a text that are read at the same time. Each step waits for the table lookup of the step before it, so the
/// processor would be idle most of the time with one part.
const LANES: usize = 4;
/// Bytes that are read before their words are reported.
const BLOCK_BYTES: usize = LANES * 1024;

/// An automaton over some words.
#[derive(Clone)]
pub(super) struct Automaton {
    prefixes: DFA,
    start: StateID,
    /// The words with each prefix.
    by_prefix: Vec<Vec<Word>>,
}

/// A word in lower case, without its prefix.
#[derive(Clone)]
struct Word {
    number: usize,
    /// The next letters, and which bits of them belong to the word. Most candidates fail this comparison.
    next: u64,
    mask: u64,
    rest: Box<[u8]>,
}

impl fmt::Debug for Automaton {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Automaton").field("prefixes", &self.by_prefix.len()).finish_non_exhaustive()
    }
}

impl Automaton {
    /// The automaton of these words, which are in lower case. Words are numbered in their order.
    ///
    /// # Errors
    /// The words are too many for an automaton.
    pub(super) fn new(words: &[String]) -> Result<Automaton, BuildError> {
        let mut known: BTreeMap<&[u8], Vec<Word>> = BTreeMap::new();
        for (number, word) in words.iter().enumerate() {
            let (prefix, rest) = word.as_bytes().split_at(word.len().min(PREFIX_BYTES));
            let mask = lower_case(&[0xff; 8][..rest.len().min(8)]);
            let word = Word { number, next: lower_case(rest), mask, rest: rest.into() };
            known.entry(prefix).or_default().push(word);
        }
        let prefixes = DFA::builder()
            .ascii_case_insensitive(true)
            .start_kind(StartKind::Unanchored)
            .prefilter(false)
            .build(known.keys())?;
        let start = prefixes.start_state(Anchored::No).unwrap_or_default();
        Ok(Automaton { prefixes, start, by_prefix: known.into_values().collect() })
    }

    /// Finds all words in a text, as their numbers and offsets, ordered by the end of their prefix. Words may overlap.
    pub(super) fn find<'t>(&'t self, text: &'t [u8]) -> impl Iterator<Item = (usize, usize)> + 't {
        (0..text.len()).step_by(BLOCK_BYTES).flat_map(|from| {
            let mut found = Vec::new();
            for (end, state) in self.prefixes(text, from).into_iter().flatten() {
                self.words(text, end, state, &mut found);
            }
            found
        })
    }

    /// The words whose prefix ends at an offset, in this state.
    fn words(&self, text: &[u8], end: usize, state: StateID, found: &mut Vec<(usize, usize)>) {
        let after = &text[end..];
        let next = lower_case(after);
        for pattern in (0..self.prefixes.match_len(state)).map(|at| self.prefixes.match_pattern(state, at)) {
            let start = end - self.prefixes.pattern_len(pattern);
            for word in &self.by_prefix[pattern.as_usize()] {
                let is_there = next & word.mask == word.next
                    && after.get(..word.rest.len()).is_some_and(|rest| rest.eq_ignore_ascii_case(&word.rest));
                if is_there {
                    found.push((word.number, start));
                }
            }
        }
    }

    /// The ends of prefixes in the block that begins at this offset, with the state there, in order.
    #[allow(clippy::needless_range_loop, reason = "one index goes over all lanes at once")]
    fn prefixes(&self, text: &[u8], from: usize) -> [Vec<(usize, StateID)>; LANES] {
        let to = text.len().min(from + BLOCK_BYTES);
        let length = (to - from) / LANES;
        let starts: [usize; LANES] = array::from_fn(|lane| from + lane * length);
        let lanes = starts.map(|start| &text[start..start + length]);
        let mut states = starts.map(|start| self.state_at(text, start));
        let mut ends: [Vec<(usize, StateID)>; LANES] = array::from_fn(|_| Vec::with_capacity(length / 8));
        for at in 0..length {
            for lane in 0..LANES {
                states[lane] = self.prefixes.next_state(Anchored::No, states[lane], lanes[lane][at]);
            }
            for lane in 0..LANES {
                if self.prefixes.is_match(states[lane]) {
                    ends[lane].push((starts[lane] + at + 1, states[lane]));
                }
            }
        }
        // What is left of the division belongs to the last lane.
        let last = LANES - 1;
        let rest = starts[last] + length;
        for (at, byte) in (rest..).zip(&text[rest..to]) {
            states[last] = self.prefixes.next_state(Anchored::No, states[last], *byte);
            if self.prefixes.is_match(states[last]) {
                ends[last].push((at + 1, states[last]));
            }
        }
        ends
    }

    /// The state at an offset of a text. It depends on the last [`PREFIX_BYTES`] bytes only, as no prefix is longer.
    fn state_at(&self, text: &[u8], at: usize) -> StateID {
        let before = &text[at.saturating_sub(PREFIX_BYTES)..at];
        before.iter().fold(self.start, |state, byte| self.prefixes.next_state(Anchored::No, state, *byte))
    }
}

/// The first eight bytes in lower case, as a number; zeros after the end.
fn lower_case(text: &[u8]) -> u64 {
    let mut letters = [0; 8];
    let length = text.len().min(8);
    letters[..length].copy_from_slice(&text[..length]);
    letters.make_ascii_lowercase();
    u64::from_le_bytes(letters)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 8] =
        ["error:", "error\n", "cuda error", "cuda errors are", "a error", "uda", "out of memory", "memory"];

    fn matches(text: &str) -> Vec<(usize, usize)> {
        let automaton = Automaton::new(&WORDS.map(str::to_owned)).expect("an automaton");
        let mut found: Vec<(usize, usize)> = automaton.find(text.as_bytes()).collect();
        let ends = found.iter().map(|(number, at)| at + WORDS[*number].len().min(PREFIX_BYTES));
        assert!(ends.is_sorted(), "ordered by the ends of prefixes");
        found.sort_unstable();
        found
    }

    /// Reference implementation: compares each word at each offset.
    fn plainly(text: &str) -> Vec<(usize, usize)> {
        let text = text.to_ascii_lowercase();
        let of = |(number, word): (usize, &&str)| {
            let ends = (0..text.len()).filter(|at| text.as_bytes()[*at..].starts_with(word.as_bytes()));
            ends.map(|at| (number, at)).collect::<Vec<_>>()
        };
        WORDS.iter().enumerate().flat_map(of).collect()
    }

    /// Words at the ends of lanes and blocks are found once, and in the order of the text.
    #[test]
    fn words_are_found_at_every_offset() {
        let mut text = "CUDA Error: out of memory\nx".repeat(4 * BLOCK_BYTES / 27);
        for _ in 0..2 * LANES {
            text.push('y');
            assert_eq!(matches(&text), plainly(&text));
        }
    }

    #[test]
    fn overlapping_words_are_found_in_any_case() {
        for text in [
            "CUDA error: out of memory\n",
            "cuda errors are",
            "cuda errors ar",
            "xerror\nError\n",
            "Out Of Memor",
            "",
            "nothing",
            "out of memorymemory",
            "\u{e9}uda error",
        ] {
            assert_eq!(matches(text), plainly(text), "{text:?}");
        }
    }
}
