//! Decides which step counts, which slot may be freed, and what is written next. Pure functions over the shards in memory.

use std::ops::Range;

/// One sealed shard in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedSlot {
    /// The rank.
    pub rank: u32,
    /// Its slot.
    pub index: usize,
    /// Attempt and step, compared in this order: what a later attempt saved is newer, even with a lower step number.
    pub at: AttemptStep,
    /// Whether it is being written to disk.
    pub writing: bool,
}

/// Attempt and step.
pub type AttemptStep = (u64, u64);

/// The newest step of which the shards of all these ranks are in memory or `elsewhere`.
pub fn newest_whole(
    held: &[SealedSlot],
    ranks: &Range<u32>,
    elsewhere: &dyn Fn(AttemptStep, u32) -> bool,
) -> Option<AttemptStep> {
    let mut steps: Vec<AttemptStep> = held.iter().map(|shard| shard.at).collect();
    steps.sort_unstable();
    steps.dedup();
    steps.into_iter().rev().find(|at| {
        ranks.clone().all(|rank| {
            held.iter().any(|shard| (shard.rank, shard.at) == (rank, *at)) || elsewhere(*at, rank)
        })
    })
}

/// The shards to write to disk next: those of the newest whole step that are not on disk.
pub fn to_write(
    held: &[SealedSlot],
    newest: Option<AttemptStep>,
    on_disk: &dyn Fn(AttemptStep, u32) -> bool,
) -> Vec<SealedSlot> {
    let wanted = |shard: &&SealedSlot| Some(shard.at) == newest && !on_disk(shard.at, shard.rank);
    held.iter().filter(wanted).copied().collect()
}

/// The sealed slot of a rank to free when it has no free one: the oldest that is not of the newest whole step, not being written, and not
/// among `kept` (the step to go back to if replicas turn out to differ, and the newest step with copies on other hosts).
/// A step that is newer than the newest whole one, and may still become whole, is freed only for a rank that has waited long.
pub fn to_free(
    held: &[SealedSlot],
    rank: u32,
    newest: Option<AttemptStep>,
    kept: &[AttemptStep],
    waited_long: bool,
) -> Option<usize> {
    let goes = |shard: &&SealedSlot| {
        shard.rank == rank
            && !shard.writing
            && !kept.contains(&shard.at)
            && match newest {
                Some(newest) => shard.at < newest || (shard.at > newest && waited_long),
                None => waited_long,
            }
    };
    held.iter().filter(goes).min_by_key(|shard| shard.at).map(|shard| shard.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(rank: u32, index: usize, attempt: u64, step: u64) -> SealedSlot {
        SealedSlot { rank, index, at: (attempt, step), writing: false }
    }

    const NONE_ELSEWHERE: &dyn Fn(AttemptStep, u32) -> bool = &|_, _| false;

    #[test]
    fn a_step_counts_if_all_ranks_saved_it_in_one_attempt() {
        let shards = [held(0, 0, 0, 10), held(1, 0, 0, 10), held(0, 1, 0, 20), held(1, 1, 1, 20)];
        assert_eq!(newest_whole(&shards, &(0..2), NONE_ELSEWHERE), Some((0, 10)));
        assert_eq!(newest_whole(&shards, &(0..3), NONE_ELSEWHERE), None);
        assert_eq!(newest_whole(&shards, &(0..2), &|at, rank| (at, rank) == ((0, 20), 1)), Some((0, 20)));
    }

    #[test]
    fn the_newest_whole_step_is_never_freed() {
        let mut shards = vec![held(0, 0, 0, 10), held(1, 0, 0, 10), held(0, 1, 0, 20)];
        assert_eq!(to_free(&shards, 0, Some((0, 10)), &[], false), None);
        assert_eq!(
            to_free(&shards, 0, Some((0, 10)), &[], true),
            Some(1),
            "step 20 may be passed over, 10 may not"
        );
        shards.push(held(1, 1, 0, 20));
        assert_eq!(to_free(&shards, 0, Some((0, 20)), &[], false), Some(0));
        shards[0].writing = true;
        assert_eq!(to_free(&shards, 0, Some((0, 20)), &[], true), None, "it is on its way to the disk");
    }

    #[test]
    fn the_step_to_go_back_to_is_not_freed_for_newer_ones() {
        let shards = [held(0, 0, 0, 10), held(0, 1, 0, 20), held(0, 2, 0, 30)];
        assert_eq!(to_free(&shards, 0, Some((0, 30)), &[(0, 10)], true), Some(1));
        assert_eq!(to_free(&shards[1..], 0, Some((0, 30)), &[(0, 20)], true), None);
    }

    #[test]
    fn a_step_of_a_later_attempt_is_newer_even_if_its_number_is_lower() {
        let shards = [held(0, 0, 0, 30), held(0, 1, 1, 20)];
        assert_eq!(newest_whole(&shards, &(0..1), NONE_ELSEWHERE), Some((1, 20)));
        assert_eq!(to_free(&shards, 0, Some((1, 20)), &[], false), Some(0));
    }

    #[test]
    fn only_shards_that_are_not_on_disk_are_written() {
        let shards = [held(0, 0, 0, 10), held(1, 0, 0, 10), held(0, 1, 0, 20)];
        let written = to_write(&shards, Some((0, 10)), &|_, rank| rank == 0);
        assert_eq!(written, [held(1, 0, 0, 10)]);
        assert!(to_write(&shards, None, NONE_ELSEWHERE).is_empty());
    }
}
