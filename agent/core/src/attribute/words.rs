//! What words speak for. Counted when the catalogue is compiled, in its own examples, in lines whose class is known and in the
//! failures of `agent/catalog/cases`: for each word and each pair of words how much more often it stands in texts of a class
//! than in others. A naive Bayes classifier.

use std::collections::{BTreeMap, BTreeSet};

use super::class::Class;
use super::traceback;

/// Classes.
const CLASSES: usize = Class::ALL.len();
/// So many imagined texts of the average kind are added to each class: a word that was seen once proves little.
const SMOOTHING: f64 = 1.2;
/// Texts in which a word must stand to count.
const SEEN: f64 = 2.0;
/// The words of a line that are heard: those that say most, for each class.
const HEARD: usize = 12;
/// The same of a whole text.
const HEARD_OF_TEXT: usize = 25;
/// Words of a line are no independent witnesses: their sum is divided by this.
const DEPENDENCE: f64 = 3.0;

/// A word or a pair of words by its number: there are some fifty thousand, and what they are is never asked.
pub type Word = u64;

/// The counted words.
#[derive(Clone, Debug, Default)]
pub struct Words {
    seen: BTreeMap<Word, [f64; CLASSES]>,
    texts: [f64; CLASSES],
}

impl Words {
    /// Learns from texts of known class.
    pub fn learn<'t>(texts: impl Iterator<Item = (Class, &'t str)>) -> Words {
        let mut words = Words::default();
        for (class, text) in texts {
            words.count(class, text, 1.0);
        }
        words
    }

    /// Learns from one more text.
    pub fn learn_of(&mut self, class: Class, text: &str) {
        self.count(class, text, 1.0);
    }

    /// What it would know had it never seen these texts.
    pub fn forgetting<'t>(&self, texts: impl Iterator<Item = (Class, &'t str)>) -> Words {
        let mut words = self.clone();
        for (class, text) in texts {
            words.count(class, text, -1.0);
        }
        words
    }

    fn count(&mut self, class: Class, text: &str, times: f64) {
        self.texts[class.index()] += times;
        for word in words_of_text(text) {
            self.seen.entry(word).or_default()[class.index()] += times;
        }
    }

    /// How likely each class is by the words of the line alone; none if no word is known.
    pub fn opinion(&self, line: &str) -> Option<[f64; CLASSES]> {
        self.weighed(words(line).iter(), HEARD)
    }

    /// The words of a line that say something.
    pub fn known(&self, line: &str) -> impl Iterator<Item = Word> {
        words(line).into_iter().filter(|word| self.counts(*word).is_some())
    }

    /// How likely each class is by the words of a text.
    pub fn opinion_of<'w>(&self, words: impl Iterator<Item = &'w Word>) -> Option<[f64; CLASSES]> {
        self.weighed(words, HEARD_OF_TEXT)
    }

    fn counts(&self, word: Word) -> Option<&[f64; CLASSES]> {
        self.seen.get(&word).filter(|counts| counts.iter().sum::<f64>() >= SEEN)
    }

    /// For each class by how much likelier it is, in log-odds, where the word stands.
    fn odds(&self, word: Word) -> Option<[f64; CLASSES]> {
        let counts = self.counts(word)?;
        let (sum, all): (f64, f64) = (counts.iter().sum(), self.texts.iter().sum());
        let usual = SMOOTHING * sum / all.max(1.0);
        let mut odds = [0.0; CLASSES];
        for ((odds, count), texts) in odds.iter_mut().zip(counts).zip(self.texts) {
            let inside = (count + usual) / (texts + SMOOTHING);
            let outside = (sum - count + usual) / (all - texts + SMOOTHING);
            *odds = (inside / outside).ln();
        }
        Some(odds)
    }

    fn weighed<'w>(&self, words: impl Iterator<Item = &'w Word>, most: usize) -> Option<[f64; CLASSES]> {
        let known: Vec<[f64; CLASSES]> = words.filter_map(|word| self.odds(*word)).collect();
        if known.is_empty() {
            return None;
        }
        let mut sums = [0.0; CLASSES];
        for (class, sum) in sums.iter_mut().enumerate() {
            let mut heard: Vec<f64> = known.iter().map(|odds| odds[class]).collect();
            heard.sort_by(|a, b| b.abs().total_cmp(&a.abs()));
            *sum = heard.into_iter().take(most).sum::<f64>() / DEPENDENCE;
        }
        let highest = sums.into_iter().fold(f64::NEG_INFINITY, f64::max);
        let likely = sums.map(|sum| (sum - highest).exp());
        let all: f64 = likely.iter().sum();
        Some(likely.map(|of| of / all))
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

/// Words in lower case without numbers, the parts of joined words, and pairs of neighbours.
fn words(line: &str) -> BTreeSet<Word> {
    let mut found: Vec<Word> = Vec::new();
    for word in line.split(|letter: char| !(letter.is_ascii_alphabetic() || letter == '_')) {
        let word = word.trim_matches('_');
        if word.len() < 2 {
            continue;
        }
        found.push(number(word));
        found.extend(word.split('_').filter(|part| part.len() > 2 && *part != word).map(number));
    }
    let pairs = found.windows(2).map(|pair| pair[0].rotate_left(23) ^ pair[1]);
    found.iter().copied().chain(pairs).collect()
}

/// FNV-1a of a word in lower case.
fn number(word: &str) -> Word {
    word.bytes().fold(0xcbf2_9ce4_8422_2325, |number, byte| {
        (number ^ u64::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0000_01b3)
    })
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
        let words = Words::learn(LINES.into_iter());
        let of = |line, class: Class| words.opinion(line).map(|of| of[class.index()]);
        assert!(of("link of port 88 is down", Class::Fabric) > of("link of port 88 is down", Class::Storage));
        assert!(of("no room: disk full", Class::Storage) > of("no room: disk full", Class::Fabric));
        assert_eq!(words.opinion("nothing that was ever seen"), None);
    }

    #[test]
    fn what_is_forgotten_was_never_seen() {
        let words = Words::learn(LINES.into_iter()).forgetting(LINES[..2].iter().copied());
        assert_eq!(words.opinion("link down"), None);
        assert_eq!(words.opinion("disk full"), Words::learn(LINES[2..].iter().copied()).opinion("disk full"));
    }

    #[test]
    fn frames_and_the_program_are_no_messages() {
        let log = "boom\n  File \"/a/train.py\", line 3, in step\n    loss.backward()\nValueError: x\n  File \"b.py\", line 1\nKeyError: 'y'";
        assert_eq!(messages(log.lines()).collect::<Vec<_>>(), ["boom", "ValueError: x", "KeyError: 'y'"]);
    }
}
