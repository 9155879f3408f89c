//! Noise in jobs of few ranks. A single step tells little of it there, so it is taken from all steps that are remembered but
//! the newest: what a rank does now must not speak for or against itself.

use super::history::{History, ROWS};

/// Up to so many ranks are few.
pub(super) const RANKS: usize = 16;

/// One false alarm in some 10^8 looks.
pub(super) const SURE: f32 = 5.8;

/// The newest rows that are left out, and of fewer rows in all the share of them, one in so many.
const NEWEST: usize = 12;
const SHARE: usize = 3;

/// Scores are compared over so many steps: neighbours depend on each other.
const APART: usize = 4;

/// Fewer differences say nothing.
const LEAST: usize = 12;

/// Differences count at most so many of their typical size; and what is left of a normal one's spread then.
const CLIP: f32 = 2.5;
const CLIPPED: f32 = 0.9887;

/// No noise is carried over from step to step by more than this.
const MOST: f32 = 0.97;

/// What noise is like.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Noise {
    /// The standard deviation of a score.
    pub(super) deviation: f32,
    /// The share of it that is carried over to the next step, as much of it as may be.
    carried: f32,
}

impl Noise {
    /// By how much a mean of `steps` scores scatters more than one of independent scores.
    pub(super) fn dependence(self, steps: usize) -> f32 {
        let steps = steps.max(1);
        let (mut sum, mut power) = (1.0_f32, 1.0_f32);
        for lag in 1..steps.min(256) {
            power *= self.carried;
            sum += 2.0 * (1.0 - lag as f32 / steps as f32) * power;
        }
        sum.sqrt()
    }
}

/// What noise was like before the newest steps; none while too little is known.
pub(super) fn measure(history: &History, ranks: usize) -> Option<Noise> {
    let rows = history.seen().min(ROWS);
    let until = rows - NEWEST.min(rows / SHARE);
    let before = |rank: u32| -> Vec<(usize, f32)> {
        history.last_rows(rank).take_while(|(row, _)| *row < until).collect()
    };
    let known: Vec<Vec<(usize, f32)>> = (0..ranks as u32).map(before).collect();
    let deviation = deviation(&known)?;
    // In a pair each is the other's mirror.
    let carried = carried(&known[..if ranks == 2 { 1 } else { ranks }], deviation);
    Some(Noise { deviation, carried })
}

fn deviation(known: &[Vec<(usize, f32)>]) -> Option<f32> {
    let mut moved: Vec<f32> = Vec::new();
    for scores in known {
        moved.extend(pairs(scores, APART).map(|(a, b)| (b - a).abs() / std::f32::consts::SQRT_2));
    }
    if moved.len() < LEAST {
        return None;
    }
    let middle = moved.len() / 2;
    let (_, typical, _) = moved.select_nth_unstable_by(middle, f32::total_cmp);
    let most = *typical * 1.4826 * CLIP;
    let squares: f32 = moved.iter().map(|moved| moved.min(most).powi(2)).sum();
    Some((squares / moved.len() as f32).sqrt() / CLIPPED)
}

/// The correlation of neighbours, with its uncertainty on top.
fn carried(known: &[Vec<(usize, f32)>], deviation: f32) -> f32 {
    let (mut products, mut squares, mut count, mut shortest) = (0.0_f32, 0.0_f32, 0_usize, usize::MAX);
    for scores in known.iter().filter(|scores| scores.len() > 2) {
        let mut levels: Vec<f32> = scores.iter().map(|(_, score)| *score).collect();
        let level = super::score::median(&mut levels);
        let most = 3.0 * deviation;
        let centred: Vec<(usize, f32)> =
            scores.iter().map(|(row, score)| (*row, (score - level).clamp(-most, most))).collect();
        products += pairs(&centred, 1).map(|(a, b)| a * b).sum::<f32>();
        squares += centred.iter().map(|(_, score)| score * score).sum::<f32>();
        count += centred.len();
        shortest = shortest.min(centred.len());
    }
    if squares <= 0.0 {
        return 0.0;
    }
    let measured = products / squares;
    // A level that is taken from the values themselves makes them look less alike than they are.
    let unbiased = measured + (1.0 + 3.0 * measured.max(0.0)) / shortest as f32;
    (unbiased + UNCERTAIN / (count as f32).sqrt()).clamp(0.0, MOST)
}

/// So many standard errors of the correlation are taken for granted.
const UNCERTAIN: f32 = 1.0;

/// Scores that are `apart` steps apart.
fn pairs(scores: &[(usize, f32)], apart: usize) -> impl Iterator<Item = (f32, f32)> + '_ {
    scores.iter().enumerate().filter_map(move |(at, (row, score))| {
        let later = scores[at..].iter().take(apart + 1).find(|(later, _)| *later == row + apart)?;
        Some((*score, later.1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores that carry over a share of themselves; the same for the same seed.
    fn history(ranks: usize, steps: u64, carried: f32) -> History {
        let mut history = History::new(ranks);
        let mut state = 88_172_645_463_325_252_u64;
        let mut normal = || {
            // The sum of twelve is normal enough.
            (0..12).fold(-6.0_f32, |sum, _| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                sum + (state >> 40) as f32 / (1_u64 << 24) as f32
            })
        };
        let mut level = vec![0.0_f32; ranks];
        for step in 0..steps {
            for level in &mut level {
                *level = carried * *level + (1.0 - carried * carried).sqrt() * normal() * 0.01;
            }
            history.push(step, &level, 0.01);
        }
        history
    }

    #[test]
    fn noise_and_what_is_carried_over_are_measured() {
        let plain = measure(&history(8, 64, 0.0), 8).expect("enough is known");
        assert!((0.009..0.011).contains(&plain.deviation), "{plain:?}");
        assert!(plain.dependence(8) < 1.25, "{plain:?}");
        let slow = measure(&history(8, 64, 0.8), 8).expect("enough is known");
        assert!(slow.dependence(16) > 2.0 && slow.dependence(8) < slow.dependence(32), "{slow:?}");
    }

    #[test]
    fn what_a_rank_does_now_is_not_noise() {
        let mut history = history(4, 40, 0.0);
        let before = measure(&history, 4).expect("enough is known").deviation;
        for step in 40..50 {
            history.push(step, &[0.0, 0.5, 0.0, 0.0], 0.01);
        }
        let after = measure(&history, 4).expect("enough is known").deviation;
        assert!((after / before - 1.0).abs() < 0.3, "{before} {after}");
    }

    #[test]
    fn little_says_nothing() {
        assert_eq!(measure(&history(2, 6, 0.0), 2), None);
        assert_eq!(measure(&History::new(4), 4), None);
    }
}
