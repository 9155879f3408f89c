//! The pool owner and its memory, with simulated ranks that use the same control page as real ones.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use common::rank::{Rank, until};
use mainstay_checkpoint_format::control::{Answer, State};
use mainstay_tier::disk::{self, Keep, StdVolume};
use mainstay_tier::pool::{self, PoolError, PoolOwner, Settings};

struct Stage {
    _home: testing::TempDir,
    pools: testing::TempDir,
    checkpoints: PathBuf,
}

impl Stage {
    fn new() -> Stage {
        let home = testing::tempdir().unwrap();
        let shm = testing::memory();
        let pools = if shm.is_dir() { testing::TempDir::new_in(shm) } else { testing::tempdir() };
        Stage { checkpoints: home.path().join("steps"), _home: home, pools: pools.unwrap() }
    }

    fn settings(&self, world_size: u32, slots: usize) -> Settings {
        Settings {
            root: self.pools.path().to_owned(),
            directory: self.checkpoints.clone(),
            job: "job".into(),
            run: "run".into(),
            world_size,
            ranks: 0..world_size,
            keep: Keep { steps: 2, bytes: None },
            slots,
            memory: None,
            rate: None,
        }
    }

    fn pool_owner(&self, world_size: u32, slots: usize) -> PoolOwner {
        PoolOwner::start(self.settings(world_size, slots)).expect("a pool owner")
    }

    fn offered(&self) -> Option<u64> {
        common::offered(&StdVolume, &self.checkpoints).map(|(step, _)| step)
    }

    fn pools_left(&self) -> usize {
        fs::read_dir(self.pools.path()).unwrap().count()
    }
}

#[test]
fn what_ranks_copied_is_sealed_and_written_to_disk() {
    let stage = Stage::new();
    let pool_owner = stage.pool_owner(2, 3);
    let ranks = [Rank::of(pool_owner.directory(), 0, 2), Rank::of(pool_owner.directory(), 1, 2)];
    for rank in &ranks {
        assert_eq!(rank.reserve(20_000), Answer::Granted);
    }
    for step in 1..=6 {
        ranks.iter().for_each(|rank| rank.save(step));
    }
    until(|| stage.offered(), |step| *step == Some(6));
    assert!(pool_owner.status().memory.is_some_and(|(step, _)| step == 6));
    assert!(ranks.iter().all(|rank| rank.sealed().contains(&6)));
    assert_eq!(pool_owner.finish(), Vec::<String>::new());
    let (step, shards) = common::offered(&StdVolume, &stage.checkpoints).expect("whole");
    assert_eq!((step, shards[1].manifest.identity.rank), (6, 1));
    assert_eq!(fs::read(&shards[1].path).unwrap(), ranks[1].bytes(6));
    assert_eq!(stage.pools_left(), 0, "the memory is given back");
}

#[test]
fn the_newest_whole_step_stays_while_a_rank_is_ahead() {
    let stage = Stage::new();
    let pool_owner = stage.pool_owner(2, 2);
    let ranks = [Rank::of(pool_owner.directory(), 0, 2), Rank::of(pool_owner.directory(), 1, 2)];
    ranks.iter().for_each(|rank| assert_eq!(rank.reserve(20_000), Answer::Granted));
    ranks.iter().for_each(|rank| rank.save(1));
    for step in 2..=4 {
        ranks[0].save(step);
    }
    until(|| ranks[0].sealed(), |steps| *steps == [1, 4]);
    assert_eq!(ranks[1].sealed(), [1]);
    drop(pool_owner.finish());
    assert_eq!(stage.offered(), Some(1));
}

#[test]
fn the_step_saved_before_replicas_last_agreed_stays_regardless_of_newer_steps() {
    let stage = Stage::new();
    // A file in place of the directory: nothing can be written to disk for now.
    fs::write(&stage.checkpoints, b"in the way").unwrap();
    let keep = Keep { steps: 1, bytes: None };
    let pool_owner = PoolOwner::start(Settings { keep, ..stage.settings(1, 3) }).unwrap();
    let rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(20_000), Answer::Granted);
    rank.save(4);
    rank.save(9);
    until(|| rank.sealed(), |steps| steps.contains(&9));
    pool_owner.vouch(0, 9);
    until(|| rank.with(|page| page.vouched()), |step| *step == Some(9));
    for step in [14, 19, 24, 29] {
        rank.save(step);
    }
    until(|| rank.sealed(), |steps| steps.contains(&29));
    assert!(rank.sealed().contains(&9), "{:?}", rank.sealed());
    fs::remove_file(&stage.checkpoints).unwrap();
    drop(pool_owner.finish());
    assert_eq!(disk::steps(&StdVolume, &stage.checkpoints), [29, 9], "one more than is kept");
}

