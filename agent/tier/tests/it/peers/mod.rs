//! Services of several agents on separate loopback addresses, over real sockets and files: what arrives is what was
//! sealed, or it does not arrive.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod asked_again;
mod clock;
mod deduplication;
mod divergence;
mod excluded;
mod failures;
mod false_offers;
mod forged;
mod lossy;
mod memory;
mod owners;
mod parity;
mod prepared_memory;
mod recorded_traffic;
mod replicator;
mod retention;
mod slow;
pub(crate) mod support;
mod throttle;
mod tls;
mod together;
mod trainers;
mod users;
mod users_share;
mod withdrawal;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint::inventory::steps;
use mainstay_tier::peer::credentials::Credentials;
use mainstay_tier::peer::error::PeerError;
use mainstay_tier::peer::store::{Offer, Store, StoreError};
use mainstay_tier::peer::token::Token;
use mainstay_tier::peer::wire::{Timeouts, Wire};
use mainstay_tier::peer::{SealedShard, Service};
use support::{Proxy, RUN, address, bytes, hosts, hosts_named, identity, manifest, pass, seal, shard, until};
use testing::TempDir;

/// Flips a bit of the byte at `at` in a file.
fn flip(path: &std::path::Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[test]
fn a_holder_that_has_not_asked_the_owner_since_sends_nothing_back_to_it() {
    // The holder asks rarely: when a replica arrives, it does not know yet that its owner has the shard.
    let hosts = hosts(2, |index, settings| {
        settings.interval = Duration::from_millis(if index == 1 { 1_000 } else { 50 });
    });
    let [owner, holder] = &hosts[..] else { unreachable!("two hosts") };
    for step in [10, 20, 30] {
        owner.save(0, step, &[0, 1], 2);
        owner.wait_for_copies(step, 2);
    }
    let saved = Instant::now();
    until("the holder to ask once more", || {
        holder.service().peers()[&owner.name].seen.is_some_and(|seen| seen > saved)
    });
    holder.service().nudge();
    // This shows that it has checked: its own step is sent after anything that it might have sent before.
    holder.save(0, 40, &[0], 1);
    holder.wait_for_copies(40, 2);
    assert_eq!(holder.service().counts().shards_sent, 1);
    assert_eq!(owner.replicas().len(), 1, "{:?}", owner.replicas());
}

#[test]
fn a_host_that_lost_everything_gets_its_step_back_bit_for_bit() {
    let mut hosts = hosts(3, |_, _| {});
    hosts[0].save(0, 10, &[0, 1], 2);
    hosts[0].wait_for_copies(10, 2);
    hosts[0].lose();
    hosts[0].start();
    assert_eq!(hosts[0].restore().unwrap().0, Some(10));
    hosts[0].has(10, &[0, 1]);
    // The second time everything is here.
    let again = hosts[0].service().restore(&hosts[0].place(), None, &|_| {}).unwrap();
    assert_eq!((again.fetched, again.here, again.decision.fence), (0, 2, 2));
}

#[test]
fn ranks_of_several_hosts_make_one_step_and_each_host_gets_what_it_asks_for() {
    let mut hosts = hosts(4, |_, settings| settings.copies = 2);
    for (index, host) in hosts.iter().enumerate() {
        host.save(0, 7, &[u32::try_from(index).unwrap()], 4);
    }
    hosts[3].wait_for_copies(7, 3);
    // Any two of them die.
    hosts[0].lose();
    hosts[2].lose();
    hosts[0].start();
    hosts[2].start();
    std::thread::scope(|scope| {
        let restored: Vec<_> = [0, 2]
            .map(|index| {
                let host = &hosts[index];
                scope.spawn(move || host.service().restore(&host.place(), None, &|_| {}).unwrap().decision)
            })
            .into_iter()
            .map(|asked| asked.join().unwrap())
            .collect();
        assert_eq!(restored[0], restored[1], "both go back by one decision");
    });
    for index in [0, 2] {
        hosts[index].has(7, &[0, 1, 2, 3]);
    }
}

#[test]
fn a_step_with_a_missing_shard_is_not_restored_and_epochs_are_not_mixed() {
    let hosts = hosts(2, |_, _| {});
    hosts[0].save(0, 5, &[0], 2);
    hosts[1].save(0, 5, &[1], 2);
    hosts[0].wait_for_copies(5, 2);
    // Two attempts write step 6 at once: one half of each exists.
    hosts[0].save(1, 6, &[0], 2);
    hosts[1].save(2, 6, &[1], 2);
    until("step 6 to be known", || {
        steps(&hosts[0].service().copies(), Some(RUN)).iter().filter(|state| state.key.step == 6).count() == 2
    });
    let fresh = TempDir::new().unwrap();
    let place =
        mainstay_tier::peer::WatchedDirectory { directory: fresh.path().to_owned(), ..hosts[0].place() };
    let restored = hosts[0].service().restore(&place, None, &|_| {}).unwrap();
    assert_eq!(restored.decision.step.unwrap().step, 5);
    assert!(!shard(fresh.path(), 6, 0).exists());
}

#[test]
fn a_shard_that_cannot_be_opened_for_a_moment_is_not_damaged_and_is_sent_later() {
    let hosts = hosts(2, |_, _| {});
    let [owner, holder] = &hosts[..] else { unreachable!("two hosts") };
    owner.wait_for_peers(1);
    // As seen by a host so busy that it has not listed the shard's new place yet: the seal is there, the bytes are not.
    seal(owner.directory.path(), &identity(0, 10, 0, 1), &bytes(10, 0));
    let file = shard(owner.directory.path(), 10, 0).join("state.safetensors");
    let aside = owner.directory.path().join("aside");
    fs::rename(&file, &aside).unwrap();
    owner.service().watch(owner.place());
    let is_listed = || owner.service().copies().iter().any(|copy| copy.shard.key.step == 10);
    until("the shard in the list", is_listed);
    let asked = Instant::now();
    until("a few attempts to send it", || {
        owner.service().nudge();
        !is_listed() || asked.elapsed() > Duration::from_millis(500)
    });
    fs::rename(&aside, &file).unwrap();
    owner.wait_for_copies(10, 2);
    assert_eq!(owner.service().counts().damaged, 0);
    assert_eq!(holder.replicas().len(), 1);
}

#[test]
fn no_whole_step_anywhere_is_no_error() {
    let hosts = hosts(2, |_, _| {});
    assert_eq!(hosts[0].restore().unwrap().0, None);
    assert_eq!(fs::read_dir(hosts[0].directory.path()).unwrap().count(), 0);
}

#[test]
fn a_bit_that_flips_on_the_wire_is_detected_and_the_chunk_is_sent_again() {
    let (front, back) = (address(), address());
    let flipped = std::sync::Arc::new(AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&flipped);
    let proxy = Proxy::start(&front, &back, move |at, piece| {
        // Pieces this far into the stream are of chunks; headers are 80 bytes of about ten thousand.
        if at > 100_000 && piece.len() > 20_000 && count.fetch_add(1, Ordering::SeqCst) == 0 {
            piece[10_000] ^= 1;
        }
        true
    });
    let owner = address();
    let names = [owner, front.clone()];
    let hosts = hosts_named(&names, |index, settings| {
        settings.streams = 1;
        if index == 1 {
            settings.listen = back.parse().unwrap();
        }
    });
    drop_listener_conflict(&hosts);
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    assert!(flipped.load(Ordering::SeqCst) > 0 && proxy.passed.load(Ordering::SeqCst) > bytes(1, 0).len());
    let kept = hosts[1].replicas();
    assert_eq!(fs::read(&kept[0]).unwrap(), bytes(1, 0));
}

/// Asserts that both listen, each on its own address.
fn drop_listener_conflict(hosts: &[support::Host]) {
    assert_ne!(hosts[0].service().address(), hosts[1].service().address());
}

#[test]
fn a_peer_that_always_corrupts_what_it_receives_is_skipped_for_another() {
    let (front, back, owner, third) = (address(), address(), address(), address());
    let proxy = Proxy::start(&front, &back, |at, piece| {
        if at > 50_000 && piece.len() > 20_000 {
            let middle = piece.len() / 2;
            piece[middle] ^= 0x80;
        }
        true
    });
    let names = [owner, front, third];
    let hosts = hosts_named(&names, |index, settings| {
        settings.streams = 1;
        // All except the corrupting one share a rack: it is the first choice.
        settings.domain = if index == 1 { "far" } else { "near" }.to_owned();
        if index == 1 {
            settings.listen = back.parse().unwrap();
        }
    });
    hosts[0].wait_for_peers(2);
    hosts[0].save(0, 3, &[0], 1);
    hosts[0].wait_for_copies(3, 2);
    assert_eq!(fs::read(&hosts[2].replicas()[0]).unwrap(), bytes(3, 0));
    assert!(hosts[1].replicas().is_empty(), "nothing that was spoilt is kept");
    assert!(hosts[0].service().counts().failures > 0);
    drop(proxy);
}

#[test]
fn a_broken_upload_resumes_where_it_stopped() {
    let (front, back, owner) = (address(), address(), address());
    let cut = AtomicUsize::new(0);
    let proxy =
        Proxy::start(&front, &back, move |at, _| !(at > 200_000 && cut.fetch_add(1, Ordering::SeqCst) == 0));
    let hosts = hosts_named(&[owner, front], |index, settings| {
        settings.streams = 1;
        if index == 1 {
            settings.listen = back.parse().unwrap();
        }
    });
    hosts[0].save(0, 2, &[0], 1);
    hosts[0].wait_for_copies(2, 2);
    assert_eq!(fs::read(&hosts[1].replicas()[0]).unwrap(), bytes(2, 0));
    assert!(
        hosts[0].service().counts().bytes_sent < bytes(2, 0).len() as u64,
        "what had come was not sent again"
    );
    drop(proxy);
}

#[test]
fn a_bit_that_flips_in_a_store_is_never_restored_and_another_copy_serves() {
    let mut hosts = hosts(3, |_, settings| settings.copies = 2);
    hosts[0].save(0, 4, &[0], 1);
    hosts[0].wait_for_copies(4, 3);
    hosts[0].lose();
    flip(&hosts[1].replicas()[0], 70_000);
    hosts[0].start();
    until("both holders", || {
        hosts[0].service().refresh();
        // Its store may have received one again already.
        hosts[0].least_copies(4) >= 2
    });
    let (step, _) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(4));
    hosts[0].has(4, &[0]);
}

