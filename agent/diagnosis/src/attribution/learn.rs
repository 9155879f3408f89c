//! Learns which classes words indicate: a softmax regression over words, their parts and stems, and pairs of neighbours. The build
//! script (`build.rs`) runs it on the examples of the catalog, on lines of known class and on the figures of failures in
//! `agent/catalog/failures`. The program contains only the result, in the form that [`super::words`] reads in place.

use std::collections::{BTreeMap, BTreeSet};

use super::common::CLASSES;
use super::fit::{likely, of_one_length};
use super::wording::{Word, words_of_text};

/// The minimum number of texts with a word.
const SEEN: u32 = 2;
/// Training epochs. More epochs overfit.
const ROUNDS: u32 = 8;
/// Initial rounds whose weights are not averaged. The mean of later rounds depends less on the order of the texts.
const UNKEPT: u32 = 2;
/// The learning rate of the first round.
const STEP: f32 = 2.5;
/// The decay of the learning rate per round.
const COOLING: f32 = 0.1;
/// The learning rate of the bias relative to that of a word.
const BASE_STEP: f32 = 0.1;

/// What was learned.
pub struct Learned {
    texts: u32,
    base: [f32; CLASSES],
    /// For each word the number of texts that contain it, and its weight for each class.
    words: BTreeMap<Word, (u32, [f32; CLASSES])>,
}

/// Learns from texts of known class, and from failures of which only the words are known. A class is its index in the list of classes.
pub fn learn<'t>(
    texts: impl Iterator<Item = (usize, &'t str)>,
    figures: impl Iterator<Item = (usize, BTreeSet<Word>)>,
) -> Learned {
    let texts: Vec<(usize, BTreeSet<Word>)> =
        texts.map(|(class, text)| (class, words_of_text(text))).chain(figures).collect();
    let mut seen: BTreeMap<Word, u32> = BTreeMap::new();
    for word in texts.iter().flat_map(|(_, words)| words) {
        *seen.entry(*word).or_default() += 1;
    }
    let counted: BTreeMap<Word, u32> = seen.into_iter().filter(|(_, times)| *times >= SEEN).collect();
    let place: BTreeMap<Word, usize> = counted.keys().copied().zip(0..).collect();
    let rarity: Vec<f32> = counted.values().map(|times| (texts.len() as f32 / *times as f32).ln()).collect();
    let lessons: Vec<(usize, Vec<(usize, f32)>)> = texts
        .iter()
        .map(|(class, words)| {
            let known = words.iter().filter_map(|word| place.get(word));
            (*class, of_one_length(known.map(|at| (*at, rarity[*at])).collect()))
        })
        .collect();
    let (says, base) = fitted(&lessons, rarity.len());
    let words = counted.into_iter().zip(says).map(|((word, times), says)| (word, (times, says))).collect();
    Learned { texts: texts.len() as u32, base, words }
}

impl Learned {
    /// Encodes the table: the number of texts, the number of words, the step of the weights, the bias, all words in ascending order,
    /// the number of texts that contain each word, and the weights of each word in steps. All numbers are little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let weights = || self.words.values().flat_map(|(_, says)| says);
        let step =
            weights().fold(f32::MIN_POSITIVE, |most, weight| most.max(weight.abs())) / f32::from(i16::MAX);
        let mut table = Vec::new();
        table.extend(self.texts.to_le_bytes());
        table.extend((self.words.len() as u32).to_le_bytes());
        table.extend(step.to_le_bytes());
        self.base.iter().for_each(|base| table.extend(base.to_le_bytes()));
        self.words.keys().for_each(|word| table.extend(word.to_le_bytes()));
        self.words
            .values()
            .for_each(|(times, _)| table.extend((*times).min(u32::from(u16::MAX)).to_le_bytes()[..2].iter()));
        weights().for_each(|weight| table.extend(((weight / step).round() as i16).to_le_bytes()));
        table
    }
}

/// Fits the weights to the classes of the lessons by stochastic gradient descent.
fn fitted(lessons: &[(usize, Vec<(usize, f32)>)], words: usize) -> (Vec<[f32; CLASSES]>, [f32; CLASSES]) {
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
            wrong[*class] -= 1.0;
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

/// A generator with a fixed seed, so that each build learns the same.
struct Dice(u64);

impl Dice {
    /// A number from 0 to `highest`, inclusive.
    fn up_to(&mut self, highest: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or_default() % (highest + 1)
    }
}
