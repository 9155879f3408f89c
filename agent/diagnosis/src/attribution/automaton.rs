//! An Aho-Corasick automaton that finds all words of the catalog in one pass over a text, ignoring ASCII case. It covers the first
//! [`PREFIX`] letters of each word; the rest of a word is compared after a match of the prefix. The full automaton of 5,000 words would
//! have 75,000 states; with seven letters it has 10,000. The build script (`build.rs`) creates it and the program reads it in place:
//! start-up costs nothing, and only the pages of the table that texts visit are in memory.
//!
//! Layout, all numbers little-endian: the number of byte classes (u32), of states (u32), of words (u32); for each byte its class (u8);
//! for each state and class the offset of the next state's row in the table (u32), with [`MATCH`] set where a prefix ends; for each
//! state the start and end of its words in the list (u32, u32); the list of word numbers (u32); for each word the start and end of its
//! letters (u32, u32); the letters.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};

/// The number of letters of a word that are in the automaton.
const PREFIX: usize = 7;
/// Marks a transition to a state in which the prefix of at least one word ends.
const MATCH: u32 = 1 << 31;

/// Bytes before the table.
const HEAD: usize = 3 * 4 + 256;

/// An automaton over some words.
#[derive(Clone, Debug)]
pub struct Automaton {
    bytes: Cow<'static, [u8]>,
    classes: usize,
    words: usize,
    /// Offsets of the sections.
    spans_at: usize,
    list_at: usize,
    words_at: usize,
    letters_at: usize,
}

impl Automaton {
    /// Reads an automaton in place. `None` if the bytes are incomplete.
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

    /// The number of words.
    pub fn len(&self) -> usize {
        self.words
    }

    /// A word, in lower case.
    pub fn word(&self, word: usize) -> &[u8] {
        let (from, to) = self.pair(self.words_at, word);
        self.bytes.get(self.letters_at + from..self.letters_at + to).unwrap_or_default()
    }

    /// Finds all words in a text with their offsets, ordered by the end of their prefix. Words may overlap.
    pub fn find<'t>(&'t self, text: &'t [u8]) -> Find<'t> {
        Find {
            automaton: self,
            text,
            read: 0,
            lanes: Default::default(),
            next: (0, 0),
            started: 0..0,
            behind: 0,
        }
    }

    fn steps(&self) -> Steps<'_> {
        let class_of = self.bytes[12..].first_chunk().unwrap_or(&[0; 256]);
        Steps { class_of, table: self.bytes[HEAD..self.spans_at].as_chunks::<4>().0 }
    }

    fn number(&self, list: usize, at: usize) -> usize {
        let number = self.bytes.get(list + 4 * at..).and_then(<[u8]>::first_chunk);
        number.map_or(0, |number| u32::from_le_bytes(*number) as usize)
    }

    fn pair(&self, list: usize, at: usize) -> (usize, usize) {
        (self.number(list, 2 * at), self.number(list, 2 * at + 1))
    }
}

/// The transitions: the next state for each state and byte.
#[derive(Clone, Copy)]
struct Steps<'a> {
    class_of: &'a [u8; 256],
    table: &'a [[u8; 4]],
}

impl Steps<'_> {
    /// The next state's row, with [`MATCH`] set where a prefix ends.
    fn next(self, row: u32, byte: u8) -> u32 {
        u32::from_le_bytes(self.table[row as usize + usize::from(self.class_of[usize::from(byte)])])
    }

    /// The state at an offset of the text. The automaton knows only the first [`PREFIX`] letters of words, so the state depends only on
    /// that many bytes.
    fn state_at(self, text: &[u8], place: usize) -> u32 {
        let before = &text[place.saturating_sub(PREFIX)..place];
        before.iter().fold(0, |row, byte| self.next(row, *byte) & !MATCH)
    }
}

/// Lanes of a text that are read in parallel. Each step depends on the table lookup of the step before it, so a single lane would leave
/// the processor idle most of the time.
const LANES: usize = 4;
/// Bytes of a lane.
const LANE: usize = 1024;

/// The offset after a prefix, and the state there.
type Started = (usize, u32);

/// Finds the words in a text.
#[derive(Debug)]
pub struct Find<'t> {
    automaton: &'t Automaton,
    text: &'t [u8],
    /// Bytes read so far.
    read: usize,
    /// Matches in the bytes that were read last, by lane.
    lanes: [Vec<Started>; LANES],
    /// The next lane and the index in it.
    next: (usize, usize),
    /// Entries of the list that are still to be compared, and the offset after their prefix.
    started: std::ops::Range<usize>,
    behind: usize,
}

