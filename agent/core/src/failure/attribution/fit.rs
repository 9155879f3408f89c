//! The formula of the learned words, for learning as for reading.

use super::common::CLASSES;

/// The length, as a vector of the rarities of its words, below which a text is as short as its words make it: some four rare words
/// with their stems and pairs. Scaled up to the length of others, "gave up after" would name a cause.
const SHORTEST: f32 = 24.0;

/// Scaled so that a long text says no more by its length, and a line of few and common words less.
pub fn of_one_length<T>(mut words: Vec<(T, f32)>) -> Vec<(T, f32)> {
    let length = words.iter().map(|(_, rarity)| rarity * rarity).sum::<f32>().sqrt();
    words.iter_mut().for_each(|(_, rarity)| *rarity /= length.max(SHORTEST));
    words
}

/// The softmax of what all words say.
pub fn likely<'w>(
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