#[test]
fn if_the_only_copy_is_damaged_all_hosts_go_back_to_the_next_older_step_and_it_is_reported() {
    let mut hosts = hosts(2, |_, _| {});
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    hosts[0].save(0, 2, &[0], 1);
    hosts[0].wait_for_copies(2, 2);
    let newest = hosts[1]
        .replicas()
        .into_iter()
        .find(|path| path.display().to_string().contains("step-000000000002"))
        .unwrap();
    flip(&newest, 5);
    hosts[0].lose();
    hosts[0].start();
    until("the holder", || {
        hosts[0].service().refresh();
        hosts[0].least_copies(1) == 1
    });
    let (step, reported) = hosts[0].restore().unwrap();
    assert_eq!(step, Some(1));
    hosts[0].has(1, &[0]);
    // Reported by the host that saw it first: the holder when it was about to copy the step again, or the host that requested it.
    let reported =
        |words: [&str; 2]| reported.iter().any(|line| words.iter().all(|word| line.contains(word)));
    let seen_here = reported(["chunk 0", "rank 0"]) && reported(["step 2", "cannot be restored"]);
    assert!(seen_here || hosts[1].service().counts().damaged > 0);
    assert!(!shard(hosts[0].directory.path(), 2, 0).exists());
}

#[test]
fn bytes_that_changed_after_the_seal_are_not_sent() {
    let hosts = hosts(2, |_, _| {});
    seal(hosts[0].directory.path(), &identity(0, 9, 0, 1), &bytes(9, 0));
    flip(&shard(hosts[0].directory.path(), 9, 0).join("state.safetensors"), 100);
    hosts[0].service().watch(hosts[0].place());
    until("the damage to be seen", || {
        hosts[0].service().nudge();
        hosts[0].service().counts().damaged > 0
    });
    assert!(hosts[1].replicas().is_empty());
    assert_eq!(hosts[0].least_copies(9), 0, "and it is offered no more");
}