impl Find<'_> {
    /// Reads on until something is found. Returns false at the end of the text.
    fn read_on(&mut self) -> bool {
        let steps = self.automaton.steps();
        self.next = (0, 0);
        self.lanes.iter_mut().for_each(Vec::clear);
        while self.read < self.text.len() && self.lanes.iter().all(Vec::is_empty) {
            let from = self.read;
            let (lanes, _) = self.text[from..].as_chunks::<LANE>();
            match lanes.first_chunk::<LANES>() {
                Some(lanes) => {
                    self.read_lanes(steps, lanes);
                    self.read += LANES * LANE;
                }
                None => {
                    let mut row = steps.state_at(self.text, from);
                    for (at, byte) in (from + 1..).zip(&self.text[from..]) {
                        let next = steps.next(row, *byte);
                        row = next & !MATCH;
                        if next & MATCH != 0 {
                            self.lanes[0].push((at, row));
                        }
                    }
                    self.read = self.text.len();
                }
            }
        }
        self.lanes.iter().any(|lane| !lane.is_empty())
    }

    #[allow(clippy::needless_range_loop, reason = "one index goes over all lanes at once")]
    fn read_lanes(&mut self, steps: Steps<'_>, lanes: &[[u8; LANE]; LANES]) {
        let from: [usize; LANES] = std::array::from_fn(|lane| self.read + lane * LANE);
        let mut rows = from.map(|from| steps.state_at(self.text, from));
        for at in 0..LANE {
            let next: [u32; LANES] = std::array::from_fn(|lane| steps.next(rows[lane], lanes[lane][at]));
            rows = next.map(|next| next & !MATCH);
            if next.iter().fold(0, |all, next| all | next) & MATCH != 0 {
                for lane in 0..LANES {
                    if next[lane] & MATCH != 0 {
                        self.lanes[lane].push((from[lane] + at + 1, rows[lane]));
                    }
                }
            }
        }
    }
}

impl Iterator for Find<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let automaton = self.automaton;
        loop {
            for entry in self.started.by_ref() {
                let word = automaton.number(automaton.list_at, entry);
                let letters = automaton.word(word);
                let rest = letters.get(PREFIX..).unwrap_or_default();
                let there = self.text.get(self.behind..self.behind + rest.len());
                if there.is_some_and(|there| there.eq_ignore_ascii_case(rest)) {
                    return Some((word, self.behind - letters.len().min(PREFIX)));
                }
            }
            let (lane, at) = self.next;
            let Some(found) = self.lanes.get(lane) else {
                if !self.read_on() {
                    return None;
                }
                continue;
            };
            let Some((behind, row)) = found.get(at) else {
                self.next = (lane + 1, 0);
                continue;
            };
            let (from, to) = automaton.pair(automaton.spans_at, *row as usize / automaton.classes);
            (self.behind, self.started, self.next) = (*behind, from..to, (lane, at + 1));
        }
    }
}

/// Builds the automaton of these words, as bytes.
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

/// A state: the next state for each byte class, and the words whose prefix ends here.
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

    /// The rows in breadth-first order, so that the most visited rows are next to each other.
    fn rows(self, stride: usize) -> Vec<Row> {
        let Trie(nodes) = self;
        let mut rows: Vec<Row> = Vec::with_capacity(nodes.len());
        let mut place = vec![0; nodes.len()];
        // Nodes with the row to fall back to.
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

    #[test]
    fn words_across_lane_boundaries_are_found() {
        for offset in 0..24 {
            let mut text = "x".repeat(offset);
            while text.len() < 3 * LANES * LANE {
                text.push_str("cuda error\n out of memory, uda ");
            }
            assert_eq!(found(&text), plainly_sorted(&text), "{offset}");
        }
    }

    fn plainly_sorted(text: &str) -> Vec<(usize, usize)> {
        let mut found = plainly(text);
        found.sort_unstable();
        found
    }

    #[test]
    fn a_truncated_automaton_is_rejected() {
        let mut bytes = build(&WORDS.map(str::to_owned));
        bytes.pop();
        assert!(Automaton::read(bytes).is_none());
        assert!(Automaton::read(Vec::new()).is_none());
    }
}
