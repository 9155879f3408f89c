//! What the words of a line speak for when no signature knows the line. Learned when the catalogue is compiled, from its
//! own examples and from lines whose class is known: for each word and each pair of words how much more often it stands in
//! lines of a class than in others.

use std::collections::{BTreeMap, BTreeSet};

use super::class::Class;

/// Classes.
const CLASSES: usize = Class::ALL.len();
/// So many imagined lines of the average kind are added to each class: a word that was seen once proves little.
const SMOOTHING: f64 = 1.2;
/// Lines in which a word must stand to count.
const SEEN: f64 = 2.0;
/// The words of a line that are heard: those that say most, for each class.
const HEARD: usize = 12;
/// The same of a whole text.
const HEARD_OF_TEXT: usize = 25;
/// Words of a line are no independent witnesses: their sum is divided by this.
const DEPENDENCE: f64 = 3.0;

/// The learned words.
#[derive(Clone, Debug, Default)]
pub struct Words {
    odds: BTreeMap<String, [f64; CLASSES]>,
}

impl Words {
    /// Learns from lines of known class.
    pub fn learn<'t>(lines: impl Iterator<Item = (Class, &'t str)>) -> Words {
        let mut seen: BTreeMap<String, [f64; CLASSES]> = BTreeMap::new();
        let mut total = [0.0; CLASSES];
        for (class, line) in lines {
            total[class.index()] += 1.0;
            for word in words(line) {
                seen.entry(word).or_insert([0.0; CLASSES])[class.index()] += 1.0;
            }
        }
        let all: f64 = total.iter().sum();
        let odds = seen.into_iter().filter_map(|(word, counts)| {
            let sum: f64 = counts.iter().sum();
            let usual = SMOOTHING * sum / all.max(1.0);
            let mut odds = [0.0; CLASSES];
            for ((odds, count), lines) in odds.iter_mut().zip(counts).zip(total) {
                let inside = (count + usual) / (lines + SMOOTHING);
                let outside = (sum - count + usual) / (all - lines + SMOOTHING);
                *odds = (inside / outside).ln();
            }
            (sum >= SEEN).then_some((word, odds))
        });
        Words { odds: odds.collect() }
    }

    /// How likely each class is by the words of the line alone; none if no word is known.
    pub fn opinion(&self, line: &str) -> Option<[f64; CLASSES]> {
        self.weighed(words(line).iter(), HEARD)
    }

    /// The words of a line that say something.
    pub fn known(&self, line: &str) -> impl Iterator<Item = String> {
        words(line).into_iter().filter(|word| self.odds.contains_key(word))
    }

    /// How likely each class is by the words of a text.
    pub fn opinion_of<'w>(&self, words: impl Iterator<Item = &'w String>) -> Option<[f64; CLASSES]> {
        self.weighed(words, HEARD_OF_TEXT)
    }

    fn weighed<'w>(&self, words: impl Iterator<Item = &'w String>, most: usize) -> Option<[f64; CLASSES]> {
        let known: Vec<&[f64; CLASSES]> = words.filter_map(|word| self.odds.get(word)).collect();
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

/// Words in lower case without numbers, the parts of joined words, and pairs of neighbours.
fn words(line: &str) -> BTreeSet<String> {
    let lower = line.to_ascii_lowercase();
    let mut found: Vec<&str> = Vec::new();
    for word in lower.split(|letter: char| !(letter.is_ascii_alphabetic() || letter == '_')) {
        let word = word.trim_matches('_');
        if word.len() < 2 {
            continue;
        }
        found.push(word);
        found.extend(word.split('_').filter(|part| part.len() > 2 && *part != word));
    }
    let pairs = found.windows(2).map(|pair| format!("{} {}", pair[0], pair[1]));
    found.iter().map(|word| (*word).to_owned()).chain(pairs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_speak_for_the_class_in_whose_lines_they_stand() {
        let lines = [
            (Class::Fabric, "port 3 link down"),
            (Class::Fabric, "link down on port 9"),
            (Class::Storage, "disk 3 full"),
            (Class::Storage, "the disk is full"),
        ];
        let words = Words::learn(lines.into_iter());
        let of = |line, class: Class| words.opinion(line).map(|of| of[class.index()]);
        assert!(of("link of port 88 is down", Class::Fabric) > of("link of port 88 is down", Class::Storage));
        assert!(of("no room: disk full", Class::Storage) > of("no room: disk full", Class::Fabric));
        assert_eq!(words.opinion("nothing that was ever seen"), None);
    }
}
