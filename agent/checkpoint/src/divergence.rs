//! Detects ranks that declared identical shards and saved different ones: a sign of silent data corruption. It is
//! visible across hosts, because agents exchange the roots of what their ranks saved.
//!
//! Only shards of the same step, attempt and launch are compared, so that recomputed steps do not look like corruption.

use std::collections::{BTreeMap, BTreeSet};

use crate::inventory::StepKey;
use crate::owner;

/// The component of observations of checkpoints across hosts. Its value `uid` is the user of the run.
pub const REPLICAS: &str = "checkpoint.replicas";

/// What one rank saved, as reported by its own agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedShard {
    /// The step.
    pub key: StepKey,
    /// The group of ranks that should have saved the same.
    pub group: String,
    /// The rank.
    pub rank: u32,
    /// The host on which it runs.
    pub holder: String,
    /// The root over what it saved.
    pub root: String,
}

/// A rank of a group whose shards differ.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// The rank.
    pub rank: u32,
    /// Its host.
    pub holder: String,
    /// The root over what it saved.
    pub root: String,
}

/// A step for which ranks saved different bytes although they declared identical shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaDivergence {
    /// The step.
    pub key: StepKey,
    /// The group that they declared.
    pub group: String,
    /// All known members that were compared, by rank.
    pub members: Vec<Member>,
    /// The ranks that differ from a majority; empty if there is no majority.
    pub apart: Vec<u32>,
}

impl ReplicaDivergence {
    /// The problem in one sentence: step, ranks and hosts.
    pub fn sentence(&self) -> String {
        let named = |apart: bool| {
            let members = self.members.iter().filter(|member| self.apart.contains(&member.rank) == apart);
            let names: Vec<String> =
                members.map(|member| format!("rank {} on {}", member.rank, member.holder)).collect();
            names.join(", ")
        };
        // Users know the run by its name without the owner.
        let (step, run, group) = (self.key.step, owner::name(self.key.run_id()), &self.group);
        if self.apart.is_empty() {
            return format!(
                "step {step} of {run}: {} save the same ({group}) and saved different bytes: possible silent data corruption; \
                 which copy is right is unknown",
                named(false)
            );
        }
        format!(
            "step {step} of {run}: {} saved other bytes than {}, which save the same ({group}): possible silent data corruption",
            named(true),
            named(false)
        )
    }
}

/// The steps with shards that should be identical and differ. A rank with two roots, because it saved the step twice,
/// is not compared: which of them corresponds to the shards of the other ranks is unknown.
pub fn divergences(saved: &[SavedShard]) -> Vec<ReplicaDivergence> {
    let mut groups: BTreeMap<(&StepKey, &str), BTreeMap<u32, BTreeSet<Member>>> = BTreeMap::new();
    for SavedShard { key, group, rank, holder, root } in saved {
        let member = Member { rank: *rank, holder: holder.clone(), root: root.clone() };
        groups.entry((key, group)).or_default().entry(*rank).or_default().insert(member);
    }
    groups.into_iter().filter_map(|((key, group), ranks)| compare(key, group, ranks)).collect()
}

fn compare(key: &StepKey, group: &str, ranks: BTreeMap<u32, BTreeSet<Member>>) -> Option<ReplicaDivergence> {
    let is_clear = |members_of_rank: &BTreeSet<Member>| {
        members_of_rank.iter().map(|member| &member.root).collect::<BTreeSet<_>>().len() == 1
    };
    let clear = ranks.into_values().filter(is_clear);
    let members: Vec<Member> =
        clear.filter_map(|members_of_rank| members_of_rank.into_iter().next()).collect();
    let mut classes: BTreeMap<&str, usize> = BTreeMap::new();
    members.iter().for_each(|member| *classes.entry(&member.root).or_default() += 1);
    if classes.len() < 2 {
        return None;
    }
    let majority = classes.iter().find(|(_, count)| **count * 2 > members.len()).map(|(root, _)| *root);
    let apart = members.iter().filter(|member| majority.is_some_and(|root| member.root != root));
    let apart = apart.map(|member| member.rank).collect();
    Some(ReplicaDivergence { key: key.clone(), group: group.to_owned(), apart, members })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(step: u64, attempt: u64) -> StepKey {
        StepKey { step, job: "job".into(), run: "run@1".into(), attempt, world: 4 }
    }

    fn reported(key: StepKey, group: &str, rank: u32, root: &str) -> SavedShard {
        SavedShard {
            key,
            group: group.to_owned(),
            rank,
            holder: format!("host{rank}"),
            root: root.to_owned(),
        }
    }

    #[test]
    fn the_rank_that_differs_from_the_majority_is_named_with_its_host() {
        let all = [("a", 0), ("a", 1), ("b", 2), ("a", 3)]
            .map(|(root, rank)| reported(key(7, 0), "dp", rank, root));
        let found = divergences(&all);
        assert_eq!((found.len(), found[0].apart.as_slice()), (1, [2].as_slice()));
        testing::snapshot!(
            "messages",
            "divergence: the rank that differs from the majority is named with its host",
            found[0].sentence()
        );
    }

    #[test]
    fn of_two_ranks_that_differ_both_are_named_and_neither_is_blamed() {
        let found = divergences(&[reported(key(7, 0), "dp", 0, "a"), reported(key(7, 0), "dp", 3, "b")]);
        assert!(found[0].apart.is_empty());
        testing::snapshot!(
            "messages",
            "divergence: of two ranks that differ both are named and neither is blamed",
            found[0].sentence()
        );
    }

    #[test]
    fn equal_shards_and_those_of_other_groups_steps_or_attempts_are_not_reported() {
        let all = [
            reported(key(7, 0), "dp", 0, "a"),
            reported(key(7, 0), "dp", 1, "a"),
            reported(key(7, 0), "stage1", 2, "b"),
            reported(key(8, 0), "dp", 0, "c"),
            reported(key(7, 1), "dp", 1, "d"),
        ];
        assert_eq!(divergences(&all), []);
    }

    #[test]
    fn a_rank_that_saved_a_step_twice_is_not_compared() {
        let mut all = vec![
            reported(key(7, 0), "dp", 0, "a"),
            reported(key(7, 0), "dp", 1, "b"),
            reported(key(7, 0), "dp", 1, "a"),
        ];
        assert_eq!(divergences(&all), []);
        // In memory and on disk: reported twice, with one root.
        all = vec![
            reported(key(7, 0), "dp", 0, "a"),
            reported(key(7, 0), "dp", 0, "a"),
            reported(key(7, 0), "dp", 1, "b"),
        ];
        assert_eq!(divergences(&all).len(), 1);
    }
}
