//! The one choice of the step from which a job resumes. Whoever decides for a job calls it with all copies that are
//! known: the leader of its hosts, the agent that leads where no launcher does, and `mainstay ckpt pull`.

use std::collections::BTreeSet;

use crate::inventory::{Copy, StepKey, StepState, steps_among};

/// What is to be restored.
#[derive(Clone, Copy, Debug, Default)]
pub struct RestoreRequest<'a> {
    /// The run id; `None` if all copies are of the job's runs.
    pub run: Option<&'a str>,
    /// The number of ranks that load it; `None` if the step is restored as it was saved.
    pub world: Option<u32>,
    /// Steps that could not be restored, although their copies were listed.
    pub failed: Option<&'a BTreeSet<StepKey>>,
}

/// The choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice<'a> {
    /// The newest whole step. `None` if there is none: the job starts from scratch.
    pub step: Option<StepState<&'a Copy>>,
    /// The newest whole step of another number of ranks, if it is newer. Only a job whose ranks all have the same state,
    /// or that divides it anew, can load it.
    pub of_other_world: Option<StepState<&'a Copy>>,
}

/// Chooses the newest step that is whole in `copies`: each rank's shard has a verified copy or enough pieces, all of
/// one attempt of one launch. Which of two steps is newer is defined by [`steps_among`].
pub fn choose<'a>(copies: impl IntoIterator<Item = &'a Copy>, request: RestoreRequest<'_>) -> Choice<'a> {
    let RestoreRequest { run, world, failed } = request;
    let mut whole = steps_among(copies, run);
    whole.retain(|state| state.is_whole() && failed.is_none_or(|failed| !failed.contains(&state.key)));
    let fits = |state: &StepState<&Copy>| world.is_none_or(|world| state.key.world == world);
    let at = whole.iter().position(fits);
    let mut newer = whole.drain(..at.unwrap_or(whole.len()));
    // Of two steps with the same number the one that fits is taken.
    let of_other_world = newer.next();
    drop(newer);
    let step = whole.into_iter().next();
    let same = |state: &StepState<&Copy>| step.as_ref().is_some_and(|step| step.key.step == state.key.step);
    Choice { of_other_world: of_other_world.filter(|state| !same(state)), step }
}

impl Choice<'_> {
    /// The step, without its copies.
    #[must_use]
    pub fn key(&self) -> Option<StepKey> {
        self.step.as_ref().map(|step| step.key.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::copies::{Medium, Parity, Piece, Shard};

    const CUT: Parity = Parity { data: 2, parity: 1 };

    /// Random copies: few steps, attempts, launches, worlds and hosts, so that whole and torn steps are frequent. Each
    /// rank seals a step of an attempt once or twice.
    fn copies() -> impl Strategy<Value = Vec<Copy>> {
        let key = (0..4_u64, 0..2_u8, 0..2_u64, 1..4_u32).prop_map(|(step, launch, attempt, world)| {
            StepKey { step, job: "job".into(), run: format!("run@{launch}").into(), attempt, world }
        });
        let copy =
            (key, 0..4_u32, 0..3_u8, prop::bool::weighted(0.8), any::<bool>(), prop::option::of(0..3_u32))
                .prop_map(|(step_key, rank, holder, verified, again, index)| {
                    let root = format!(
                        "{}/{}/{}/{}/{rank}/{again}",
                        step_key.step, step_key.run, step_key.attempt, step_key.world
                    );
                    let piece = index.map(|index| Piece { root: root.clone(), bytes: 8, parity: CUT, index });
                    let root = piece.as_ref().map_or(root, |piece| format!("{}#{}", piece.root, piece.index));
                    let created = i64::from(again) + step_key.step.cast_signed();
                    let shard = Shard { key: step_key, rank, root, bytes: 8, created, piece };
                    Copy {
                        holder: format!("h{holder}").into(),
                        medium: Medium::Memory,
                        own: false,
                        verified,
                        shard,
                    }
                });
        prop::collection::vec(copy, 0..60)
    }

    /// Whether a step is whole, in the simplest possible words: for each rank some one shard is there completely.
    fn is_whole(copies: &[Copy], key: &StepKey) -> bool {
        (0..key.world).all(|rank| {
            let of_rank = |copy: &&Copy| copy.verified && copy.shard.key == *key && copy.shard.rank == rank;
            let mut pieces: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
            copies.iter().filter(of_rank).any(|copy| match &copy.shard.piece {
                None => true,
                Some(piece) => {
                    let known = pieces.entry(&piece.root).or_default();
                    known.insert(piece.index);
                    known.len() >= CUT.data as usize
                }
            })
        })
    }

    proptest! {
        #[test]
        fn the_newest_whole_step_wins_and_no_torn_or_failed_one_is_chosen(
            copies in copies(),
            world in prop::option::of(1..4_u32),
            failed in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        ) {
            let at = |index: prop::sample::Index| Some(copies.get(index.index(copies.len().max(1)))?.shard.key.clone());
            let failed: BTreeSet<StepKey> = failed.into_iter().filter_map(at).collect();
            let choice = choose(&copies, RestoreRequest { run: Some("run"), world, failed: Some(&failed) });
            let keys: BTreeSet<&StepKey> = copies.iter().map(|copy| &copy.shard.key).collect();
            let whole = || keys.iter().filter(|key| !failed.contains(**key) && is_whole(&copies, key));
            let fits = |key: &&&&StepKey| world.is_none_or(|world| key.world == world);
            let newest = whole().filter(|key| fits(&key)).map(|key| key.step).max();
            prop_assert_eq!(choice.key().map(|key| key.step), newest);
            for state in choice.step.iter().chain(&choice.of_other_world) {
                prop_assert!(whole().any(|key| **key == state.key), "{:?} is torn or has failed", state.key);
                for (rank, copies) in &state.ranks {
                    let roots: BTreeSet<&str> = copies.iter().map(|copy| copy.shard.whole()).collect();
                    prop_assert_eq!(roots.len(), 1, "two shards of rank {}", rank);
                    prop_assert!(copies.iter().all(|copy| copy.shard.key == state.key && copy.verified));
                }
            }
            // No later attempt of the same launch saved it again completely.
            if let Some(key) = choice.key() {
                let later = |other: &&&StepKey| {
                    (other.step, &other.run, other.world) == (key.step, &key.run, key.world) && other.attempt > key.attempt
                };
                prop_assert!(whole().find(later).is_none(), "{:?} is stale", key);
            }
            let other = choice.of_other_world.map(|state| state.key);
            let newest_other = whole().filter(|key| !fits(&key)).map(|key| key.step).max();
            prop_assert_eq!(other.map(|key| key.step), newest_other.filter(|step| Some(*step) > newest));
        }

        #[test]
        fn the_choice_does_not_depend_on_the_order_of_the_copies(copies in copies(), world in 1..4_u32) {
            let wanted = RestoreRequest { world: Some(world), ..RestoreRequest::default() };
            let reversed: Vec<Copy> = copies.iter().rev().cloned().collect();
            let keys = |copies: &[Copy]| {
                let Choice { step, of_other_world } = choose(copies, wanted);
                [step, of_other_world].map(|state| state.map(|state| state.key))
            };
            prop_assert_eq!(keys(&copies), keys(&reversed));
        }

        #[test]
        fn what_one_more_host_holds_never_makes_the_choice_older(copies in copies(), more in copies()) {
            let step = |copies: &[Copy]| choose(copies, RestoreRequest::default()).key().map(|key| key.step);
            let all: Vec<Copy> = copies.iter().chain(&more).cloned().collect();
            prop_assert!(step(&all) >= step(&copies));
        }
    }
}
