//! Finds all words of the catalogue in one pass over a text, in any case of letters: an Aho-Corasick automaton over the first
//! letters of each word ([`PREFIX`]); the rest of a word is compared where its first letters were found. The whole automaton of 5,000
//! words would have 75,000 states, of their first seven letters it has 10,000. It is made when the program is built (`build.rs`) and read in place: a
//! start costs nothing, and of the table only the pages that texts lead to are ever in memory.
//!
//! The bytes, all numbers little-endian: the number of letters' classes (u32), of states (u32), of words (u32); for each byte its class (u8); for each state
//! and class the place of the next state's row in the table (u32), with [`MATCH`] where words begin; for each state the first of its
//! words and the end of them in the list (u32, u32); the list: for each entry a word (u32); for each word the place and the end of its letters (u32, u32); the letters.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};

/// So many letters of a word are in the automaton.
const PREFIX: usize = 7;
/// Marks the way into a state in which words were begun.
const MATCH: u32 = 1 << 31;

/// Bytes before the table.
const HEAD: usize = 3 * 4 + 256;

/// An automaton over some words.
#[derive(Clone, Debug)]
pub struct Automaton {
    bytes: Cow<'static, [u8]>,
    classes: usize,
    words: usize,
    /// Where its parts begin.
    spans_at: usize,
    list_at: usize,
    words_at: usize,
    letters_at: usize,
}

impl Automaton {
    /// Reads one in place; none if the bytes are not whole.
    pub fn read(bytes: impl Into<Cow<'static, [u8]>>) -> Option<Automaton> {
        let bytes = bytes.into();
        let number = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize);
        let (classes, states, words) = (number(0)?, number(4)?, number(8)?);
        let spans_at = HEAD + 4 * classes * states;
        let list_at = spans_at + 8 * states;
        let entries = if states == 0 { 0 } else { number(list_at - 4)? };
        let words_at = list_at + 4 * entries;
        let letters_at = words_at + 8 * words;
        let letters = if words == 0 { 0 } else { number(letters_at - 4)? };
        let is_whole = bytes.len() == letters_at + letters;
        is_whole.then_some(Automaton { bytes, classes, words, spans_at, list_at, words_at, letters_at })
    }

    /// How many words it finds.
    pub fn len(&self) -> usize {
        self.words
    }

    /// A word, in lower case.
    pub fn word(&self, word: usize) -> &[u8] {
        let (from, to) = self.pair(self.words_at, word);
        self.bytes.get(self.letters_at + from..self.letters_at + to).unwrap_or_default()
    }

    /// All words in a text with their places, in the order of where their first letters end; words may overlap.
    pub fn find<'t>(&'t self, text: &'t [u8]) -> impl Iterator<Item = (usize, usize)> + 't {
        let class_of: &[u8; 256] = self.bytes[12..].first_chunk().unwrap_or(&[0; 256]);
        let table = self.bytes[HEAD..self.spans_at].as_chunks::<4>().0;
        let (mut at, mut state) = (0, 0usize);
        let mut begun: std::ops::Range<usize> = 0..0;
        std::iter::from_fn(move || {
            loop {
                for entry in begun.by_ref() {
                    let word = self.number(self.list_at, entry);
                    let letters = self.word(word);
                    let start = at - letters.len().min(PREFIX);
                    let rest = letters.get(PREFIX..).unwrap_or_default();
                    if text.get(at..at + rest.len()).is_some_and(|of| of.eq_ignore_ascii_case(rest)) {
                        return Some((word, start));
                    }
                }
                let mut row = state;
                let begins = text[at..].iter().position(|byte| {
                    let next = u32::from_le_bytes(table[row + usize::from(class_of[usize::from(*byte)])]);
                    row = (next & !MATCH) as usize;
                    next & MATCH != 0
                });
                state = row;
                let Some(behind) = begins else {
                    at = text.len();
                    return None;
                };
                at += behind + 1;
                let (from, to) = self.pair(self.spans_at, state / self.classes);
                begun = from..to;
            }
        })
    }

    fn number(&self, list: usize, at: usize) -> usize {
        let number = self.bytes.get(list + 4 * at..).and_then(<[u8]>::first_chunk);
        number.map_or(0, |number| u32::from_le_bytes(*number) as usize)
    }

    fn pair(&self, list: usize, at: usize) -> (usize, usize) {
        (self.number(list, 2 * at), self.number(list, 2 * at + 1))
    }
}

