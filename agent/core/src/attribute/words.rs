//! What words speak for. Learned when the catalogue is compiled, from its own examples, from lines whose class is known and from
//! the figures of failures in `agent/catalog/failures`: a softmax regression over words, their parts and stems, and pairs of neighbours. What it
//! says are probabilities that hold: of failures that it has not seen, as many are of a class as it says.

use std::collections::{BTreeMap, BTreeSet};

use super::class::Class;
use super::traceback;

/// Classes.
const CLASSES: usize = Class::ALL.len();
/// Texts in which a word must stand to count.
const SEEN: u32 = 2;
/// How often all texts are gone through. More fits them better and others worse.
const ROUNDS: u32 = 8;
/// Rounds whose weights are not kept. The mean of those after them depends less on the order of the texts than the last ones do.
const UNKEPT: u32 = 2;
/// How far each text moves the weights in the first round.
const STEP: f32 = 2.5;
/// What each further round takes from the step.
const COOLING: f32 = 0.1;
/// How far a text moves what is held likely before any word is read, of how far it moves a word.
const BASE_STEP: f32 = 0.1;

/// The length, as a vector of the rarities of its words, below which a text is as short as its words make it: some four rare words
/// with their stems and pairs. Scaled up to the length of others, "gave up after" would name a cause.
const SHORTEST: f32 = 24.0;

/// A word or a pair of words by its number: there are some fifty thousand, and what they are is never asked.
pub type Word = u32;

/// The learned words.
#[derive(Clone, Debug, Default)]
pub struct Words {
    /// For each word how rare it is, and what it says of each class.
    weights: BTreeMap<Word, Weight>,
    /// What is held likely before any word is read.
    base: [f32; CLASSES],
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Weight {
    rarity: f32,
    says: [f32; CLASSES],
}

impl Words {
    /// Learns from texts of known class, and from those of which only the words are known.
    pub fn learn<'t>(
        texts: impl Iterator<Item = (Class, &'t str)>,
        figures: impl Iterator<Item = (Class, BTreeSet<Word>)>,
    ) -> Words {
        let texts: Vec<(Class, BTreeSet<Word>)> =
            texts.map(|(class, text)| (class, words_of_text(text))).chain(figures).collect();
        let mut seen: BTreeMap<Word, u32> = BTreeMap::new();
        for word in texts.iter().flat_map(|(_, words)| words) {
            *seen.entry(*word).or_default() += 1;
        }
        let counted: BTreeMap<Word, u32> = seen.into_iter().filter(|(_, times)| *times >= SEEN).collect();
        let place: BTreeMap<Word, usize> = counted.keys().copied().zip(0..).collect();
        let rarity: Vec<f32> =
            counted.values().map(|times| (texts.len() as f32 / *times as f32).ln()).collect();
        let lessons: Vec<(Class, Vec<(usize, f32)>)> = texts
            .iter()
            .map(|(class, words)| {
                let known = words.iter().filter_map(|word| place.get(word));
                (*class, of_one_length(known.map(|at| (*at, rarity[*at])).collect()))
            })
            .collect();
        let (says, base) = fitted(&lessons, rarity.len());
        let weights = place
            .into_iter()
            .map(|(word, at)| (word, Weight { rarity: rarity[at], says: says[at] }))
            .collect();
        Words { weights, base }
    }

    /// How likely each class is by the words of the line alone; none if no word is known.
    pub fn opinion(&self, line: &str) -> Option<[f64; CLASSES]> {
        self.opinion_of(words(line).iter())
    }

    /// The words of a line that say something.
    pub fn known(&self, line: &str) -> impl Iterator<Item = Word> {
        words(line).into_iter().filter(|word| self.weights.contains_key(word))
    }

    /// How likely each class is by the words of a text.
    pub fn opinion_of<'w>(&self, words: impl Iterator<Item = &'w Word>) -> Option<[f64; CLASSES]> {
        let known: Vec<&Weight> = words.filter_map(|word| self.weights.get(word)).collect();
        if known.is_empty() {
            return None;
        }
        let text = of_one_length(known.iter().map(|weight| (&weight.says, weight.rarity)).collect());
        Some(likely(&self.base, text.into_iter()).map(f64::from))
    }
}

