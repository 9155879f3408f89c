//! A store that several users share.

use std::sync::Arc;

use mainstay_checkpoint::owner::owned;
use mainstay_tier::peer::SealedShard;
use mainstay_tier::peer::store::{IncomingShard, Offer, Store, StoreError};

use super::support::{RUN, bytes, identity, in_memory, manifest};

const SHARD: usize = 100_000;

fn offer(store: &Store, uid: u32, step: u64) -> Result<Arc<IncomingShard>, StoreError> {
    let mut document = manifest(&identity(0, step, 0, 1), &content(step));
    document.run = owned(uid, RUN);
    match store.offer(SealedShard::of(document.encode()).unwrap(), &[], None)? {
        Offer::Missing(upload) => Ok(upload),
        Offer::Here => panic!("it is not here yet"),
    }
}

fn content(step: u64) -> Vec<u8> {
    bytes(step, 0).into_iter().cycle().take(SHARD).collect()
}

fn put(store: &Store, uid: u32, step: u64) -> Result<(), StoreError> {
    let upload = offer(store, uid, step)?;
    for index in upload.missing() {
        let (offset, length, _) = upload.sealed.chunk(index).unwrap();
        let claim = upload.claim(index).unwrap();
        claim.write(offset, &content(step)[offset as usize..][..length as usize]).unwrap();
        claim.done();
    }
    store.commit(&upload)
}

/// The steps of a user that are kept, in order.
fn steps(store: &Store, uid: u32) -> Vec<u64> {
    let kept = store.list().into_iter().map(|(shard, ..)| shard.key);
    let mut steps: Vec<u64> = kept.filter(|key| key.run == owned(uid, RUN)).map(|key| key.step).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn one_user_may_fill_a_store_and_another_one_still_gets_an_equal_part() {
    let home = in_memory();
    let store = Store::open(home.path(), 6 * SHARD as u64).unwrap();
    (1..=6).for_each(|step| put(&store, 1000, step).unwrap());
    assert!(matches!(put(&store, 1000, 7), Err(StoreError::Full { .. })), "nobody else to make room");

    (1..=3).for_each(|step| put(&store, 1001, step).unwrap());
    assert_eq!((steps(&store, 1000), steps(&store, 1001)), (vec![4, 5, 6], vec![1, 2, 3]));
    // Each has its part: neither reduces the other's, and the error gives the reason.
    for uid in [1000, 1001] {
        assert!(matches!(put(&store, uid, 9), Err(StoreError::Part { users: 2, .. })));
    }
    assert_eq!((steps(&store, 1000).len(), steps(&store, 1001).len()), (3, 3));

    // A third user, whose shard is still being received.
    let _coming = offer(&store, 1002, 1).unwrap();
    assert_eq!(steps(&store, 1000).len() + steps(&store, 1001).len(), 5);
}
