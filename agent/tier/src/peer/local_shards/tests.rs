use std::fs;
use std::path::Path;

use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};

use super::*;

/// The shard of a rank, as its launcher seals it on disk.
fn seal(directory: &Path, step: u64, rank: u32) {
    let identity = Identity { job: "job".into(), attempt: 0, step, rank, world_size: 2 };
    let content = b"weights".as_slice();
    let manifest = Manifest {
        identity,
        run: "run".to_owned(),
        created_unix_s: 1_700_000_000,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::new(),
        file: SealedFile {
            name: "state".to_owned(),
            size: 7,
            xxh3_128: twox_hash::XxHash3_128::oneshot(content),
        },
        chunks: Some(Chunks { bytes: 4096, sums: vec![chunk_sum(content)] }),
        shared_content: None,
    };
    let home = directory.join(format!("step-{step:012}/rank-{rank:05}"));
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state"), content).unwrap();
    fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
}

/// The shards of a directory, before the first look.
fn watching(directory: &Path) -> LocalShards {
    let own = LocalShards::default();
    let (run, directory) = ("run".to_owned(), directory.to_owned());
    own.watch(WatchedDirectory { run, directory, user: User::own(), pool: None });
    own
}

#[test]
fn a_step_that_is_being_sent_keeps_its_files_from_the_time_they_are_on_disk() {
    let directory = testing::tempdir().unwrap();
    let own = watching(directory.path());
    [10, 20].into_iter().for_each(|step| seal(directory.path(), step, 0));
    own.look();
    let shards: Vec<_> = own.list().into_iter().map(|(shard, ..)| shard).collect();
    let shard_of = |step: u64| shards.iter().find(|shard| shard.key.step == step).unwrap().clone();
    let (sent, other) = (shard_of(10), shard_of(20));
    fs::remove_dir_all(directory.path().join("step-000000000010")).unwrap();
    own.look();
    // As if it had been sent from memory all the time.
    own.set_sending(Some(sent.key.clone()));
    seal(directory.path(), 10, 0);
    own.look();
    // A newer step has replaced it.
    fs::remove_dir_all(directory.path()).unwrap();
    own.look();
    assert!(own.is_held(&sent.root), "its owner still has it");
    assert!(!own.is_held(&other.root));
    assert_eq!(own.open_pinned(&sent.root).map(|(sealed, _)| sealed.shard.key.step), Some(10));
    // It stays as long as it is the step that the job goes back to.
    let launch = sent.key.run.to_string();
    assert!(own.holds_all_of(&launch, (0, 10)) && !own.holds_all_of(&launch, (0, 20)));
    own.hold_only(&BTreeSet::new(), Some(&(launch.clone(), (0, 10))));
    assert!(own.holds_all_of(&launch, (0, 10)));
    own.hold_only(&BTreeSet::new(), Some(&(launch.clone(), (0, 20))));
    assert!(!own.holds_all_of(&launch, (0, 10)));
}

#[test]
fn a_step_is_held_only_with_the_shards_of_all_ranks_of_the_host() {
    let directory = testing::tempdir().unwrap();
    let own = watching(directory.path());
    seal(directory.path(), 10, 0);
    seal(directory.path(), 20, 1);
    own.look();
    let shards = own.list();
    let key_of = |step: u64| &shards.iter().find(|(shard, ..)| shard.key.step == step).unwrap().0.key;
    own.hold(key_of(10));
    assert!(!own.holds_all_of(&key_of(10).run, (0, 10)), "the other rank of the host has no shard of it");
    seal(directory.path(), 10, 1);
    own.look();
    own.hold(key_of(10));
    assert!(own.holds_all_of(&key_of(10).run, (0, 10)));
    assert!(!own.holds_all_of("another", (0, 10)));
}
