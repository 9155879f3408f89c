//! Saves of ranks: after any cut, each offered step is exactly what was saved, and no acknowledged step is lost.

use crate::common;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use mainstay_checkpoint_format::Manifest;
use mainstay_tier::disk::{self, Doubts, Keep, Pace, Volume};

use super::CUTS_PER_SCENE;
use super::common::manifest;
use super::cut::{Dice, Operation, Recorder, Tree, after_a_cut};

struct Scene {
    name: &'static str,
    world_size: u32,
    /// Attempt and step of each save, in order; the state is derived from them.
    before: &'static [(u64, u64)],
    save: (u64, u64),
    keep: usize,
}

const SCENES: &[Scene] = &[
    Scene { name: "first save", world_size: 2, before: &[], save: (0, 10), keep: 2 },
    Scene { name: "next save", world_size: 2, before: &[(0, 10)], save: (0, 20), keep: 2 },
    Scene { name: "a save that prunes", world_size: 2, before: &[(0, 10), (0, 20)], save: (0, 30), keep: 1 },
    Scene {
        name: "the same step by a later attempt",
        world_size: 2,
        before: &[(0, 10), (0, 20)],
        save: (1, 20),
        keep: 2,
    },
    Scene { name: "the only step again", world_size: 1, before: &[(0, 10)], save: (1, 10), keep: 2 },
];

fn state_of(attempt: u64, step: u64, rank: u32) -> Vec<u8> {
    (0..700_u64).map(|index| (index ^ (attempt * 7 + step * 31 + u64::from(rank) * 101)) as u8).collect()
}

/// A shard of several small chunks, so that a write is several operations.
pub fn shard(attempt: u64, step: u64, rank: u32, world_size: u32) -> (Manifest, Vec<u8>) {
    let (mut manifest, bytes) =
        manifest("job", attempt, step, rank, world_size, &state_of(attempt, step, rank));
    let chunk = 2048;
    let (_, sums) = mainstay_tier::seal::sums(&bytes, bytes.len() as u64, chunk).unwrap();
    manifest.chunks = Some(mainstay_checkpoint_format::Chunks { bytes: chunk, sums });
    (manifest, bytes)
}

fn save(volume: &Recorder, home: &Path, scene: &Scene, (attempt, step): (u64, u64)) {
    for rank in 0..scene.world_size {
        let (manifest, bytes) = shard(attempt, step, rank, scene.world_size);
        disk::write(volume, home, &manifest, &bytes, &Pace::default(), &|| false).expect("written");
    }
    disk::prune(volume, home, Keep { steps: scene.keep, bytes: None }, &Doubts::default(), None);
}

fn contents(volume: &Recorder, shards: &[disk::StoredShard]) -> Vec<Vec<u8>> {
    let read = |shard: &disk::StoredShard| {
        let (file, length) = volume.open(&shard.path).unwrap();
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    shards.iter().map(read).collect()
}

#[test]
fn no_power_cut_leaves_a_torn_or_stale_step_or_loses_one() {
    let threads =
        SCENES.iter().enumerate().map(|(number, scene)| std::thread::spawn(move || cut_up(number, scene)));
    let threads: Vec<_> = threads.collect();
    let found: Vec<(usize, BTreeSet<Option<At>>)> =
        threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let cuts: usize = found.iter().map(|(cuts, _)| cuts).sum();
    assert!(cuts >= SCENES.len() * CUTS_PER_SCENE, "{cuts}");
    let kinds: Vec<_> = found.iter().map(|(_, kinds)| kinds).collect();
    assert!(kinds.iter().all(|kinds| kinds.len() > 1), "cuts that change nothing test nothing: {kinds:?}");
}

type At = (u64, u64);

/// Makes all cuts of a scene. Returns their number and what was offered after them.
fn cut_up(number: usize, scene: &Scene) -> (usize, BTreeSet<Option<At>>) {
    let home = Path::new("/disk/steps");
    let mut kinds = BTreeSet::new();
    let mut cuts = 0;
    let mut saved: BTreeMap<At, Vec<Vec<u8>>> = BTreeMap::new();
    let volume = Recorder::on(Tree::default());
    scene.before.iter().for_each(|at| save(&volume, home, scene, *at));
    let (before, _) = volume.taken();
    let volume = Recorder::on(before.clone());
    save(&volume, home, scene, scene.save);
    let (_, operations) = volume.taken();
    // The operation from which on the save is acknowledged: the last shard's name is synced to disk.
    let sealed =
        |operation: &Operation| matches!(operation, Operation::Rename(_, (_, to), _) if !to.contains(".tmp"));
    let last = operations.iter().rposition(sealed).expect("a shard was sealed");
    let acknowledged = last + 2;
    let mut dice = Dice(number as u64 + 1);
    for cut in 0..CUTS_PER_SCENE {
        let done = cut % (operations.len() + 1);
        let left = Recorder::on(after_a_cut(&before, &operations, done, &mut dice));
        let reported = || format!("{}, cut {cut} behind {:?}", scene.name, operations[..done].last());
        let offered = common::offered(&left, home);
        let at = offered.as_ref().map(|(step, shards)| {
            let attempt = shards[0].manifest.identity.attempt;
            let shard_of = |rank| shard(attempt, *step, rank, scene.world_size).1;
            let expected = saved
                .entry((attempt, *step))
                .or_insert_with(|| (0..scene.world_size).map(shard_of).collect());
            assert!(contents(&left, shards) == *expected, "torn, stale or mixed: {}", reported());
            (attempt, *step)
        });
        let newest_before = scene.before.last();
        if done >= acknowledged {
            assert_eq!(at, Some(scene.save), "an acknowledged step is lost: {}", reported());
        } else if scene.before.iter().any(|(_, step)| *step == scene.save.1) {
            // Half of the step is of the later attempt: the step before it, if there was one, or either one completely.
            assert!(
                at.is_none() || at == Some(scene.save) || scene.before.contains(&at.unwrap()),
                "{at:?}: {}",
                reported()
            );
            if scene.before.len() > 1 || scene.world_size == 1 {
                assert!(at.is_some(), "everything is lost: {}", reported());
            }
        } else {
            assert!(at.as_ref() == newest_before || at == Some(scene.save), "{at:?}: {}", reported());
        }
        kinds.insert(at);
        cuts += 1;
        // The remaining files allow another save.
        if cut % 50 == 0 {
            disk::clear_aside(&left, home, &|_| false);
            save(&left, home, scene, (2, 99));
            assert_eq!(common::offered(&left, home).map(|(step, _)| step), Some(99), "{}", reported());
        }
    }
    (cuts, kinds)
}
