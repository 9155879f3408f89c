//! Replicas for other hosts: after any cut, each offered replica is exactly what its owner sealed, and no replica that was
//! acknowledged is lost, unless it was to be removed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use mainstay_checkpoint_format::Chunks;
use mainstay_tier::disk::Volume;
use mainstay_tier::peer::store as place;
use mainstay_tier::peer::{SealedShard, WithdrawalLock};

use super::CUTS_PER_SCENE;
use super::common::manifest;
use super::cut::{Dice, Recorder, Tree, after_a_cut};

/// A shard by its step and the number of its seal. All have the same length: their files are used again.
type Which = (u64, u8);

#[derive(Clone, Copy, Debug)]
enum Act {
    /// A shard is received into a new file.
    Take(Which),
    /// A replica is removed, and its file is kept.
    Drop(Which),
    /// A shard is received into a kept file.
    TakeInItsPlace(Which, Which),
}

struct Scene {
    name: &'static str,
    before: &'static [Act],
    acts: &'static [Act],
}

use Act::{Drop, Take, TakeInItsPlace};

const SCENES: &[Scene] = &[
    Scene { name: "the first replica", before: &[], acts: &[Take((10, 0))] },
    Scene { name: "another one", before: &[Take((10, 0))], acts: &[Take((20, 0))] },
    Scene {
        name: "one in the file of another",
        before: &[Take((10, 0)), Take((20, 0))],
        acts: &[Drop((10, 0)), TakeInItsPlace((30, 0), (10, 0))],
    },
    Scene {
        name: "the same step, sealed again",
        before: &[Take((10, 0))],
        acts: &[Take((10, 1)), Take((10, 2))],
    },
    Scene {
        name: "the same step, sealed again, in the file of what goes for it",
        before: &[Take((10, 0)), Take((20, 0))],
        acts: &[Drop((10, 0)), TakeInItsPlace((20, 1), (10, 0)), Take((30, 0))],
    },
];

fn shard((step, seal): Which) -> (SealedShard, Vec<u8>) {
    let state: Vec<u8> =
        (0..1500_u64).map(|at| (at.wrapping_mul(step) ^ (u64::from(seal) * 85)) as u8).collect();
    let (mut manifest, bytes) = manifest("job", 0, step, 0, 1, &state);
    let (_, sums) = mainstay_tier::seal::sums(&bytes, bytes.len() as u64, 512).unwrap();
    manifest.chunks = Some(Chunks { bytes: 512, sums });
    (SealedShard::of(manifest.encode()).unwrap(), bytes)
}

/// Each is sent by a different agent.
fn lock_of((step, seal): Which) -> WithdrawalLock {
    WithdrawalLock::from_header((step, u64::from(seal) + 1)).unwrap()
}

fn replicas() -> PathBuf {
    PathBuf::from("/disk/replicas")
}

fn spare(root: &str) -> PathBuf {
    Path::new("/disk/spare").join(root)
}

fn act(volume: &Recorder, act: Act, dice: &mut Dice) {
    match act {
        Take(which) => take(volume, which, None, dice),
        TakeInItsPlace(which, key) => take(volume, which, Some(&spare(&shard(key).0.shard.root)), dice),
        Drop(which) => {
            let (sealed, _) = shard(which);
            let home = place::home(&replicas(), &sealed.shard);
            assert!(place::take_down(volume, &home, Some(&spare(&sealed.shard.root))));
        }
    }
}

/// Stores a shard as the store does: its bytes next to its place, in any order, then its files.
fn take(volume: &Recorder, which: Which, file: Option<&Path>, dice: &mut Dice) {
    let (sealed, bytes) = shard(which);
    let incoming = Path::new("/disk/incoming").join(&sealed.shard.root);
    match file {
        Some(file) => volume.rename(file, &incoming).unwrap(),
        None => drop(volume.create(&incoming).unwrap()),
    }
    let mut pieces: Vec<(usize, &[u8])> = bytes.chunks(256).enumerate().collect();
    while !pieces.is_empty() {
        let (index, piece) = pieces.swap_remove(dice.roll(pieces.len() as u64) as usize);
        volume.write_at(&incoming, index * 256, piece);
    }
    let home = place::home(&replicas(), &sealed.shard);
    let lock = lock_of(which).file_name(sealed.key);
    place::put(volume, &incoming, &home, &sealed.manifest, Some(&lock), &|| volume.sync(&incoming)).unwrap();
}