#[test]
fn a_launcher_that_was_killed_loses_nothing() {
    let stage = Stage::new();
    // The disk is so slow that nothing is written.
    let settings = Settings { rate: Some(1), ..stage.settings(1, 3) };
    let pool_owner = PoolOwner::start(settings).unwrap();
    let rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(20_000), Answer::Granted);
    rank.save(1);
    until(|| rank.sealed(), |steps| steps.contains(&1));
    // As after a kill: no clean end, and one slot is filled that no pool owner has seen. The pool owner itself lives
    // until the test ends, so that its threads write nothing after the directory is removed.
    let pool = pool_owner.directory().to_owned();
    let copy = stage.pools.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::create_dir(copy.join("rank-00000")).unwrap();
    for name in ["pool.json", "rank-00000"] {
        let from = pool.join(name);
        if from.is_dir() {
            for entry in fs::read_dir(from).unwrap().flatten() {
                fs::copy(entry.path(), copy.join(name).join(entry.file_name())).unwrap();
            }
        } else {
            fs::copy(from, copy.join(name)).unwrap();
        }
    }
    let left = Rank::of(&copy, 0, 1);
    let slot = left.take(2);
    assert!(left.fill(&slot, 2));
    // And one slot that was being filled.
    let half = left.take(3);
    left.file(&half).write_all_at(b"half of it", 0).unwrap();
    let recovered = pool::recover(&copy).unwrap().expect("a pool");
    assert!(recovered.steps.contains(&2) && recovered.failed.is_empty(), "{recovered:?}");
    assert_eq!(stage.offered(), Some(2));
    assert!(!copy.exists(), "the memory is given back");
    assert!(pool::recover(&pool).unwrap().is_none(), "one that is in use is left alone");
}

#[test]
fn a_half_filled_slot_of_an_old_attempt_is_never_offered_and_late_writers_seal_nothing() {
    let stage = Stage::new();
    let pool_owner = stage.pool_owner(1, 3);
    let mut rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(20_000), Answer::Granted);
    rank.save(1);
    until(|| rank.sealed(), |steps| *steps == [1]);
    let (slot, file) = {
        let slot = rank.take(2);
        (slot, rank.file(&slot))
    };
    pool_owner.begin_attempt(1);
    assert!(!rank.fill_in(&file, &slot, 2), "it is of an attempt that is over");
    let old = Rank::of(pool_owner.directory(), 0, 1);
    rank.epoch = 1;
    // The same slot gets another file: the late writer's bytes have no effect.
    let again = until(
        || rank.with(|page| page.slot(slot.index)),
        |now| now.state == State::Free && now.file != slot.file,
    );
    assert!(again.generation > slot.generation);
    rank.save(2);
    file.write_all_at(&[0xff; 8000], 0).unwrap();
    // A process of the old attempt that continues as if nothing had happened.
    old.save(7);
    // Step 1 may have made room for it.
    until(|| rank.sealed(), |steps| steps.contains(&2));
    assert!(!rank.sealed().contains(&7));
    until(|| stage.offered(), |step| *step == Some(2));
    assert_eq!(
        fs::read(disk::shard_directory(&stage.checkpoints, 2, 0).join("state.safetensors")).unwrap(),
        rank.bytes(2)
    );
    testing::snapshot!(
        "messages",
        "pool: a half filled slot of an old attempt is never offered and late writers seal nothing",
        until(|| pool_owner.messages(), |messages| !messages.is_empty())[0]
    );
    drop(pool_owner.finish());
    assert_eq!(stage.offered(), Some(2));
}

#[test]
fn bytes_that_change_in_memory_withdraw_the_step_and_are_reported() {
    let stage = Stage::new();
    // Slow enough that the change happens before the bytes are read for the disk.
    fs::create_dir_all(&stage.checkpoints).unwrap();
    let pool_owner = stage.pool_owner(2, 2);
    let ranks = [Rank::of(pool_owner.directory(), 0, 2), Rank::of(pool_owner.directory(), 1, 2)];
    ranks.iter().for_each(|rank| assert_eq!(rank.reserve(20_000), Answer::Granted));
    ranks.iter().for_each(|rank| rank.save(1));
    until(|| stage.offered(), |step| *step == Some(1));
    // Sealed but not whole yet, so not being written to disk.
    let slot = ranks[0].take(2);
    assert!(ranks[0].fill(&slot, 2));
    until(|| ranks[0].sealed(), |steps| steps.contains(&2));
    ranks[0].file(&slot).write_all_at(&[0xff], 5000).unwrap();
    ranks[1].save(2);
    let messages = until(|| pool_owner.messages(), |messages| !messages.is_empty());
    testing::snapshot!(
        "messages",
        "pool: bytes that change in memory withdraw the step and are reported",
        messages[0]
    );
    drop(pool_owner.finish());
    assert_eq!(stage.offered(), Some(1));
}

