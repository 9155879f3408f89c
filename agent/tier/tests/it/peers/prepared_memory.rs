//! Shards that arrive at a host with prepared memory.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use mainstay_tier::peer::WatchedDirectory;
use testing::TempDir;

use super::flip;
use super::support::{Host, bytes, hosts, in_memory, shard, until};

/// An owner that has saved a step, and a host on standby.
fn pair() -> Vec<Host> {
    let hosts = hosts(2, |_, settings| settings.copies = 0);
    hosts[0].save(0, 3, &[0, 1], 2);
    // It is allocated in whole MiB.
    until("memory for both shards", || hosts[1].service().ready() >= 2 << 20);
    hosts
}

fn restore_into(host: &Host, directory: &TempDir) -> Result<Option<u64>, String> {
    let place = WatchedDirectory { directory: directory.path().to_owned(), ..host.place() };
    let restored = host.service().restore(&place, None, &|_| {});
    restored.map(|restored| restored.decision.step.map(|key| key.step)).map_err(|error| error.to_string())
}

fn in_store(host: &Host) -> usize {
    ["incoming", "spare"].map(|name| fs::read_dir(host.store.path().join(name)).unwrap().count()).iter().sum()
}

#[test]
fn a_host_on_standby_receives_into_prepared_memory_and_gives_it_to_the_user() {
    let hosts = pair();
    let home = in_memory();
    assert_eq!(restore_into(&hosts[1], &home).unwrap(), Some(3));
    for rank in [0, 1] {
        let file = shard(home.path(), 3, rank).join("state.safetensors");
        assert!(fs::read(&file).unwrap() == bytes(3, rank), "rank {rank}");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 2, "the shard and its manifest");
    }
    assert_eq!((hosts[1].service().ready(), in_store(&hosts[1])), (0, 0));
}

#[test]
fn on_another_file_system_the_bytes_are_written_and_the_memory_stays() {
    let hosts = pair();
    let ready = hosts[1].service().ready();
    // On disk, like most checkpoint directories.
    let home = TempDir::new().unwrap();
    assert_eq!(restore_into(&hosts[1], &home).unwrap(), Some(3));
    assert!(fs::read(shard(home.path(), 3, 1).join("state.safetensors")).unwrap() == bytes(3, 1));
    assert_eq!(hosts[1].service().ready(), ready);
}

#[test]
fn damaged_bytes_are_not_given_to_the_user_and_their_memory_is_used_again() {
    let hosts = pair();
    let spoilt = shard(hosts[0].directory.path(), 3, 1).join("state.safetensors");
    flip(&spoilt, 70_000);
    let home = in_memory();
    assert_ne!(restore_into(&hosts[1], &home), Ok(Some(3)));
    assert!(!shard(home.path(), 3, 1).exists());
    // Nothing of it is left, in its directory or in the store.
    let step = shard(home.path(), 3, 1);
    let left = fs::read_dir(step.parent().unwrap()).unwrap().flatten();
    assert_eq!(left.filter(|entry| entry.file_name() != "rank-00000").count(), 0);
    assert!(hosts[1].service().ready() > 0);
}
