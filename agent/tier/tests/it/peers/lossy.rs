//! Replicas on a disk that loses writes: the kernel reports the loss once, and then considers the pages clean.

use std::fs;
use std::io::Read;
use std::sync::Arc;

use mainstay_tier::peer::SealedShard;
use mainstay_tier::peer::store::{IncomingShard, Offer, Store, StoreError};
use testing::TempDir;
use testing::lossy_disk::LossyDisk;

use super::support::{bytes, identity, manifest};

fn content(seed: u64, length: usize) -> Vec<u8> {
    bytes(seed, 0).into_iter().cycle().take(length).collect()
}

/// All chunks of a shard of step 1, received and not committed.
fn brought(store: &Store, content: &[u8]) -> Arc<IncomingShard> {
    let sealed = SealedShard::of(manifest(&identity(0, 1, 0, 1), content).encode()).unwrap();
    let Offer::Missing(upload) = store.offer(sealed, &[], None).unwrap() else {
        panic!("it is not here yet")
    };
    for index in upload.missing() {
        let (offset, length, _) = upload.sealed.chunk(index).unwrap();
        let claim = upload.claim(index).unwrap();
        claim.write(offset, &content[offset as usize..][..length as usize]).unwrap();
        claim.done();
    }
    upload
}

fn read(store: &Store, upload: &IncomingShard) -> Option<Vec<u8>> {
    let (_, mut file, _) = store.open_replica(&upload.sealed.shard.root)?;
    let mut found = Vec::new();
    file.read_to_end(&mut found).unwrap();
    Some(found)
}

#[test]
fn a_replica_whose_fdatasync_failed_is_discarded_and_the_previous_one_stays() {
    let home = TempDir::new().unwrap();
    let root = home.path().join("store");
    fs::create_dir(&root).unwrap();
    let Some(disk) = LossyDisk::over(&root, 8) else {
        return testing::skip("no file system can be mounted here (root, loop devices, mkfs.ext4)");
    };
    let store = Store::open(&root, 1 << 30).unwrap();
    let before = brought(&store, &content(1, 1 << 20));
    store.commit(&before).unwrap();
    let large = content(2, 24 << 20);
    let lost = brought(&store, &large);
    let error = store.commit(&lost).unwrap_err();
    assert!(matches!(error, StoreError::Disk { .. }), "{error}");
    // The file's pages count as clean now: a second fdatasync(2) would succeed in the end.
    for _ in 0..3 {
        assert!(matches!(store.commit(&lost), Err(StoreError::Disk { .. })));
    }
    assert!(read(&store, &lost).is_none());
    assert!(read(&store, &before) == Some(content(1, 1 << 20)));
    assert_eq!(fs::read_dir(root.join("incoming")).unwrap().count(), 0, "nothing of it is left");
    assert_eq!(store.list().len(), 1);
    drop(store);
    let again = Store::open(&root, 1 << 30).unwrap();
    again.verify_all(|shard| panic!("the replica of before is damaged: {shard:?}"));
    assert_eq!(again.list().len(), 1);
    disk.enlarge();
    let kept = brought(&again, &large);
    again.commit(&kept).unwrap();
    assert!(read(&again, &kept) == Some(large));
}

#[test]
fn connections_that_commit_one_upload_get_the_same_result() {
    let home = TempDir::new().unwrap();
    let store = Store::open(home.path(), 1 << 30).unwrap();
    let upload = brought(&store, &content(1, 1 << 20));
    store.commit(&upload).unwrap();
    store.commit(&upload).unwrap();
    assert_eq!(store.list().len(), 1);
    let other = brought(&store, &content(2, 1 << 20));
    store.abandon(&other);
    assert!(matches!(store.commit(&other), Err(StoreError::Disk { .. })), "it was abandoned");
    assert!(read(&store, &upload).is_some());
}
