//! Which replicas a holder deletes, and which it keeps although their step does not look whole.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use mainstay_checkpoint::inventory::Medium;
use mainstay_tier::peer::frame::{Header, Kind};
use mainstay_tier::peer::wire::{Frame, Timeouts, Wire};
use mainstay_tier::peer::{Inventory, SealedShard, StoredCopy};

use super::support::{Host, address, bytes, hosts_named, identity, manifest, pass, until};

/// A replica of the first of two ranks' shard.
fn replica(step: u64, verified: bool) -> StoredCopy {
    let sealed = SealedShard::of(manifest(&identity(0, step, 0, 2), &bytes(step, 0)).encode()).unwrap();
    StoredCopy { shard: sealed.shard, medium: Medium::Memory, own: false, verified, shared_content: None }
}

/// A peer that reports these copies, and takes no others.
fn holder(at: &str, copies: &Arc<Mutex<Vec<StoredCopy>>>) {
    let (listener, copies) = (TcpListener::bind(at).unwrap(), Arc::clone(copies));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let copies = Arc::clone(&copies);
            std::thread::spawn(move || {
                let Ok(mut wire) = Wire::accept(stream, &pass(), Timeouts::default()) else { return };
                while let Ok(Some(Frame::Message(header, _))) = wire.receive() {
                    let copies = copies.lock().unwrap().clone();
                    let inventory = Inventory { copies, ..Inventory::default() };
                    if header.kind != Kind::List
                        || wire.send_json(Header::of(Kind::Inventory), &inventory).is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
}

fn sees(host: &Host, step: u64, verified: bool) -> bool {
    let copies = host.service().copies();
    let mut of_others = copies.iter().filter(|copy| copy.shard.key.step == step && copy.shard.rank == 0);
    of_others.any(|copy| copy.verified == verified)
}

#[test]
fn a_step_with_copies_that_are_not_verified_yet_is_kept_like_a_whole_one() {
    let copies = Arc::new(Mutex::new(vec![replica(10, true), replica(20, true)]));
    let names: Vec<String> = (0..4).map(|_| address()).collect();
    names[2..].iter().for_each(|name| holder(name, &copies));
    let hosts = hosts_named(&names[..2], |_, settings| settings.peers = names.clone());
    hosts[0].save(0, 10, &[1], 2);
    hosts[0].save(0, 20, &[1], 2);
    let keeps = &hosts[1];
    until("replicas of both steps", || keeps.replicas().len() == 2);
    hosts[0].wait_for_copies(20, 2);
    keeps.wait_for_copies(20, 2);
    // The hosts of the first rank have restarted their agents.
    *copies.lock().unwrap() = vec![replica(10, false), replica(20, true)];
    until("the reports", || sees(keeps, 10, false) && !sees(keeps, 10, true));
    assert_eq!((keeps.least_copies(10), keeps.least_copies(20)), (0, 2));
    assert_eq!((keeps.service().collect(), keeps.replicas().len()), (0, 2));
    // They were damaged.
    *copies.lock().unwrap() = vec![replica(20, true)];
    until("the deletion of an incomplete step", || keeps.replicas().len() == 1);
    assert_eq!(keeps.least_copies(20), 2);
}