/// Scaled so that a long text says no more by its length, and a line of few and common words less.
fn of_one_length<T>(mut words: Vec<(T, f32)>) -> Vec<(T, f32)> {
    let length = words.iter().map(|(_, rarity)| rarity * rarity).sum::<f32>().sqrt();
    words.iter_mut().for_each(|(_, rarity)| *rarity /= length.max(SHORTEST));
    words
}

/// The softmax of what all words say.
fn likely<'w>(
    base: &[f32; CLASSES],
    words: impl Iterator<Item = (&'w [f32; CLASSES], f32)>,
) -> [f32; CLASSES] {
    let mut odds = *base;
    for (says, share) in words {
        odds.iter_mut().zip(says).for_each(|(odds, says)| *odds += says * share);
    }
    let highest = odds.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut likely = odds.map(|of| (of - highest).exp());
    let all: f32 = likely.iter().sum();
    likely.iter_mut().for_each(|of| *of /= all);
    likely
}

/// Weights under which each lesson is of its class, by stochastic gradient descent.
fn fitted(lessons: &[(Class, Vec<(usize, f32)>)], words: usize) -> (Vec<[f32; CLASSES]>, [f32; CLASSES]) {
    let mut says = vec![[0.0; CLASSES]; words];
    let mut base = [0.0; CLASSES];
    let mut order: Vec<usize> = (0..lessons.len()).collect();
    let mut dice = Dice(12_345);
    let (mut mean, mut mean_base) = (says.clone(), base);
    let kept = (ROUNDS - UNKEPT) as f32;
    for round in 0..ROUNDS {
        for last in (1..order.len()).rev() {
            order.swap(last, dice.up_to(last));
        }
        let step = STEP / (1.0 + COOLING * round as f32);
        for (class, text) in order.iter().map(|at| &lessons[*at]) {
            let mut wrong = likely(&base, text.iter().map(|(word, share)| (&says[*word], *share)));
            wrong[class.index()] -= 1.0;
            base.iter_mut().zip(wrong).for_each(|(base, wrong)| *base -= BASE_STEP * step * wrong);
            for (word, share) in text {
                let weights = says[*word].iter_mut().zip(wrong);
                weights.for_each(|(weight, wrong)| *weight -= step * wrong * share);
            }
        }
        if round >= UNKEPT {
            let weights = says.iter().chain([&base]).flatten();
            let means = mean.iter_mut().chain([&mut mean_base]).flatten();
            means.zip(weights).for_each(|(mean, weight)| *mean += weight / kept);
        }
    }
    (mean, mean_base)
}

/// The same order each time: what is learned must not change from start to start.
struct Dice(u64);

impl Dice {
    /// A number from 0 up to and with the highest.
    fn up_to(&mut self, highest: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or_default() % (highest + 1)
    }
}

/// The words of the lines that are messages: a traceback's frames and the program's text below them are those of any program.
fn words_of_text(text: &str) -> BTreeSet<Word> {
    messages(text.lines()).flat_map(words).collect()
}

/// The lines of a text without the frames of tracebacks and the program's text below them.
pub fn messages<'t>(lines: impl Iterator<Item = &'t str>) -> impl Iterator<Item = &'t str> {
    let mut below = false;
    lines.filter(move |line| {
        let frame = traceback::frame(line).is_some();
        let program = below && traceback::raised(line).is_none();
        below = frame;
        !frame && !program
    })
}

/// Words in lower case without numbers, the parts of joined words, their stems, and pairs of neighbours.
fn words(line: &str) -> BTreeSet<Word> {
    let mut found: Vec<Word> = Vec::new();
    let mut stems: Vec<Word> = Vec::new();
    for word in line.split_whitespace().map(without_path).flat_map(letters) {
        let word = word.trim_matches('_');
        if word.len() < 2 {
            continue;
        }
        let parts = word.split('_').flat_map(humps).filter(|part| part.len() > 2 && *part != word);
        for word in std::iter::once(word).chain(parts) {
            found.push(number(word.bytes()));
            stems.push(number(b"~".iter().copied().chain(stem(word).bytes())));
        }
    }
    let pairs = found.windows(2).map(|pair| pair[0].rotate_left(13) ^ pair[1]);
    found.iter().copied().chain(pairs).chain(stems).collect()
}

