//! Shards are sent to peers from the launcher's memory as soon as they are sealed there.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::common;
use crate::peers::support;

use std::fs;
use std::time::{Duration, Instant};

use common::rank::{Rank, until as until_seen};
use mainstay_checkpoint::inventory::Medium;
use mainstay_checkpoint_format::control::{Answer, State};
use mainstay_tier::disk::{self, Keep, StdVolume};
use mainstay_tier::peer::{User, WatchedDirectory};
use mainstay_tier::pool::{self, PoolOwner};
use support::{Host, RUN, hosts, until};
use testing::TempDir;

/// A launcher's keeper on a host.
struct Launcher {
    pool_owner: PoolOwner,
    checkpoints: std::path::PathBuf,
    _pools: TempDir,
    _home: TempDir,
}

impl Launcher {
    /// A launcher whose disk accepts nothing.
    fn on(host: &Host) -> Launcher {
        Launcher::with(host, 3, false)
    }

    fn with(host: &Host, slots: usize, has_disk: bool) -> Launcher {
        let shm = testing::memory();
        let pools = if shm.is_dir() { TempDir::new_in(shm) } else { TempDir::new() }.unwrap();
        let home = TempDir::new().unwrap();
        let checkpoints = home.path().join("steps");
        if !has_disk {
            fs::write(&checkpoints, b"in the way").unwrap();
        }
        let pool_owner = PoolOwner::start(pool::Settings {
            root: pools.path().to_owned(),
            directory: checkpoints.clone(),
            job: "job".into(),
            run: format!("{RUN}@7"),
            world_size: 1,
            ranks: 0..1,
            keep: Keep { steps: 2, bytes: None },
            slots,
            memory: None,
            rate: None,
        });
        let pool_owner = pool_owner.unwrap();
        host.service().watch(WatchedDirectory {
            run: RUN.to_owned(),
            directory: checkpoints.clone(),
            user: User::own(),
            pool: Some(pool_owner.directory().to_owned()),
        });
        Launcher { pool_owner, checkpoints, _pools: pools, _home: home }
    }

    fn rank(&self, size: usize) -> Rank {
        let mut rank = Rank::of(self.pool_owner.directory(), 0, 1);
        rank.size = size;
        assert_eq!(rank.reserve(size as u64 + (1 << 20)), Answer::Granted);
        rank
    }
}

#[test]
fn a_step_sealed_in_memory_is_sent_to_a_peer_without_any_disk_and_restored() {
    // Only a check of the memory can find it in time.
    let hosts = hosts(2, |_, settings| settings.interval = std::time::Duration::from_secs(3600));
    until("each other", || {
        hosts.iter().for_each(|host| host.service().refresh());
        hosts.iter().all(|host| host.service().peers().values().all(|peer| peer.alive))
    });
    let launcher = Launcher::on(&hosts[0]);
    let rank = launcher.rank(5 << 20);
    rank.save(7);
    until("step 7 on both hosts", || hosts[0].least_copies(7) == 2);
    assert!(disk::steps(&StdVolume, &launcher.checkpoints).is_empty(), "it is on no disk");
    let copies = hosts[0].service().copies();
    let own = copies.iter().find(|copy| copy.own).expect("the owner's");
    assert_eq!((own.medium, own.holder.as_str()), (Medium::Memory, hosts[0].name.as_str()));

    // Host and memory are gone; another host requests the step.
    let bytes = rank.bytes(7);
    drop(launcher);
    assert_eq!(hosts[1].restore().unwrap().0, Some(7));
    let back = support::shard(hosts[1].directory.path(), 7, 0).join("state.safetensors");
    assert!(fs::read(back).unwrap() == bytes, "bit for bit");
}