#[test]
fn a_full_store_is_reported_and_another_peer_is_used() {
    let hosts = hosts(3, |index, settings| {
        settings.domain = if index == 1 { "far" } else { "near" }.to_owned();
        settings.quota = if index == 1 { 1000 } else { 1 << 30 };
    });
    hosts[0].wait_for_peers(2);
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    assert_eq!((hosts[1].replicas().len(), hosts[2].replicas().len()), (0, 1));
    let error = hosts[0].service().peers()[&hosts[1].name].error.clone().unwrap();
    testing::snapshot!("messages", "a full store", error.replace(&hosts[1].name, "PEER"));
}

#[test]
fn replicas_of_old_steps_are_deleted_when_a_newer_one_has_its_copies() {
    let hosts = hosts(2, |_, settings| settings.keep = 1);
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    // Only one of two ranks seals the next step: nothing is deleted.
    hosts[0].save(0, 2, &[0], 2);
    hosts[1].save(0, 2, &[1], 2);
    hosts[0].wait_for_copies(2, 2);
    until("the replica of step 1 to go", || {
        hosts[1].replicas().iter().all(|path| !path.display().to_string().contains("step-000000000001"))
    });
    assert!(shard(hosts[0].directory.path(), 1, 0).exists(), "what ranks wrote is not the agent's to delete");
}

#[test]
fn when_a_holder_is_lost_its_replicas_are_made_again_elsewhere() {
    let mut hosts = hosts(3, |_, _| {});
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    let holder = (1..3).find(|index| !hosts[*index].replicas().is_empty()).unwrap();
    let other = 3 - holder;
    hosts[holder].lose();
    until("another holder", || !hosts[other].replicas().is_empty());
    // When the owner is gone too, the last holder makes the copies.
    hosts[holder].start();
    hosts[0].lose();
    until("a second copy", || !hosts[holder].replicas().is_empty());
}

