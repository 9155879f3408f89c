//! Compares digests of parameters that should be equal.
//!
//! Which ranks hold the same parameters is learned: 64-bit digests are not equal by chance. Shards differ from the
//! first comparison on and are never replicas. Replicas are equal in classes of one size, because meshes are regular.
//! One rank that differs from a majority of equal ones is not a regular mesh: that rank is wrong.

use std::collections::{BTreeMap, BTreeSet};

/// Which ranks hold the same parameters, and until when they agreed.
#[derive(Clone, Debug, Default)]
pub(super) struct Replicas {
    /// The group of each rank, if learned. Ranks without replicas have none.
    groups: Option<Vec<Option<u32>>>,
    /// By group: the last step at which all agreed.
    agreed: BTreeMap<u32, u64>,
    /// The last step at which all groups agreed, while none had ever differed.
    vouched: Option<u64>,
    /// Whether replicas differed in this attempt. Later comparisons prove nothing then.
    differed: bool,
}

/// Replicas that do not agree at a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DigestDivergence {
    pub(super) group: u32,
    /// The ranks that differ from the majority; all ranks if there is none.
    pub(super) ranks: Vec<u32>,
    /// How many ranks agree with each other, if they are the majority.
    pub(super) majority: Option<usize>,
    pub(super) total: usize,
    pub(super) last_agreed: Option<u64>,
}

impl Replicas {
    /// The last step up to which no replica is known to have differed.
    pub(super) fn vouched(&self) -> Option<u64> {
        self.vouched
    }

    /// Compares the digests of a step. Returns the groups that agree, and those that do not.
    pub(super) fn compare(
        &mut self,
        step: u64,
        digests: &[Option<u64>],
    ) -> (Vec<u32>, Vec<DigestDivergence>) {
        let (mut whole, mut splits) = (Vec::new(), Vec::new());
        let Some(groups) = self.groups.clone().or_else(|| self.learn(digests)) else {
            return (whole, splits);
        };
        let mut by_group: BTreeMap<u32, BTreeMap<u64, Vec<u32>>> = BTreeMap::new();
        for (rank, (group, digest)) in groups.iter().zip(digests).enumerate() {
            if let (Some(group), Some(digest)) = (group, digest) {
                by_group.entry(*group).or_default().entry(*digest).or_default().push(rank as u32);
            }
        }
        for (group, classes) in by_group {
            let total = classes.values().map(Vec::len).sum();
            if total < 2 {
                continue;
            }
            if classes.len() == 1 {
                let members = groups.iter().filter(|member| **member == Some(group)).count();
                // A replica without a report is unknown: a checkpoint of this step is not proven good.
                if total < members {
                    continue;
                }
                self.agreed.insert(group, step);
                whole.push(group);
                continue;
            }
            let largest = classes.values().map(Vec::len).max().unwrap_or(0);
            let majority = (largest * 2 > total).then_some(largest);
            let outside = |class: &&Vec<u32>| majority.is_none() || class.len() != largest;
            let mut ranks: Vec<u32> = classes.values().filter(outside).flatten().copied().collect();
            ranks.sort_unstable();
            splits.push(DigestDivergence {
                group,
                ranks,
                majority,
                total,
                last_agreed: self.agreed.get(&group).copied(),
            });
        }
        self.differed |= !splits.is_empty();
        if !self.differed {
            let all: BTreeSet<u32> = groups.iter().flatten().copied().collect();
            let agreed = all.iter().map(|group| self.agreed.get(group).copied());
            self.vouched = agreed.collect::<Option<Vec<u64>>>().and_then(|steps| steps.into_iter().min());
        }
        (whole, splits)
    }

    /// Learns which ranks are replicas from a comparison with reports of all ranks.
    fn learn(&mut self, digests: &[Option<u64>]) -> Option<Vec<Option<u32>>> {
        let mut classes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (rank, digest) in digests.iter().enumerate() {
            classes.entry((*digest)?).or_default().push(rank);
        }
        let largest = classes.values().map(Vec::len).max().filter(|largest| *largest > 1)?;
        let mut groups = vec![None; digests.len()];
        if classes.values().all(|class| class.len() == largest) {
            for (group, class) in classes.values().enumerate() {
                class.iter().for_each(|rank| groups[*rank] = Some(group as u32));
            }
        } else if largest * 2 > digests.len() {
            groups.fill(Some(0));
        } else {
            // Irregular and without a majority: the groups are unknown.
            return None;
        }
        self.groups = Some(groups.clone());
        Some(groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(digests: &[u64]) -> Vec<Option<u64>> {
        digests.iter().copied().map(Some).collect()
    }

    #[test]
    fn the_majority_names_the_rank() {
        let mut replicas = Replicas::default();
        assert_eq!(replicas.compare(10, &some(&[5, 5, 5, 5])), (vec![0], vec![]));
        let (_, splits) = replicas.compare(20, &some(&[6, 6, 7, 6]));
        assert_eq!(
            splits,
            [DigestDivergence {
                group: 0,
                ranks: vec![2],
                majority: Some(3),
                total: 4,
                last_agreed: Some(10)
            }]
        );
    }

    #[test]
    fn with_two_replicas_neither_is_named() {
        let mut replicas = Replicas::default();
        replicas.compare(1, &some(&[5, 5]));
        let (_, splits) = replicas.compare(2, &some(&[6, 7]));
        assert_eq!((splits[0].ranks.as_slice(), splits[0].majority), ([0, 1].as_slice(), None));
    }

    #[test]
    fn shards_differ_by_design_and_are_compared_with_their_own_replicas() {
        let mut shards = Replicas::default();
        for step in 0..5 {
            let digests: Vec<u64> = (0..8).map(|rank| rank * 100 + step).collect();
            assert_eq!(shards.compare(step, &some(&digests)), (vec![], vec![]), "no rank has a replica");
        }
        // Two shards with three replicas each.
        let mut both = Replicas::default();
        both.compare(1, &some(&[1, 2, 1, 2, 1, 2]));
        let (whole, splits) = both.compare(2, &some(&[3, 4, 3, 4, 3, 9]));
        assert_eq!((whole, splits[0].ranks.as_slice()), (vec![0], [5].as_slice()));
    }

    #[test]
    fn a_rank_that_is_wrong_from_the_start_is_named() {
        let (_, splits) = Replicas::default().compare(1, &some(&[5, 5, 5, 8, 5, 5, 5, 5]));
        assert_eq!((splits[0].ranks.as_slice(), splits[0].last_agreed), ([3].as_slice(), None));
    }

    #[test]
    fn all_agree_only_if_all_have_reported() {
        let mut replicas = Replicas::default();
        replicas.compare(9, &some(&[5, 5, 5]));
        assert_eq!(replicas.compare(11, &[Some(6), Some(6), None]), (vec![], vec![]));
        let (_, splits) = replicas.compare(13, &some(&[7, 7, 8]));
        assert_eq!((splits[0].ranks.as_slice(), splits[0].last_agreed), ([2].as_slice(), Some(9)));
    }

    #[test]
    fn missing_digests_are_not_compared() {
        let mut replicas = Replicas::default();
        assert_eq!(replicas.compare(1, &[Some(1), None, Some(2)]), (vec![], vec![]));
        replicas.compare(2, &some(&[1, 1, 1]));
        assert_eq!(replicas.compare(3, &[Some(4), None, None]), (vec![], vec![]));
        let mut known = Replicas { groups: Some(vec![Some(0), Some(0), Some(1)]), ..Replicas::default() };
        assert_eq!(known.compare(1, &some(&[1, 1, 2])).0, [0]);
    }
}