#[test]
fn memory_that_a_launcher_frees_is_not_kept_by_the_agent_that_sent_from_it() {
    let hosts = hosts(2, |_, _| ());
    until("each other", || hosts.iter().all(|host| host.service().peers().values().all(|peer| peer.alive)));
    let launcher = Launcher::on(&hosts[0]);
    let pool = launcher.pool_owner.directory().join("rank-00000/slot-").display().to_string();
    let is_mapped = || fs::read_to_string("/proc/self/maps").unwrap().contains(&pool);
    let rank = launcher.rank(5 << 20);
    rank.save(1);
    until("step 1 on both hosts", || hosts[0].least_copies(1) == 2);
    drop(rank);
    assert!(is_mapped(), "the next step in that slot goes the same way");
    drop(launcher);
    until("no trace of it", || {
        hosts[0].service().refresh();
        !is_mapped()
    });
}

#[test]
fn a_step_that_is_being_sent_stays_in_memory_while_newer_ones_are_saved() {
    // So slow that the saves happen while it is sent.
    let hosts = hosts(2, |_, settings| (settings.rate, settings.streams) = (1 << 20, 1));
    until("each other", || hosts.iter().all(|host| host.service().peers().values().all(|peer| peer.alive)));
    let launcher = Launcher::on(&hosts[0]);
    let rank = launcher.rank(5 << 20);
    rank.save(1);
    let incoming = hosts[1].store.path().join("incoming");
    until("its beginning", || fs::read_dir(&incoming).unwrap().next().is_some());
    for step in 2..=5 {
        rank.save(step);
        let free = |page: &mainstay_checkpoint_format::control::Control<'_>| {
            page.all().any(|slot| slot.state == State::Free)
        };
        until_seen(|| rank.with(free), |free| *free);
    }
    let sent = || hosts[0].service().counts().shards_sent;
    let (is_there, sent_already) = (rank.sealed().contains(&1), sent() > 0);
    assert!(is_there || sent_already, "{:?}", rank.sealed());
    until("step 1 on the other host", || sent() > 0);
    assert_eq!(hosts[0].service().counts().damaged, 0);
}

#[test]
fn a_step_overwritten_by_a_save_while_it_is_sent_is_not_damage_and_the_newest_follows() {
    let hosts = hosts(2, |_, settings| (settings.rate, settings.streams) = (16 << 20, 1));
    until("each other", || hosts.iter().all(|host| host.service().peers().values().all(|peer| peer.alive)));
    let launcher = Launcher::on(&hosts[0]);
    let rank = launcher.rank(11 << 20);
    rank.save(1);
    let incoming = hosts[1].store.path().join("incoming");
    until("its beginning", || fs::read_dir(&incoming).unwrap().next().is_some());
    // A rank that waits for a slot gets the slot of the step that is being sent.
    for step in 2..=9 {
        rank.save(step);
    }
    until("step 9 on both hosts", || hosts[0].least_copies(9) == 2);
    assert_eq!(hosts[0].service().counts().damaged, 0);
}

#[test]
fn if_each_step_is_overwritten_while_it_is_sent_one_gets_its_copies_from_disk() {
    let hosts = hosts(2, |_, settings| (settings.rate, settings.streams) = (4 << 20, 1));
    hosts[0].wait_for_peers(1);
    let launcher = Launcher::with(&hosts[0], 2, true);
    let rank = launcher.rank(8 << 20);
    let (mut step, mut last, mut longest) = (0, Instant::now(), Duration::ZERO);
    // Each step is on disk a moment later, and sent in two seconds.
    let mut save_next = || {
        step += 1;
        rank.save(step);
        let stored = launcher.checkpoints.join(format!("step-{step:012}/rank-00000/manifest.json"));
        until_seen(|| stored.exists(), |exists| *exists);
        longest = longest.max(last.elapsed());
        last = Instant::now();
        step
    };
    until("a step with its copies", || save_next() > 4 && !hosts[1].replicas().is_empty());
    // Its owner also keeps it until a newer step has its copies: it is not sent back.
    until("two more", || {
        save_next();
        hosts[0].service().counts().shards_sent >= 3
    });
    // A holder that receives nothing of a newer step for 5 s sends the older one back: not a fault on a machine that stalls.
    if longest > Duration::from_secs(2) {
        return testing::skip_part("the machine is too busy to save a step within 2 s");
    }
    assert_eq!(hosts[1].service().counts().shards_sent, 0);
}
