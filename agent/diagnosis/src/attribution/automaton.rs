//! Finds all words of the catalog in one pass over a text, ignoring ASCII case. The Aho-Corasick automaton covers the
//! first [`PREFIX`] letters of each word; the rest of a word is compared after a match of its prefix. An automaton of
//! the whole words, 5,000 with 110,000 letters, would take six times as long to build.

use std::collections::BTreeMap;
use std::fmt;

use daachorse::DoubleArrayAhoCorasick;
use daachorse::errors::DaachorseError;

/// The number of letters of a word that are in the automaton.
const PREFIX: usize = 12;

/// An automaton over some words.
#[derive(Clone)]
pub(super) struct Automaton {
    prefixes: DoubleArrayAhoCorasick<u32>,
    /// The words with each prefix.
    of_prefix: Vec<Vec<usize>>,
    /// All words, in lower case.
    words: Vec<String>,
}

impl fmt::Debug for Automaton {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Automaton").field("words", &self.words.len()).finish_non_exhaustive()
    }
}

impl Automaton {
    /// The automaton of these words, which are in lower case.
    ///
    /// # Errors
    /// There are no words, or an empty one.
    pub(super) fn of(words: Vec<String>) -> Result<Automaton, DaachorseError> {
        let mut known: BTreeMap<&[u8], Vec<usize>> = BTreeMap::new();
        for (number, word) in words.iter().enumerate() {
            let prefix = &word.as_bytes()[..word.len().min(PREFIX)];
            known.entry(prefix).or_default().push(number);
        }
        let prefixes =
            DoubleArrayAhoCorasick::with_values((0..).zip(known.keys()).map(|(at, of)| (*of, at)))?;
        let of_prefix = known.into_values().collect();
        Ok(Automaton { prefixes, of_prefix, words })
    }

    /// Finds all words in a text with their offsets, ordered by the end of their prefix. Words may overlap.
    pub(super) fn find<'t>(&'t self, text: &'t [u8]) -> impl Iterator<Item = (usize, usize)> + 't {
        let letters = text.iter().map(u8::to_ascii_lowercase);
        self.prefixes.find_overlapping_iter_from_iter(letters).flat_map(move |prefix| {
            let (start, end) = (prefix.start(), prefix.end());
            let is_there = move |number: &&usize| {
                let rest = self.words[**number].as_bytes().get(PREFIX..).unwrap_or_default();
                text.get(end..end + rest.len()).is_some_and(|there| there.eq_ignore_ascii_case(rest))
            };
            self.of_prefix[prefix.value() as usize]
                .iter()
                .filter(is_there)
                .map(move |number| (*number, start))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 8] =
        ["error:", "error\n", "cuda error", "cuda errors are", "a error", "uda", "out of memory", "memory"];

    fn found(text: &str) -> Vec<(usize, usize)> {
        let automaton = Automaton::of(WORDS.map(str::to_owned).into()).expect("an automaton");
        let mut found: Vec<(usize, usize)> = automaton.find(text.as_bytes()).collect();
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
            assert_eq!(found(text), plainly(text), "{text:?}");
        }
    }
}
