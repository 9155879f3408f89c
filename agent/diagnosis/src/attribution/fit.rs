//! The formula of the learned words, shared by training and inference.

use super::common::CLASSES;

/// Texts whose vector of word rarities is shorter than this are not scaled up. The length corresponds to some four rare words with
/// their stems and pairs. Scaled to full length, "gave up after" would name a cause.
const SHORTEST: f32 = 24.0;

/// Normalizes the weights so that a long text counts no more for its length, and a line of few, common words counts less.
pub fn of_one_length<T>(mut words: Vec<(T, f32)>) -> Vec<(T, f32)> {
    let length = words.iter().map(|(_, rarity)| rarity * rarity).sum::<f32>().sqrt();
    words.iter_mut().for_each(|(_, rarity)| *rarity /= length.max(SHORTEST));
    words
}

/// The softmax over the weights of all words.
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