/// The automaton of these words, as bytes.
pub fn build(words: &[String]) -> Vec<u8> {
    let words: Vec<Vec<u8>> = words.iter().map(|word| word.to_ascii_lowercase().into_bytes()).collect();
    let mut class_of = [0u8; 256];
    let mut classes = 1;
    for byte in words.iter().flatten() {
        if class_of[usize::from(*byte)] == 0 {
            class_of[usize::from(*byte)] = classes;
            class_of[usize::from(byte.to_ascii_uppercase())] = classes;
            classes += 1;
        }
    }
    let trie = Trie::of(&words, &class_of);
    let stride = usize::from(classes);
    let rows = trie.rows(stride);
    let mut bytes = Vec::new();
    let number = |bytes: &mut Vec<u8>, number: usize| bytes.extend((number as u32).to_le_bytes());
    [stride, rows.len(), words.len()].into_iter().for_each(|of| number(&mut bytes, of));
    bytes.extend(class_of);
    for row in &rows {
        for next in &row.next {
            let mark = if rows[*next].words.is_empty() { 0 } else { MATCH };
            bytes.extend(((next * stride) as u32 | mark).to_le_bytes());
        }
    }
    let mut end = 0;
    for row in &rows {
        number(&mut bytes, end);
        end += row.words.len();
        number(&mut bytes, end);
    }
    rows.iter().flat_map(|row| &row.words).for_each(|word| number(&mut bytes, *word));
    let mut end = 0;
    for word in &words {
        number(&mut bytes, end);
        end += word.len();
        number(&mut bytes, end);
    }
    words.iter().for_each(|word| bytes.extend(word));
    bytes
}

#[derive(Default)]
struct Node {
    children: BTreeMap<u8, usize>,
    words: Vec<usize>,
}

struct Trie(Vec<Node>);

/// A state: where each class of letters leads, and the words whose first letters end here.
struct Row {
    next: Vec<usize>,
    words: Vec<usize>,
}

impl Trie {
    fn of(words: &[Vec<u8>], class_of: &[u8; 256]) -> Trie {
        let mut nodes = vec![Node::default()];
        for (number, word) in words.iter().enumerate() {
            let mut at = 0;
            for byte in word.iter().take(PREFIX) {
                let class = class_of[usize::from(*byte)];
                let fresh = nodes.len();
                let child = *nodes[at].children.entry(class).or_insert(fresh);
                if child == fresh {
                    nodes.push(Node::default());
                }
                at = child;
            }
            nodes[at].words.push(number);
        }
        Trie(nodes)
    }

    /// The rows in the order of their depth, so that those which texts lead to most lie side by side.
    fn rows(self, stride: usize) -> Vec<Row> {
        let Trie(nodes) = self;
        let mut rows: Vec<Row> = Vec::with_capacity(nodes.len());
        let mut place = vec![0; nodes.len()];
        // Nodes with the row to which a text falls back from them.
        let mut waiting = VecDeque::from([(0, None::<usize>)]);
        let mut numbered = 1;
        while let Some((node, fallback)) = waiting.pop_front() {
            let mut next = fallback.map_or_else(|| vec![0; stride], |row| rows[row].next.clone());
            let mut words = nodes[node].words.clone();
            if let Some(row) = fallback {
                words.extend(&rows[row].words);
            }
            for (class, child) in &nodes[node].children {
                let back = fallback.map_or(0, |_| next[usize::from(*class)]);
                place[*child] = numbered;
                next[usize::from(*class)] = numbered;
                numbered += 1;
                waiting.push_back((*child, Some(back)));
            }
            rows.push(Row { next, words });
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 8] =
        ["error:", "error\n", "cuda error", "cuda errors are", "a error", "uda", "out of memory", "memory"];

    fn found(text: &str) -> Vec<(usize, usize)> {
        let words = WORDS.map(str::to_owned);
        let automaton = Automaton::read(build(&words)).expect("a whole automaton");
        let mut found: Vec<(usize, usize)> = automaton.find(text.as_bytes()).collect();
        found.sort_unstable();
        found
    }

    /// Word by word, letter by letter.
    fn plainly(text: &str) -> Vec<(usize, usize)> {
        let text = text.to_ascii_lowercase();
        let of = |(number, word): (usize, &&str)| {
            let ends = (0..text.len()).filter(|at| text.as_bytes()[*at..].starts_with(word.as_bytes()));
            ends.map(|at| (number, at)).collect::<Vec<_>>()
        };
        WORDS.iter().enumerate().flat_map(of).collect()
    }

    #[test]
    fn words_are_found_where_they_stand_in_any_case_and_over_one_another() {
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

    #[test]
    fn a_torn_automaton_is_none() {
        let mut bytes = build(&WORDS.map(str::to_owned));
        bytes.pop();
        assert!(Automaton::read(bytes).is_none());
        assert!(Automaton::read(Vec::new()).is_none());
    }
}
