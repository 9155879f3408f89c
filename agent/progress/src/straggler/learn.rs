//! Learns which ranks do the same work from their first steps, if it is not declared.
//!
//! Pipeline stages are blocks of ranks of one size, either consecutive (Megatron-LM) or interleaved. If a job has
//! stages with different work, the ranks of a stage agree with each other much better than the stages do. A single
//! slow rank does not agree with its block, so it never counts as a stage.

use super::score::median;

/// Fewer steps are not sufficient.
pub const MIN_STEPS: usize = 8;

/// Groups learned later would hide ranks that became slow.
pub const MAX_STEPS: usize = 64;

/// Stages that differ by less do not matter.
const MIN_STAGE_RATIO: f32 = 1.08;

/// Ranks of a stage must agree better than stages do by this factor.
const TIGHTER: f32 = 4.0;

/// The stage of each rank, learned from self times with one row per step. `None` if the ranks look alike, or match no
/// known order.
pub fn stages(rows: &[Vec<f32>]) -> Option<Vec<u32>> {
    let ranks = rows.first()?.len();
    if rows.len() < MIN_STEPS || ranks < 4 {
        return None;
    }
    let levels: Vec<f32> = (0..ranks).map(|rank| level(rows, rank)).collect();
    if levels.iter().any(|level| !level.is_finite()) {
        return None;
    }
    let sizes = (2..=ranks / 2).filter(|stages| ranks.is_multiple_of(*stages));
    sizes.flat_map(|stages| [Order::Blocks, Order::Turns].map(|order| (stages, order))).find_map(
        |(stages, order)| {
            let stage_of: Vec<u32> = (0..ranks).map(|rank| order.stage(rank, ranks, stages) as u32).collect();
            fits(&levels, &stage_of, stages).then_some(stage_of)
        },
    )
}

/// How stages are assigned to ranks.
#[derive(Clone, Copy)]
enum Order {
    Blocks,
    Turns,
}

impl Order {
    fn stage(self, rank: usize, ranks: usize, stages: usize) -> usize {
        match self {
            Order::Blocks => rank / (ranks / stages),
            Order::Turns => rank % stages,
        }
    }
}

/// ln of a rank's typical self time relative to the step's median.
fn level(rows: &[Vec<f32>], rank: usize) -> f32 {
    let relative = |row: &Vec<f32>| {
        let usual = median(&mut row.iter().copied().filter(|time| *time > 0.0).collect::<Vec<_>>());
        (row[rank] / usual).ln()
    };
    median(&mut rows.iter().map(relative).filter(|level| level.is_finite()).collect::<Vec<_>>())
}

/// Whether the ranks of each stage agree, and the stages do not.
fn fits(levels: &[f32], stage_of: &[u32], stages: usize) -> bool {
    let (mut within, mut middles) = (0.0_f32, Vec::with_capacity(stages));
    for stage in 0..stages as u32 {
        let mut members: Vec<f32> = levels
            .iter()
            .zip(stage_of)
            .filter(|(_, own_stage)| **own_stage == stage)
            .map(|(level, _)| *level)
            .collect();
        members.sort_unstable_by(f32::total_cmp);
        middles.push(median(&mut members.clone()));
        // A larger stage may have one slow rank, which is found among its peers.
        let last = if members.len() >= 4 { members.len() - 2 } else { members.len() - 1 };
        within = within.max(members[last] - members[0]);
    }
    let (low, high) =
        middles.iter().fold((f32::MAX, f32::MIN), |(low, high), at| (low.min(*at), high.max(*at)));
    high - low > MIN_STAGE_RATIO.ln() && (high - low) > within * TIGHTER
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(work: &[f32]) -> Vec<Vec<f32>> {
        let wobble = |step: usize, rank: usize| 1.0 + ((step * 31 + rank * 17) % 11) as f32 / 11.0 * 0.02;
        (0..12)
            .map(|step| work.iter().enumerate().map(|(rank, own)| own * wobble(step, rank)).collect())
            .collect()
    }

    #[test]
    fn stages_of_different_work_are_learned() {
        assert_eq!(
            stages(&rows(&[1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3])),
            Some(vec![0, 0, 0, 0, 1, 1, 1, 1])
        );
        assert_eq!(
            stages(&rows(&[1.0, 1.0, 1.3, 1.3, 1.0, 1.0, 1.1, 1.1])),
            Some(vec![0, 0, 1, 1, 2, 2, 3, 3])
        );
        assert_eq!(stages(&rows(&[1.0, 1.3, 1.0, 1.3, 1.0, 1.3])), Some(vec![0, 1, 0, 1, 0, 1]));
    }

    #[test]
    fn a_slow_rank_is_no_stage() {
        assert_eq!(stages(&rows(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.3, 1.0, 1.0])), None);
        assert_eq!(stages(&rows(&[1.0, 1.0, 1.4, 1.0])), None);
    }

    #[test]
    fn one_slow_rank_in_a_stage_does_not_hide_the_stages() {
        let learned = stages(&rows(&[1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 1.8]));
        assert_eq!(learned, Some(vec![0, 0, 0, 0, 1, 1, 1, 1]));
    }

    #[test]
    fn ranks_that_are_alike_or_few_have_no_stages() {
        assert_eq!(stages(&rows(&[1.0; 8])), None);
        assert_eq!(stages(&rows(&[1.0, 1.3])), None);
        assert_eq!(stages(&rows(&[1.0, 1.02, 1.05, 1.01, 0.99, 1.04])), None);
    }
}
