//! The cost of slowness: how much shorter the last steps of the job would have been without it.
//!
//! A step takes as long as its slowest rank. So each of the last steps is compared with what it would have been.
//! Without the slow ranks, the slowest of the others sets the pace, because of noise, a stage with more work, or a
//! hiccup. With even work within each group, the group with the most work sets it.

use super::peers::Peers;

/// The number of steps that are kept: the least number that a finding is based on. Steps before a rank became slow
/// are not part of its cost.
const MAX_PACES: usize = 8;

/// The last steps as measured.
#[derive(Clone, Debug)]
pub(super) struct Paces {
    ranks: usize,
    /// How many steps were seen.
    seen: usize,
    /// Row by row: seconds that each rank spent on its own work; NaN if not reported.
    self_times: Vec<f32>,
    /// By row: the step's number and its length in seconds, NaN if unknown.
    steps: [(u64, f32); MAX_PACES],
}

impl Paces {
    /// Nothing seen yet.
    pub(super) fn new(ranks: usize) -> Paces {
        Paces {
            ranks,
            seen: 0,
            self_times: vec![f32::NAN; ranks * MAX_PACES],
            steps: [(0, f32::NAN); MAX_PACES],
        }
    }

    /// Adds a step: a time for each rank, and the step's length.
    pub(super) fn push(&mut self, step: u64, self_times: &[f32], took: f32) {
        let row = self.seen % MAX_PACES;
        self.self_times[row * self.ranks..(row + 1) * self.ranks].copy_from_slice(self_times);
        self.steps[row] = (step, took);
        self.seen += 1;
    }

    /// The share by which steps from `since` on would have been shorter if the ranks `named` had taken no longer than
    /// the slowest of the others. Other ranks that are slow (`is_slow`) set no pace: of two equally slow ranks each
    /// costs what it would cost alone. `None` if no step's length is known.
    pub(super) fn without(&self, named: &[u32], is_slow: impl Fn(u32) -> bool, since: u64) -> Option<f32> {
        let lost = |row: &[f32]| {
            let theirs = longest(named.iter().filter_map(|rank| row.get(*rank as usize)).copied());
            let others = (0_u32..).zip(row).filter(|(rank, _)| !is_slow(*rank) && !named.contains(rank));
            let next = longest(others.map(|(_, time)| *time));
            // If one of them is unknown, the loss counts as 0.
            (theirs - next).max(0.0)
        };
        self.share(since, lost)
    }

    /// The share by which steps would have been shorter with even work within each group. Ranks that are slow
    /// (`is_slow`) are left out.
    pub(super) fn if_even(&self, peers: &Peers, is_slow: impl Fn(u32) -> bool) -> Option<f32> {
        let lost = |row: &[f32]| {
            let known = |group: &[u32]| -> Vec<f32> {
                let healthy = group.iter().filter(|rank| !is_slow(**rank));
                healthy
                    .filter_map(|rank| row.get(*rank as usize))
                    .copied()
                    .filter(|time| is_known(*time))
                    .collect()
            };
            let groups: Vec<Vec<f32>> = peers.groups().map(known).filter(|times| !times.is_empty()).collect();
            let slowest = longest(groups.iter().flatten().copied());
            let even = longest(groups.iter().map(|times| times.iter().sum::<f32>() / times.len() as f32));
            (slowest - even).max(0.0)
        };
        self.share(0, lost)
    }

    /// The loss in the steps from `since` on, as a share of their length.
    fn share(&self, since: u64, lost: impl Fn(&[f32]) -> f32) -> Option<f32> {
        let rows = self.self_times.chunks_exact(self.ranks.max(1)).zip(&self.steps).take(self.seen);
        let counts = |step: u64, took: f32| step >= since && is_known(took);
        let (mut sum, mut length) = (0.0, 0.0);
        for (row, (_, took)) in rows.filter(|(_, (step, took))| counts(*step, *took)) {
            sum += lost(row);
            length += took;
        }
        (length > 0.0).then(|| (sum / length).clamp(0.0, 1.0))
    }

    /// The memory used for all ranks together, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.self_times.capacity() * size_of::<f32>()
    }
}

fn is_known(time: f32) -> bool {
    time > 0.0 && time.is_finite()
}

/// The longest known time; NaN if none is known.
fn longest(times: impl Iterator<Item = f32>) -> f32 {
    times.filter(|time| is_known(*time)).fold(f32::NAN, f32::max)
}

