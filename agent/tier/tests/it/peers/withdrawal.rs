//! Deletion of a replica without TLS: only the agent that sent it may, no other agent with the token.

use mainstay_tier::peer::frame::{Header, Kind};
use mainstay_tier::peer::store::{Offer, Store, WithdrawalResult};
use mainstay_tier::peer::wire::{Frame, Timeouts, Wire};
use mainstay_tier::peer::{SealedShard, WithdrawalKey};
use testing::TempDir;

use super::support::{Host, bytes, hosts, identity, manifest, pass, until};

/// The answer of `holder`, as JSON, to a client with the token that requests the deletion of replicas.
fn asked_to_drop(holder: &Host, message: &serde_json::Value) -> serde_json::Value {
    let mut wire = Wire::connect(&holder.name, &pass(), Timeouts::default()).unwrap();
    wire.send(Header::of(Kind::Drop), message.to_string().as_bytes()).unwrap();
    match wire.receive().unwrap() {
        Some(Frame::Message(header, answer)) if header.kind == Kind::Dropped => {
            serde_json::from_slice(&answer).unwrap()
        }
        _ => panic!("no answer"),
    }
}

fn roots(hosts: &[Host]) -> Vec<String> {
    hosts[0].service().copies().iter().map(|copy| copy.shard.root.clone()).collect()
}

#[test]
fn a_replica_is_deleted_for_the_agent_that_sent_it_and_no_other_with_the_token() {
    let hosts = hosts(2, |_, _| {});
    hosts[0].wait_for_peers(1);
    hosts[0].save(0, 10, &[0], 1);
    hosts[0].wait_for_copies(10, 2);
    let roots = roots(&hosts);
    let stranger = TempDir::new().unwrap();
    let key = WithdrawalKey::at(stranger.path()).unwrap();
    let secrets: Vec<String> = roots.iter().map(|root| key.secret(root)).collect();
    for message in [
        serde_json::json!({ "roots": roots }),
        serde_json::json!({ "roots": roots, "everything": true }),
        serde_json::json!({ "roots": roots, "secrets": secrets, "everything": true }),
    ] {
        let answer = asked_to_drop(&hosts[1], &message);
        assert_eq!(
            (answer["count"].as_u64(), answer["refused"].as_u64()),
            (Some(0), Some(roots.len() as u64))
        );
    }
    assert_eq!(hosts[1].replicas().len(), 1);
    // A user removes the step on the host whose ranks wrote it.
    let key = hosts[0].service().copies()[0].shard.key.clone();
    assert_eq!(hosts[0].service().remove(&key).unwrap(), 2);
    assert_eq!(hosts[1].replicas().len(), 0);
}

#[test]
fn the_owner_withdraws_a_copy_that_another_holder_has_made() {
    let mut hosts = hosts(3, |_, settings| settings.copies = 2);
    hosts[0].wait_for_peers(2);
    // First the third is unreachable, then the first: the second sends its copy to the third.
    hosts[2].lose();
    hosts[0].save(0, 10, &[0], 1);
    hosts[0].wait_for_copies(10, 2);
    hosts[0].service = None;
    hosts[2].start();
    until("a copy on the third host", || {
        hosts[1].service().nudge();
        hosts[2].replicas().len() == 1
    });
    hosts[0].start();
    hosts[0].service().watch(hosts[0].place());
    hosts[0].wait_for_copies(10, 3);
    let key = hosts[0].service().copies()[0].shard.key.clone();
    assert_eq!(hosts[0].service().remove(&key).unwrap(), 3);
}

#[test]
fn a_replica_keeps_its_lock_when_its_holder_restarts() {
    let home = TempDir::new().unwrap();
    let owner = TempDir::new().unwrap();
    let key = WithdrawalKey::at(owner.path()).unwrap();
    let sealed = SealedShard::of(manifest(&identity(0, 1, 0, 1), &bytes(1, 0)).encode()).unwrap();
    let root = sealed.shard.root.clone();
    {
        let store = Store::open(home.path(), 1 << 30).unwrap();
        let Offer::Missing(upload) = store.offer(sealed, &[], Some(key.lock(&root))).unwrap() else {
            panic!("it is new")
        };
        assert_eq!(
            store.withdraw(&root, None),
            WithdrawalResult::Refused,
            "one that is on its way has its lock too"
        );
        for index in upload.missing() {
            let (offset, length, _) = upload.sealed.chunk(index).unwrap();
            let claim = upload.claim(index).unwrap();
            claim.write(offset, &bytes(1, 0)[offset as usize..][..length as usize]).unwrap();
            claim.done();
        }
        store.commit(&upload).unwrap();
    }
    let store = Store::open(home.path(), 1 << 30).unwrap();
    assert_eq!(store.withdraw(&root, Some("")), WithdrawalResult::Refused);
    assert_eq!(store.withdraw(&root, Some(&key.secret(&root))), WithdrawalResult::Deleted);
    assert_eq!(store.withdraw(&root, Some(&key.secret(&root))), WithdrawalResult::NotHere);
}
