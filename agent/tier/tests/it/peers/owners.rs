//! Runs of two users with the same name. The agent adds the owner to the name, from the kernel's credentials of the caller.

use std::fs;

use mainstay_checkpoint::owner::{owned, owner};
use mainstay_checkpoint_format::MANIFEST_NAME;
use mainstay_tier::peer::{SealedShard, User, WatchedDirectory};
use testing::TempDir;

use super::support::{RUN, bytes, hosts, identity, seal, until};

/// The place of a directory under the run of `uid`. Its files belong to this process, so that the test need not run as root.
fn place_of(uid: u32, directory: &TempDir) -> WatchedDirectory {
    let run = owned(uid, RUN);
    WatchedDirectory { run, directory: directory.path().to_owned(), user: User::own(), pool: None }
}

#[test]
fn a_restore_fetches_nothing_of_another_user_and_the_peer_keeps_both() {
    let hosts = hosts(2, |_, settings| settings.keep = 1);
    let (of_a, of_b) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    seal(of_a.path(), &identity(0, 10, 0, 1), &bytes(10, 0));
    // Later steps of the other user with the same name: they must delete nothing of the first user.
    for step in [901, 902, 903] {
        seal(of_b.path(), &identity(0, step, 0, 1), &bytes(step, 0));
    }
    let service = hosts[0].service();
    hosts[0].wait_for_peers(1);
    service.watch(place_of(1000, &of_a));
    service.watch(place_of(1001, &of_b));
    let kept = |uid: u32| {
        service.refresh();
        let copies = service.copies().into_iter();
        copies.filter(|copy| !copy.own && owner(copy.shard.key.run_id()) == Some(uid)).count()
    };
    until("replicas of both users", || {
        service.nudge();
        kept(1000) == 1 && kept(1001) >= 1
    });
    hosts[1].service().collect();
    assert_eq!(kept(1000), 1, "the steps of one user made a peer delete the replica of another");

    // Each is restored on a host that has lost its files.
    for (uid, step) in [(1000, 10), (1001, 903)] {
        let fresh = TempDir::new().unwrap();
        let restored = hosts[1].service().restore(&place_of(uid, &fresh), None, &|_| {}).unwrap();
        assert_eq!(restored.decision.step.map(|key| key.step), Some(step));
        let manifest = fresh.path().join(format!("step-{step:012}/rank-00000")).join(MANIFEST_NAME);
        let back = SealedShard::read(&manifest).unwrap();
        assert_eq!(owner(&back.shard.key.run), None, "the user finds the name that the user gave");
        assert!(fs::read(manifest.with_file_name(&back.file)).unwrap() == bytes(step, 0));
    }
    // A user without steps, and a run of the agents themselves.
    for run in [owned(1002, RUN), RUN.to_owned(), owned(1002, &owned(1000, RUN))] {
        let fresh = TempDir::new().unwrap();
        let place = WatchedDirectory { run, ..place_of(1002, &fresh) };
        let restored = hosts[1].service().restore(&place, None, &|_| {}).unwrap();
        assert_eq!(restored.decision.step, None, "{}", place.run);
        assert!(fs::read_dir(fresh.path()).unwrap().next().is_none());
    }
}

#[test]
fn a_watch_of_another_user_hides_nothing() {
    let hosts = hosts(1, |_, _| {});
    let directory = TempDir::new().unwrap();
    seal(directory.path(), &identity(0, 10, 0, 1), &bytes(10, 0));
    let service = hosts[0].service();
    service.watch(place_of(1000, &directory));
    let other = User { uid: 65_534, gid: 65_534 };
    service.watch(WatchedDirectory { user: other, ..place_of(1001, &directory) });
    let found = service.copies();
    assert_eq!(found.len(), 1);
    assert_eq!(owner(found[0].shard.key.run_id()), Some(1000));
}

#[test]
fn a_copy_of_another_users_manifest_is_another_shard() {
    let hosts = hosts(1, |_, _| {});
    let (of_a, of_b) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for directory in [&of_a, &of_b] {
        seal(directory.path(), &identity(0, 10, 0, 1), &bytes(10, 0));
    }
    let service = hosts[0].service();
    service.watch(place_of(1000, &of_a));
    service.watch(place_of(1001, &of_b));
    let copies = service.copies();
    assert_eq!(copies.len(), 2);
    let of_b_copy = copies.iter().find(|copy| owner(copy.shard.key.run_id()) == Some(1001)).unwrap();
    service.remove(&of_b_copy.shard.key).unwrap();
    assert!(of_a.path().join("step-000000000010/rank-00000").join(MANIFEST_NAME).exists());
    assert!(!of_b.path().join("step-000000000010/rank-00000").join(MANIFEST_NAME).exists());
}