#[cfg(test)]
mod tests {
    use super::super::peers::Role;
    use super::*;

    /// Eight steps in which each rank takes this long, and the step as long as the slowest.
    fn alike(self_times: &[f32]) -> Paces {
        let mut paces = Paces::new(self_times.len());
        (1..=8).for_each(|step| paces.push(step, self_times, longest(self_times.iter().copied())));
        paces
    }

    fn no_one(_rank: u32) -> bool {
        false
    }

    fn is(share: Option<f32>, expected: f32) -> bool {
        share.is_some_and(|share| (share - expected).abs() < 1e-3)
    }

    #[test]
    fn a_rank_of_a_pair_costs_what_it_takes_longer_than_the_other() {
        assert!(is(alike(&[1.0, 1.5]).without(&[1], no_one, 0), 0.5 / 1.5));
    }

    #[test]
    fn without_the_slow_rank_the_next_slowest_sets_the_pace() {
        assert!(is(alike(&[1.0, 1.0, 1.3, 1.5]).without(&[3], no_one, 0), 0.2 / 1.5));
        assert!(is(alike(&[1.0, 1.0, 1.3, 1.5]).without(&[2], no_one, 0), 0.0), "another one is slower");
    }

    #[test]
    fn a_host_costs_what_its_slowest_rank_does() {
        assert!(is(alike(&[1.0, 1.1, 1.4, 1.5]).without(&[2, 3], no_one, 0), 0.4 / 1.5));
    }

    #[test]
    fn ranks_known_to_be_slow_hide_no_other_ranks_cost() {
        let paces = alike(&[1.0, 1.5, 1.0, 1.5]);
        assert!(is(paces.without(&[1], |rank| rank == 3, 0), 0.5 / 1.5));
        assert!(is(paces.without(&[1], no_one, 0), 0.0));
    }

    #[test]
    fn each_step_counts_by_itself() {
        // In every second step another rank hiccups: without the slow one only the other steps would be shorter.
        let mut paces = Paces::new(3);
        for step in 1..=8 {
            let hiccup = if step % 2 == 0 { 1.5 } else { 1.0 };
            paces.push(step, &[1.0, hiccup, 1.5], 1.5);
        }
        assert!(is(paces.without(&[2], no_one, 0), 0.5 * 0.5 / 1.5));
    }

    #[test]
    fn only_steps_since_the_onset_count_and_only_the_last_ones_are_kept() {
        let mut paces = Paces::new(2);
        (1..=20).for_each(|step| paces.push(step, &[1.0, 9.0], 9.0));
        (21..=24).for_each(|step| paces.push(step, &[1.0, 1.0], 1.0));
        (25..=28).for_each(|step| paces.push(step, &[1.0, 1.25], 1.25));
        assert!(is(paces.without(&[1], no_one, 25), 0.2));
        assert!(is(paces.without(&[1], no_one, 0), 4.0 * 0.25 / (4.0 + 4.0 * 1.25)));
    }

    #[test]
    fn a_step_may_be_longer_than_work_and_unreported_times_cost_nothing() {
        let mut paces = Paces::new(2);
        assert_eq!(paces.without(&[1], no_one, 0), None, "nothing was seen");
        paces.push(1, &[1.0, 1.5], f32::NAN);
        assert_eq!(paces.without(&[1], no_one, 0), None, "no length is known");
        paces.push(2, &[1.0, 1.5], 3.0);
        assert!(is(paces.without(&[1], no_one, 0), 0.5 / 3.0));
        paces.push(3, &[f32::NAN, 1.5], 3.0);
        assert!(is(paces.without(&[1], no_one, 0), 0.5 / 6.0));
    }

    #[test]
    fn even_work_takes_as_long_as_the_group_with_the_most() {
        let group = |group| Role { group, ..Role::default() };
        assert!(is(alike(&[1.0, 1.2, 1.4, 0.8]).if_even(&Peers::alike(4), no_one), (1.4 - 1.1) / 1.4));
        // Stages that differ are not an uneven spread, and a slow rank is reported separately.
        let stages = Peers::new([0, 0, 1, 1].map(group).to_vec());
        assert!(is(alike(&[1.0, 1.0, 2.0, 2.0]).if_even(&stages, no_one), 0.0));
        assert!(is(alike(&[1.0, 1.0, 2.0, 4.0]).if_even(&stages, |rank| rank == 3), 0.0));
    }
}
