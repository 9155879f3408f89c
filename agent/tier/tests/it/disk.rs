//! The disk layout: written steps are read back, changed steps are not offered, and the newest whole step stays.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "in a test, a panic is the report")]

use crate::common;

use std::fs;

use common::{container, manifest, write_step};
use mainstay_checkpoint_format::Manifest;
use mainstay_tier::disk::{self, Doubts, Keep, Pace, StdVolume, WriteError};

const VOLUME: StdVolume = StdVolume;

#[test]
fn a_step_is_offered_once_every_shard_is_on_disk() {
    let home = testing::tempdir().unwrap();
    let write = |rank| {
        let (manifest, bytes) = manifest("job", 0, 10, rank, 2, b"state");
        disk::write(&VOLUME, home.path(), &manifest, &bytes, &Pace::default(), &|| false).unwrap();
    };
    write(1);
    assert!(common::offered(&VOLUME, home.path()).is_none());
    write(0);
    let (step, shards) = common::offered(&VOLUME, home.path()).expect("whole");
    assert_eq!((step, shards.len()), (10, 2));
    assert!(fs::read_dir(home.path().join("step-000000000010")).unwrap().count() == 2, "no litter");
    assert!(shards.iter().all(|shard| common::verify(&VOLUME, shard)));
}

#[test]
fn a_changed_bit_withdraws_a_step_and_the_older_one_is_offered() {
    let home = testing::tempdir().unwrap();
    write_step(home.path(), 0, 10, 2, b"old");
    write_step(home.path(), 0, 20, 2, b"new");
    let file = disk::shard_directory(home.path(), 20, 1).join("state.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(common::offered(&VOLUME, home.path()).map(|(step, _)| step), Some(10));
}

#[test]
fn a_step_saved_again_replaces_the_shard_whole() {
    let home = testing::tempdir().unwrap();
    for (attempt, state) in [(0, b"one"), (1, b"two"), (2, b"six")] {
        write_step(home.path(), attempt, 10, 1, state);
        let (_, shards) = common::offered(&VOLUME, home.path()).expect("whole");
        assert_eq!(shards[0].manifest.identity.attempt, attempt);
        assert_eq!(fs::read(&shards[0].path).unwrap(), container("job", attempt, 10, 0, 1, state));
        assert_eq!(fs::read_dir(shards[0].path.parent().unwrap()).unwrap().count(), 2);
    }
}

#[test]
fn bytes_that_changed_since_they_were_sealed_are_not_written() {
    let home = testing::tempdir().unwrap();
    let (manifest, mut bytes) = manifest("job", 0, 10, 0, 1, b"state");
    *bytes.last_mut().unwrap() ^= 1;
    let error =
        disk::write(&VOLUME, home.path(), &manifest, &bytes, &Pace::default(), &|| false).unwrap_err();
    assert!(matches!(error, WriteError::Changed { chunk: 0 }), "{error}");
    assert!(!home.path().join("step-000000000010").exists(), "nothing is left of it");
}

#[test]
fn older_steps_are_removed_but_never_the_newest_whole_one() {
    let home = testing::tempdir().unwrap();
    for step in [10, 20, 30] {
        write_step(home.path(), 0, step, 2, b"state");
    }
    let (manifest, bytes) = manifest("job", 0, 40, 0, 2, b"half");
    disk::write(&VOLUME, home.path(), &manifest, &bytes, &Pace::default(), &|| false).unwrap();
    let prune = |steps, bytes, doubts: &Doubts| {
        disk::prune(&VOLUME, home.path(), Keep { steps, bytes }, doubts, None);
        disk::steps(&VOLUME, home.path())
    };
    let none = Doubts::default();
    assert_eq!(prune(9, None, &none), [40, 30, 20, 10], "fewer are whole than are to be kept");
    assert_eq!(prune(2, None, &none), [40, 30, 20], "one that is not whole pushes none out");
    assert_eq!(prune(2, Some(1), &none), [40, 30], "the quota is for what is beyond the newest whole step");
    assert_eq!(prune(1, Some(1), &none), [40, 30]);
    let doubtful = r#"[{"job": "job", "attempt": 0, "after": 15, "sure": true}]"#;
    fs::write(home.path().join("doubtful.json"), doubtful).unwrap();
    write_step(home.path(), 0, 10, 2, b"trusted");
    let doubts = Doubts::read(&VOLUME, home.path());
    assert!(doubts.about(&common::manifest("job", 0, 30, 0, 2, b"state").0));
    assert_eq!(prune(1, None, &doubts), [40, 30, 10], "a doubtful step pushes no trusted one out");
    disk::prune(&VOLUME, home.path(), Keep { steps: 1, bytes: None }, &none, Some(10));
    assert_eq!(disk::steps(&VOLUME, home.path()), [40, 30, 10], "the one to go back to stays in any case");
}

#[test]
fn launches_of_one_job_and_attempt_are_distinguished() {
    let home = testing::tempdir().unwrap();
    let of_launch = |step, rank, launch: &str| {
        let (manifest, bytes) = manifest("job", 0, step, rank, 2, b"state");
        let manifest = Manifest { run: launch.to_owned(), ..manifest };
        disk::write(&VOLUME, home.path(), &manifest, &bytes, &Pace::default(), &|| false).unwrap();
        manifest
    };
    let (mine, other) = (of_launch(10, 0, "job@1"), of_launch(20, 0, "job@2"));
    of_launch(10, 1, "job@1");
    of_launch(20, 1, "job@1");
    assert_eq!(
        common::offered(&VOLUME, home.path()).map(|(step, _)| step),
        Some(10),
        "two halves are no step"
    );
    let doubtful = r#"[{"job": "job", "run": "job@1", "attempt": 0, "after": null, "sure": true}]"#;
    fs::write(home.path().join("doubtful.json"), doubtful).unwrap();
    let doubts = Doubts::read(&VOLUME, home.path());
    assert!(doubts.about(&mine) && !doubts.about(&other));
    assert!(doubts.about(&Manifest { run: String::new(), ..other }), "its launch was not told");
}