/// An address of the web up to its host: what is fetched there says nothing.
fn without_path(word: &str) -> &str {
    let Some((scheme, rest)) = word.split_once("://") else { return word };
    let host = rest.find('/').unwrap_or(rest.len());
    &word[..scheme.len() + "://".len() + host]
}

fn letters(word: &str) -> impl Iterator<Item = &str> {
    word.split(|letter: char| !(letter.is_ascii_alphabetic() || letter == '_'))
}

/// `OutOfMemoryError` is of three words and one.
fn humps(word: &str) -> impl Iterator<Item = &str> {
    let bytes = word.as_bytes();
    let begins = |at: &usize| {
        let before = bytes[at - 1].is_ascii_lowercase();
        let after = bytes.get(at + 1).is_some_and(u8::is_ascii_lowercase);
        bytes[*at].is_ascii_uppercase() && (before || after)
    };
    let mut ends: Vec<usize> = (1..bytes.len()).filter(begins).collect();
    ends.push(bytes.len());
    let mut from = 0;
    ends.into_iter().filter_map(move |end| word.get(std::mem::replace(&mut from, end)..end))
}

/// A word without its commonest endings.
fn stem(word: &str) -> &str {
    const ENDINGS: [&str; 8] = ["ing", "ed", "es", "s", "ion", "ions", "ment", "able"];
    let cut =
        ENDINGS.iter().filter(|ending| word.len() > ending.len() + 3).find_map(|end| word.strip_suffix(end));
    cut.unwrap_or(word)
}

/// FNV-1a of a word in lower case, its halves folded.
fn number(word: impl Iterator<Item = u8>) -> Word {
    let number = word.fold(0xcbf2_9ce4_8422_2325_u64, |number, byte| {
        (number ^ u64::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0000_01b3)
    });
    (number >> 32) as Word ^ number as Word
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [(Class, &str); 4] = [
        (Class::Fabric, "port 3 link down"),
        (Class::Fabric, "link down on port 9"),
        (Class::Storage, "disk 3 full"),
        (Class::Storage, "the disk is full"),
    ];

    #[test]
    fn words_speak_for_the_class_in_whose_lines_they_stand() {
        let words = Words::learn(LINES.into_iter(), std::iter::empty());
        let of = |line, class: Class| words.opinion(line).map(|of| of[class.index()]);
        assert!(of("link of port 88 is down", Class::Fabric) > of("link of port 88 is down", Class::Storage));
        assert!(of("no room: disk full", Class::Storage) > of("no room: disk full", Class::Fabric));
        assert_eq!(words.opinion("nothing that was ever seen"), None);
    }

    #[test]
    fn a_text_and_its_words_teach_the_same() {
        let (texts, figures) = LINES.split_at(2);
        let figures = figures.iter().map(|(class, text)| (*class, words_of_text(text)));
        let both = Words::learn(texts.iter().copied(), figures);
        assert_eq!(
            both.opinion("disk full"),
            Words::learn(LINES.into_iter(), std::iter::empty()).opinion("disk full")
        );
    }

    #[test]
    fn the_numbers_of_words_stay_as_they_are() {
        // The figures of failures are kept by these numbers.
        let numbers: Vec<String> = words("disk full").iter().map(|of| format!("{of:08x}")).collect();
        assert_eq!(numbers, ["3867e1bd", "5d5b9204", "9dcb29e3", "f5dc67e5", "fc60e4a4"]);
    }

    #[test]
    fn frames_and_the_program_are_no_messages() {
        let log = "boom\n  File \"/a/train.py\", line 3, in step\n    loss.backward()\nValueError: x\n  File \"b.py\", line 1\nKeyError: 'y'";
        assert_eq!(messages(log.lines()).collect::<Vec<_>>(), ["boom", "ValueError: x", "KeyError: 'y'"]);
    }
}