/// The replicas that are offered when the store is opened again and verified. All others are removed.
fn offered(volume: &Recorder) -> BTreeSet<Which> {
    let mut offered = BTreeSet::new();
    for (home, sealed) in place::stored_replicas(volume, &replicas()) {
        let Some(sealed) = sealed.filter(|sealed| place::is_whole(volume, &home, sealed)) else {
            place::take_down(volume, &home, None);
            continue;
        };
        let of_step = (0..3).map(|seal| (sealed.shard.key.step, seal));
        let which = of_step.into_iter().find(|which| shard(*which).0.manifest == sealed.manifest);
        let which = which.expect("what nobody has sealed is offered");
        assert_eq!(home, place::home(&replicas(), &sealed.shard), "it is in the place of another one");
        let (file, length) = volume.open(&home.join("shard")).unwrap();
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == shard(which).1, "{which:?} is torn or mixed");
        let lock = place::lock_of(volume, &home, &sealed);
        assert_eq!(lock, Some(lock_of(which)), "{which:?} may be deleted by an agent that has not put it");
        offered.insert(which);
    }
    offered
}

#[test]
fn no_power_cut_leaves_a_torn_replica_or_loses_an_acknowledged_one() {
    let threads =
        SCENES.iter().enumerate().map(|(number, scene)| std::thread::spawn(move || cut_up(number, scene)));
    let threads: Vec<_> = threads.collect();
    for (scene, thread) in SCENES.iter().zip(threads) {
        let kinds = thread.join().unwrap();
        assert!(kinds.len() > 1, "{}: cuts that change nothing test nothing: {kinds:?}", scene.name);
    }
}

/// Makes all cuts of a scene. Returns what was offered after them.
fn cut_up(number: usize, scene: &Scene) -> BTreeSet<BTreeSet<Which>> {
    let mut dice = Dice(number as u64 + 1);
    let empty = Recorder::on(Tree::default());
    for path in ["/disk/replicas", "/disk/incoming", "/disk/spare"] {
        empty.make_directory(Path::new(path)).unwrap();
    }
    scene.before.iter().for_each(|act_of_scene| act(&empty, *act_of_scene, &mut dice));
    let (before, _) = empty.taken();
    let volume = Recorder::on(before.clone());
    // The shards that must exist, with the first and last operation for which this holds.
    let mut certain: BTreeMap<Which, (usize, usize)> =
        scene.before.iter().filter_map(taken).map(|which| (which, (0, usize::MAX))).collect();
    for act_of_scene in scene.acts {
        let started = volume.done();
        let step = match act_of_scene {
            Take((step, _)) | TakeInItsPlace((step, _), _) | Drop((step, _)) => *step,
        };
        let others = certain.iter_mut().filter(|(which, _)| which.0 == step);
        others.for_each(|(_, (_, until))| *until = started.min(*until));
        act(&volume, *act_of_scene, &mut dice);
        certain.extend(taken(act_of_scene).map(|which| (which, (volume.done(), usize::MAX))));
    }
    let (_, operations) = volume.taken();
    let mut kinds = BTreeSet::new();
    for cut in 0..CUTS_PER_SCENE {
        let done = cut % (operations.len() + 1);
        let left = Recorder::on(after_a_cut(&before, &operations, done, &mut dice));
        let reported = || format!("{}, cut {cut} behind {:?}", scene.name, operations[..done].last());
        let offered = offered(&left);
        for (which, (from, until)) in &certain {
            // A cut behind the last operation before its removal is a cut while it exists.
            let is_there = (*from..=*until).contains(&done);
            assert!(!is_there || offered.contains(which), "{which:?} is lost: {}, {offered:?}", reported());
        }
        // The remaining files allow another replica.
        if cut % 50 == 0 {
            remove_all(&left, Path::new("/disk/incoming"));
            take(&left, (90, 0), None, &mut dice);
            assert!(self::offered(&left).contains(&(90, 0)), "{}", reported());
        }
        kinds.insert(offered);
    }
    kinds
}

fn taken(act: &Act) -> Option<Which> {
    match act {
        Take(which) | TakeInItsPlace(which, _) => Some(*which),
        Drop(_) => None,
    }
}

fn remove_all(volume: &Recorder, directory: &Path) {
    for name in volume.list(directory).unwrap() {
        volume.remove_file(&directory.join(name)).unwrap();
    }
}