#[test]
fn a_host_without_the_token_reads_and_writes_nothing() {
    let hosts = hosts(2, |_, _| {});
    hosts[0].save(0, 1, &[0], 1);
    hosts[0].wait_for_copies(1, 2);
    let stranger = Credentials::from(Token::new(b"another secret altogether").unwrap());
    let refused = Wire::connect(&hosts[1].name, &stranger, Timeouts::default()).unwrap_err();
    assert!(matches!(refused, PeerError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("token"), "{refused}");
    // An agent with another token is not a peer, and reports why.
    let third = TempDir::new().unwrap();
    let settings = mainstay_tier::peer::Settings {
        listen: address().parse().unwrap(),
        name: String::new(),
        store: third.path().to_owned(),
        ..hosts[0].settings.clone()
    };
    let outsider = Service::start(settings, stranger).unwrap();
    until("the refusal", || {
        outsider.peers().values().all(|peer| peer.error.as_ref().is_some_and(|error| error.contains("token")))
    });
    assert!(outsider.copies().is_empty());
}

#[test]
fn names_in_a_manifest_do_not_lead_out_of_the_store() {
    let directory = TempDir::new().unwrap();
    let store = Store::open(&directory.path().join("store"), 1 << 30).unwrap();
    let mut evil = identity(0, 1, 0, 1);
    evil.job = "../../../../tmp/evil".to_owned();
    let mut document = manifest(&evil, &bytes(1, 0));
    document.run = "/etc/passwd\0".to_owned();
    let sealed = SealedShard::of(document.encode()).unwrap();
    let Offer::Missing(upload) = store.offer(sealed.clone(), &[], None).unwrap() else {
        panic!("it is not there yet")
    };
    assert!(matches!(store.commit(&upload), Err(StoreError::Missing(6))), "not before all chunks have come");
    for index in 0..sealed.chunks() {
        let (offset, length, _) = sealed.chunk(index).unwrap();
        let claim = upload.claim(index).unwrap();
        assert!(upload.claim(index).is_none(), "two connections do not write one chunk");
        claim.write(offset, &bytes(1, 0)[offset as usize..][..length as usize]).unwrap();
        claim.done();
    }
    store.commit(&upload).unwrap();
    assert!(matches!(store.offer(sealed, &[], None), Ok(Offer::Here)));
    let outside: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(outside, ["store"]);
}

#[test]
fn a_reopened_store_offers_only_intact_replicas() {
    let directory = TempDir::new().unwrap();
    let shards: Vec<SealedShard> = (0..3)
        .map(|rank| SealedShard::of(manifest(&identity(0, 1, rank, 3), &bytes(1, rank)).encode()).unwrap())
        .collect();
    {
        let store = Store::open(directory.path(), 1 << 30).unwrap();
        for (rank, sealed) in (0..3).zip(&shards) {
            let Offer::Missing(upload) = store.offer(sealed.clone(), &[], None).unwrap() else {
                panic!("it is new")
            };
            for index in 0..sealed.chunks() {
                let (offset, length, _) = sealed.chunk(index).unwrap();
                let claim = upload.claim(index).unwrap();
                claim.write(offset, &bytes(1, rank)[offset as usize..][..length as usize]).unwrap();
                claim.done();
            }
            // The last one is interrupted before its commit.
            if rank < 2 {
                store.commit(&upload).unwrap();
            }
        }
    }
    let replica = |rank: u32| {
        let mut homes: Vec<_> = fs::read_dir(directory.path().join("replicas"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        homes.pop().unwrap().join("step-000000000001.0").join(format!("rank-{rank:05}")).join("shard")
    };
    flip(&replica(1), 200_000);
    let store = Store::open(directory.path(), 1 << 30).unwrap();
    assert!(store.list().iter().all(|(_, _, verified)| !verified), "nothing is offered before it was read");
    let mut damaged = Vec::new();
    store.verify_all(|shard| damaged.push(shard.rank));
    assert_eq!(damaged, [1]);
    let left: Vec<(u32, bool)> =
        store.list().iter().map(|(shard, _, verified)| (shard.rank, *verified)).collect();
    assert_eq!(left, [(0, true)]);
    assert_eq!(fs::read_dir(directory.path().join("incoming")).unwrap().count(), 0);
    assert!(!replica(1).exists());
}

#[test]
fn the_token_file_must_be_a_secret() {
    use std::os::unix::fs::PermissionsExt;
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("token");
    fs::write(&path, "  0123456789abcdef0123456789abcdef\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(Token::read(&path).unwrap_err().to_string().contains("0600"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    Token::read(&path).unwrap();
    fs::write(&path, "short").unwrap();
    assert!(Token::read(&path).unwrap_err().to_string().contains("5 bytes"));
    assert!(!format!("{:?}", pass()).contains("secret"));
}