#[test]
fn a_slow_disk_is_not_waited_for_at_the_end() {
    let stage = Stage::new();
    // The second chunk would be written only after weeks.
    let pool_owner = PoolOwner::start(Settings { rate: Some(1), ..stage.settings(1, 3) }).unwrap();
    let mut rank = Rank::of(pool_owner.directory(), 0, 1);
    rank.size = 9 << 20;
    assert_eq!(rank.reserve(10 << 20), Answer::Granted);
    rank.save(1);
    let started = || fs::read_dir(&stage.checkpoints).is_ok_and(|mut steps| steps.next().is_some());
    until(started, |started| *started);
    assert_eq!(pool_owner.finish(), Vec::<String>::new());
    assert_eq!(stage.offered(), Some(1));
}

#[test]
fn bytes_that_are_not_a_checkpoint_of_their_rank_are_not_sealed() {
    let stage = Stage::new();
    let pool_owner = stage.pool_owner(1, 2);
    let rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(20_000), Answer::Granted);
    let slot = rank.take(5);
    let another = rank.bytes(4);
    rank.file(&slot).write_all_at(&another, 0).unwrap();
    assert!(rank.with(|page| page.fill(&slot, another.len() as u64)).is_some());
    rank.ring();
    let messages = until(|| pool_owner.messages(), |messages| !messages.is_empty());
    testing::snapshot!(
        "messages",
        "pool: bytes that are not a checkpoint of their rank are not sealed",
        messages[0]
    );
    let slot = rank.take(6);
    rank.file(&slot).write_all_at(&[0xff; 5000], 0).unwrap();
    assert!(rank.with(|page| page.fill(&slot, 5000)).is_some());
    rank.ring();
    let messages = until(|| pool_owner.messages(), |messages| !messages.is_empty());
    testing::snapshot!(
        "messages",
        "pool: bytes that are not a checkpoint of their rank are not sealed 2",
        messages[0]
    );
    drop(pool_owner.finish());
    assert_eq!(stage.offered(), None);
}

#[test]
fn too_much_memory_is_refused_at_the_reservation() {
    let stage = Stage::new();
    let settings = Settings { memory: Some(10 << 20), ..stage.settings(1, 3) };
    let pool_owner = PoolOwner::start(settings).unwrap();
    let rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(6 << 20), Answer::NoRoom);
    testing::snapshot!(
        "messages",
        "pool: too much memory is refused at the reservation",
        pool_owner.messages()[0]
    );
    assert_eq!(rank.reserve(5 << 20), Answer::NoRoom, "two of six, for sizes go in steps of two");
    assert_eq!(rank.reserve(3 << 20), Answer::Granted);
    assert_eq!(rank.with(|page| page.slots()), 2, "a third would be beyond the bound");
}

#[test]
fn a_state_that_grows_gets_larger_slots_and_the_newest_step_stays() {
    let stage = Stage::new();
    let pool_owner = stage.pool_owner(1, 2);
    let rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(20_000), Answer::Granted);
    rank.save(1);
    until(|| rank.sealed(), |steps| *steps == [1]);
    assert_eq!(rank.reserve(5 << 20), Answer::Granted);
    let large = until(
        || rank.with(|page| page.all().collect::<Vec<_>>()),
        |slots| slots.iter().any(|slot| slot.state == State::Free && slot.capacity >= 5 << 20),
    );
    assert!(large.iter().any(|slot| slot.state == State::Sealed && slot.step == 1));
}

#[test]
fn two_launchers_do_not_keep_the_same_checkpoints() {
    let stage = Stage::new();
    let pool_owner = stage.pool_owner(1, 2);
    let error = PoolOwner::start(stage.settings(1, 2)).expect_err("it is taken");
    assert!(matches!(error, PoolError::Taken(path) if path == stage.checkpoints));
    assert!(pool::recover_all(stage.pools.path()).is_empty());
    drop(pool_owner);
    drop(PoolOwner::start(stage.settings(1, 2)).expect("it is free again"));
}

#[test]
fn a_disk_that_refuses_leaves_the_newest_step_in_memory_for_the_next_launcher() {
    let stage = Stage::new();
    // A file in place of the directory: no write succeeds.
    fs::write(&stage.checkpoints, b"in the way").unwrap();
    let pool_owner = stage.pool_owner(1, 2);
    let rank = Rank::of(pool_owner.directory(), 0, 1);
    assert_eq!(rank.reserve(20_000), Answer::Granted);
    rank.save(1);
    let messages = until(|| pool_owner.messages(), |messages| !messages.is_empty());
    assert!(messages[0].contains("step 1"), "{messages:?}");
    assert_eq!(pool_owner.finish().len(), 1);
    assert_eq!(stage.pools_left(), 1);
    fs::remove_file(&stage.checkpoints).unwrap();
    let pool_owner = stage.pool_owner(1, 2);
    let recovered = pool_owner.messages()[0].replace(&stage.checkpoints.display().to_string(), "DIRECTORY");
    testing::snapshot!("messages", "pool: a killed launcher had left a step in memory", recovered);
    assert_eq!(stage.offered(), Some(1));
    drop(pool_owner.finish());
    assert_eq!(stage.pools_left(), 0);
}
