//! What slowness costs the job: how much shorter its last steps would have been without it.
//!
//! A step takes as long as its slowest rank. So each of the last steps is looked at as it was and as it would have been: without the
//! slow ranks, the slowest of the others sets the pace, be it by noise, by a stage that has more work, or by a hiccup; with work that is
//! spread evenly within each group, the group that has most of it does.

use super::peers::Peers;

/// So many steps are kept, as many as a finding rests on at least. What was before a rank became slow is none of its cost.
const KEPT: usize = 8;

/// The last steps as they were.
#[derive(Clone, Debug)]
pub(super) struct Paces {
    ranks: usize,
    /// How many steps were seen.
    seen: usize,
    /// Row by row: seconds that each rank spent on its own work; NaN where nothing was reported.
    self_times: Vec<f32>,
    /// By row: the step's number and its length in seconds, NaN where that is not known.
    steps: [(u64, f32); KEPT],
}

impl Paces {
    /// Nothing seen yet.
    pub(super) fn new(ranks: usize) -> Paces {
        Paces { ranks, seen: 0, self_times: vec![f32::NAN; ranks * KEPT], steps: [(0, f32::NAN); KEPT] }
    }

    /// Takes in a step: a time for each rank, and the step's length.
    pub(super) fn push(&mut self, step: u64, self_times: &[f32], took: f32) {
        let row = self.seen % KEPT;
        self.self_times[row * self.ranks..(row + 1) * self.ranks].copy_from_slice(self_times);
        self.steps[row] = (step, took);
        self.seen += 1;
    }

    /// By which share steps from `since` on would have been shorter if those `named` had taken no longer than the slowest of the
    /// others. Who `is_slow` too sets no pace: of two that are equally slow each costs what it would cost alone. None if no step's
    /// length is known.
    pub(super) fn without(&self, named: &[u32], is_slow: impl Fn(u32) -> bool, since: u64) -> Option<f32> {
        let lost = |row: &[f32]| {
            let theirs = longest(named.iter().filter_map(|rank| row.get(*rank as usize)).copied());
            let others = (0_u32..).zip(row).filter(|(rank, _)| !is_slow(*rank) && !named.contains(rank));
            let next = longest(others.map(|(_, time)| *time));
            // Where one of them is not known, nothing is known to be lost.
            (theirs - next).max(0.0)
        };
        self.share(since, lost)
    }

    /// By which share steps would have been shorter if the work had been spread evenly within each group. Who `is_slow` is left out.
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

    /// What was lost in the steps from `since` on, as a share of their length.
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

    /// Bytes that are held for all ranks together.
    pub(super) fn bytes(&self) -> usize {
        self.self_times.capacity() * size_of::<f32>()
    }
}

fn is_known(time: f32) -> bool {
    time > 0.0 && time.is_finite()
}

/// The longest of those that are known; NaN if none is.
fn longest(times: impl Iterator<Item = f32>) -> f32 {
    times.filter(|time| is_known(*time)).fold(f32::NAN, f32::max)
}

#[cfg(test)]
mod tests {
    use super::super::peers::Role;
    use super::*;

    /// Eight steps in which each rank took so long, and the step as long as the slowest.
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
    fn the_next_slowest_sets_the_pace_then() {
        assert!(is(alike(&[1.0, 1.0, 1.3, 1.5]).without(&[3], no_one, 0), 0.2 / 1.5));
        assert!(is(alike(&[1.0, 1.0, 1.3, 1.5]).without(&[2], no_one, 0), 0.0), "another one is slower");
    }

    #[test]
    fn a_host_costs_what_its_slowest_rank_does() {
        assert!(is(alike(&[1.0, 1.1, 1.4, 1.5]).without(&[2, 3], no_one, 0), 0.4 / 1.5));
    }

    #[test]
    fn those_that_are_known_to_be_slow_hide_nobodys_cost() {
        let paces = alike(&[1.0, 1.5, 1.0, 1.5]);
        assert!(is(paces.without(&[1], |rank| rank == 3, 0), 0.5 / 1.5));
        assert!(is(paces.without(&[1], no_one, 0), 0.0));
    }

    #[test]
    fn each_step_counts_by_itself() {
        // Every second step another rank hiccups: without the slow one only the other steps would be shorter.
        let mut paces = Paces::new(3);
        for step in 1..=8 {
            let hiccup = if step % 2 == 0 { 1.5 } else { 1.0 };
            paces.push(step, &[1.0, hiccup, 1.5], 1.5);
        }
        assert!(is(paces.without(&[2], no_one, 0), 0.5 * 0.5 / 1.5));
    }

    #[test]
    fn only_steps_since_it_began_count_and_only_the_last_ones_are_kept() {
        let mut paces = Paces::new(2);
        (1..=20).for_each(|step| paces.push(step, &[1.0, 9.0], 9.0));
        (21..=24).for_each(|step| paces.push(step, &[1.0, 1.0], 1.0));
        (25..=28).for_each(|step| paces.push(step, &[1.0, 1.25], 1.25));
        assert!(is(paces.without(&[1], no_one, 25), 0.2));
        assert!(is(paces.without(&[1], no_one, 0), 4.0 * 0.25 / (4.0 + 4.0 * 1.25)));
    }

    #[test]
    fn a_step_may_be_longer_than_work_and_what_was_not_told_costs_nothing() {
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
    fn work_that_is_spread_evenly_takes_as_long_as_the_group_that_has_most() {
        let group = |group| Role { group, ..Role::default() };
        assert!(is(alike(&[1.0, 1.2, 1.4, 0.8]).if_even(&Peers::alike(4), no_one), (1.4 - 1.1) / 1.4));
        // Stages that differ are no uneven spread, and a slow rank is told by itself.
        let stages = Peers::new([0, 0, 1, 1].map(group).to_vec());
        assert!(is(alike(&[1.0, 1.0, 2.0, 2.0]).if_even(&stages, no_one), 0.0));
        assert!(is(alike(&[1.0, 1.0, 2.0, 4.0]).if_even(&stages, |rank| rank == 3), 0.0));
    }
}
