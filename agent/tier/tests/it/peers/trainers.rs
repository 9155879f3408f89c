//! Trainers without Mainstay write in their own formats on several hosts; hosts are lost and get their files back.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use mainstay_checkpoint::cache::worth_bringing;
use mainstay_checkpoint::files::Kind;
use mainstay_checkpoint_format::MANIFEST_NAME;
use mainstay_tier::files::{CacheRequest, FileWatch, Files, FilesSettings, WatchRequest};
use mainstay_tier::peer::{SealedShard, Service, User};
use testing::TempDir;

use super::support::{Host, bytes, end_watches, hosts, until};

const RUN: &str = "llama";

/// One host with a trainer's directory and its watch.
struct Trainer {
    files: Option<Files>,
    service: Option<Arc<Service>>,
    host: Host,
    notes: TempDir,
    directory: TempDir,
}

fn trainers(count: usize, kind: Kind) -> Vec<Trainer> {
    let trainers = hosts(count, |_, _| {}).into_iter().map(|mut host| {
        let service = host.service.take().map(Arc::new);
        let (notes, directory) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut trainer = Trainer { host, service, files: None, notes, directory };
        trainer.watch(kind);
        trainer
    });
    trainers.collect()
}

impl Drop for Trainer {
    fn drop(&mut self) {
        end_watches(&mut self.files, self.service.as_ref());
    }
}

impl Trainer {
    fn files(&self) -> Files {
        let plan = FilesSettings {
            home: self.notes.path().to_owned(),
            spool: self.host.store.path().join("files"),
            hosts: self.host.settings.peers.clone(),
            interval: self.host.settings.interval,
        };
        Files::new(Arc::clone(self.service.as_ref().unwrap()), plan)
    }

    fn watch(&mut self, kind: Kind) -> Arc<FileWatch> {
        self.files = None;
        let files = self.files();
        let wanted = WatchRequest {
            user: None,
            directory: self.directory.path().to_owned(),
            run: RUN.to_owned(),
            rules: kind.rules(),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            shared: None,
        };
        let watch = files.watch(wanted).unwrap();
        self.files = Some(files);
        watch
    }

    fn service(&self) -> &Service {
        self.service.as_ref().unwrap()
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The steps that are whole over all hosts, newest first, each with the number of hosts that have it.
    fn steps(&self) -> Vec<(u64, usize)> {
        let all = mainstay_checkpoint::inventory::steps(&self.service().copies(), Some(RUN));
        all.iter()
            .filter(|state| state.is_whole())
            .map(|state| (state.key.step, state.least_copies()))
            .collect()
    }

    /// Waits for at least `copies` hosts: while one was lost, another may have received its copies.
    fn wait_for(&self, step: u64, copies: usize) {
        until(&format!("step {step} on {copies} hosts"), || {
            self.files.as_ref().unwrap().nudge(self.path());
            self.steps().iter().any(|(number, hosts)| *number == step && *hosts >= copies)
        });
    }

    /// Everything on this host is lost, and another one with its name takes its place.
    fn replace(&mut self, kind: Kind) -> Arc<FileWatch> {
        end_watches(&mut self.files, self.service.as_ref());
        self.service = None;
        self.directory = TempDir::new().unwrap();
        self.notes = TempDir::new().unwrap();
        self.host.store = TempDir::new().unwrap();
        self.host.settings.store = self.host.store.path().to_owned();
        self.host.start();
        self.service = self.host.service.take().map(Arc::new);
        self.watch(kind)
    }
}

/// What a rank of this host writes.
fn content(host: usize, step: u64) -> Vec<u8> {
    bytes(step, host as u32)
}

/// Saves as Megatron does: files of this host's ranks, and the tracker when all are there.
fn megatron(trainers: &[Trainer], step: u64) {
    for (host, trainer) in trainers.iter().enumerate() {
        let home = trainer.path().join(format!("iter_{step:07}/mp_rank_{host:02}"));
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("model_optim_rng.pt"), content(host, step)).unwrap();
        fs::write(home.join("empty"), []).unwrap();
        fs::set_permissions(home.join("model_optim_rng.pt"), fs::Permissions::from_mode(0o640)).unwrap();
    }
    for trainer in trainers {
        fs::write(trainer.path().join("latest_checkpointed_iteration.txt"), step.to_string()).unwrap();
    }
}

fn has_megatron(trainer: &Trainer, host: usize, step: u64) {
    let home = trainer.path().join(format!("iter_{step:07}/mp_rank_{host:02}"));
    assert_eq!(fs::read(home.join("model_optim_rng.pt")).unwrap(), content(host, step));
    assert_eq!(fs::metadata(home.join("model_optim_rng.pt")).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(fs::read(home.join("empty")).unwrap(), b"");
    let tracker = fs::read_to_string(trainer.path().join("latest_checkpointed_iteration.txt")).unwrap();
    assert_eq!(tracker, step.to_string());
}

#[test]
fn a_lost_host_gets_its_files_back_before_its_ranks_start() {
    let mut all = trainers(3, Kind::Auto);
    megatron(&all, 10);
    all[0].wait_for(10, 2);
    // Files of the next step that only one host has written are not offered.
    fs::create_dir_all(all[1].path().join("iter_0000020")).unwrap();
    fs::write(all[1].path().join("iter_0000020/x"), b"half").unwrap();
    let watch = all[2].replace(Kind::Auto);
    let restored = watch.restore(false, &|_| {}).unwrap();
    assert_eq!(restored.decision.step.map(|key| key.step), Some(10));
    assert_eq!(restored.fetched, 1, "its own part, and no other host's");
    has_megatron(&all[2], 2, 10);
    assert_eq!(fs::read_dir(all[2].path()).unwrap().count(), 2, "nothing else is left there");
    // Restored files are offered again unchanged, and the next step works too.
    all[2].wait_for(10, 2);
    megatron(&all, 30);
    all[1].wait_for(30, 2);
    // The same host again: nothing has to be fetched.
    let again =
        all[1].files.as_ref().unwrap().find(all[1].path(), RUN).unwrap().restore(false, &|_| {}).unwrap();
    assert_eq!((again.decision.step.map(|key| key.step), again.bytes), (Some(30), 0));
}

#[test]
fn files_that_are_written_again_are_noticed_and_no_longer_offered() {
    let all = trainers(2, Kind::Megatron);
    megatron(&all, 10);
    all[0].wait_for(10, 2);
    let before = own_root(&all[0]).unwrap();
    let file = all[0].path().join("iter_0000010/mp_rank_00/model_optim_rng.pt");
    fs::write(&file, b"being written again").unwrap();
    until("the step to be offered here no more", || {
        all[0].files.as_ref().unwrap().nudge(all[0].path());
        own_steps(&all[0]).is_empty()
    });
    assert!(
        all[1].service().copies().iter().any(|other| other.shard.root == before),
        "a copy is as good as it was"
    );
    // With its tracker it is a checkpoint again, but another one: copies of the previous one are obsolete.
    fs::write(all[0].path().join("latest_checkpointed_iteration.txt"), "10").unwrap();
    until("another one", || own_root(&all[0]).is_some_and(|root| root != before));
    all[1].wait_for(10, 2);
    until("copies of the one before to go", || {
        all.iter().all(|other| other.service().copies().iter().all(|copy| copy.shard.root != before))
    });
}

/// The root of what this host has sealed.
fn own_root(trainer: &Trainer) -> Option<String> {
    let copies = trainer.service().copies();
    copies.into_iter().find(|copy| copy.own && copy.holder == trainer.host.name).map(|copy| copy.shard.root)
}

#[test]
fn a_peer_that_was_unreachable_when_files_were_written_again_learns_of_it_later() {
    let mut all = trainers(2, Kind::Megatron);
    megatron(&all, 10);
    all[0].wait_for(10, 2);
    let root = own_root(&all[0]).unwrap();
    let has_it = |host: &Host| {
        let manifests = host.replicas().into_iter().map(|shard| shard.with_file_name(MANIFEST_NAME));
        manifests.filter_map(|path| SealedShard::read(&path).ok()).any(|sealed| sealed.shard.root == root)
    };
    all[1].files = None;
    all[1].service = None;
    until("it to be gone", || std::net::TcpStream::connect(&all[1].host.name).is_err());
    fs::write(all[0].path().join("iter_0000010/mp_rank_00/model_optim_rng.pt"), b"being written again")
        .unwrap();
    fs::write(all[0].path().join("latest_checkpointed_iteration.txt"), "10").unwrap();
    until("it to be sealed as another one", || {
        all[0].files.as_ref().unwrap().nudge(all[0].path());
        own_root(&all[0]).is_some_and(|now| now != root)
    });
    assert!(has_it(&all[1].host), "nobody was there to be told");
    all[1].host.start();
    all[1].service = all[1].host.service.take().map(Arc::new);
    // No copy is made again on the host that wrote it.
    until("the copy to go", || !has_it(&all[1].host) && !has_it(&all[0].host));
}

#[test]
fn a_half_written_checkpoint_is_never_sealed() {
    let all = trainers(2, Kind::Auto);
    let home = all[0].path().join("checkpoint-5");
    fs::create_dir(&home).unwrap();
    let header = br#"{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let tensors = [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat();
    fs::write(home.join("model.safetensors"), tensors).unwrap();
    fs::write(all[0].path().join("ckpt_6.pt"), b"PK\x03\x04 and then its writer was killed").unwrap();
    fs::create_dir(all[0].path().join("7.orbax-checkpoint-tmp-1")).unwrap();
    fs::write(all[0].path().join("7.orbax-checkpoint-tmp-1/_CHECKPOINT_METADATA"), b"{}").unwrap();
    // A mark makes one of them whole; no other ever was.
    let complete = all[0].path().join("checkpoint-4");
    fs::create_dir(&complete).unwrap();
    fs::write(complete.join("trainer_state.json"), b"{}").unwrap();
    until("what is complete", || own_steps(&all[0]).contains(&4));
    assert_eq!(own_steps(&all[0]), [4]);
    fs::write(home.join("trainer_state.json"), b"{}").unwrap();
    until("what was completed", || own_steps(&all[0]).contains(&5));
    fs::rename(all[0].path().join("7.orbax-checkpoint-tmp-1"), all[0].path().join("7")).unwrap();
    until("what was renamed", || own_steps(&all[0]).contains(&7));
    assert!(!own_steps(&all[0]).contains(&6));
}

/// The steps of which this host has sealed its part.
fn own_steps(trainer: &Trainer) -> Vec<u64> {
    let copies = trainer.service().copies();
    let mut steps: Vec<u64> = copies
        .iter()
        .filter(|copy| copy.own && copy.holder == trainer.host.name)
        .map(|copy| copy.shard.key.step)
        .collect();
    steps.sort_unstable();
    steps
}

#[test]
fn a_step_that_only_this_host_has_is_set_aside_if_a_trainer_would_use_it() {
    let mut all = trainers(2, Kind::HuggingFace);
    let write = |trainer: &Trainer, host: usize, step: u64| {
        let home = trainer.path().join(format!("checkpoint-{step}"));
        fs::create_dir(&home).unwrap();
        fs::write(home.join(format!("rng_state_{host}.pth")), content(host, step)).unwrap();
        fs::write(home.join("trainer_state.json"), b"{}").unwrap();
    };
    (0..2).for_each(|host| write(&all[host], host, 100));
    all[0].wait_for(100, 2);
    write(&all[0], 0, 200);
    until("its part", || own_steps(&all[0]).contains(&200));
    all[1].replace(Kind::HuggingFace).restore(false, &|_| {}).unwrap();
    let back =
        all[0].files.as_ref().unwrap().find(all[0].path(), RUN).unwrap().restore(false, &|_| {}).unwrap();
    assert_eq!(back.decision.step.map(|key| key.step), Some(100));
    for trainer in &all {
        let names: Vec<String> = fs::read_dir(trainer.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with('.'))
            .collect();
        assert_eq!(names, ["checkpoint-100"], "every host's trainer finds the same one");
    }
}

#[test]
fn an_agent_that_starts_again_knows_what_it_sealed() {
    let mut all = trainers(2, Kind::Megatron);
    megatron(&all, 10);
    all[0].wait_for(10, 2);
    let root = |trainer: &Trainer| {
        trainer.service().copies().into_iter().find(|copy| copy.own).map(|copy| copy.shard)
    };
    let before = root(&all[0]);
    all[0].files = None;
    all[0].service = None;
    all[0].host.start();
    all[0].service = all[0].host.service.take().map(Arc::new);
    // No tracker: it could not be sealed again.
    fs::remove_file(all[0].path().join("latest_checkpointed_iteration.txt")).unwrap();
    all[0].watch(Kind::Megatron);
    until("what it had sealed", || own_steps(&all[0]) == [10]);
    let own = all[0].service().copies().into_iter().find(|copy| copy.own && copy.holder == all[0].host.name);
    assert_eq!(own.map(|copy| copy.shard.root), before.map(|shard| shard.root));
}

#[test]
fn files_that_all_hosts_see_are_sealed_once_and_kept_by_no_other_host() {
    let mut all = trainers(3, Kind::Megatron);
    let shared = TempDir::new().unwrap();
    for trainer in &mut all {
        trainer.directory = TempDir::new_in(shared.path()).unwrap();
    }
    let place = all[0].path().to_owned();
    let home = place.join("iter_0000003");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("x.pt"), content(0, 3)).unwrap();
    fs::write(place.join("latest_checkpointed_iteration.txt"), "3").unwrap();
    let mut watches = Vec::new();
    for trainer in &mut all {
        // The same directory for all of them.
        let files = trainer.files();
        let wanted = WatchRequest {
            user: None,
            directory: place.clone(),
            run: RUN.to_owned(),
            rules: Kind::Megatron.rules(),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            shared: Some(true),
        };
        watches.push(files.watch(wanted).unwrap());
        trainer.files = Some(files);
    }
    let holders = |trainer: &Trainer| trainer.service().copies().len();
    until("one that seals it", || all.iter().any(|trainer| holders(trainer) > 0));
    // The first host by name keeps it; no copy is sent.
    for _ in 0..3 {
        all.iter().for_each(|trainer| trainer.service().refresh());
    }
    until("one copy everywhere", || all.iter().all(|trainer| holders(trainer) == 1));
    assert!(all.iter().all(|trainer| trainer.service().counts().shards_sent == 0));
}

#[test]
fn a_cache_is_copied_to_hosts_that_lack_it_and_replaces_nothing() {
    let all = trainers(2, Kind::Auto);
    let caches = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let here = |name: &str| caches[0].path().join(name);
    fs::create_dir(here("abc")).unwrap();
    fs::write(here("abc/kernel.cubin"), b"compiled here").unwrap();
    fs::write(here("jit-cache.tmp.9"), b"half").unwrap();
    fs::write(here("kept"), b"of the first").unwrap();
    // The second host's own files are too new to be kept yet.
    for ((trainer, directory), quiet) in all.iter().zip(&caches).zip([0, 3600]) {
        let wanted = CacheRequest {
            name: "triton".to_owned(),
            directory: directory.path().to_owned(),
            quota: 1 << 20,
            quiet,
        };
        trainer.files.as_ref().unwrap().cache(wanted).unwrap();
    }
    until("a copy of it", || {
        let copies = all[1].service().copies();
        let run = copies.iter().filter(|copy| copy.shard.key.run.starts_with("cache:triton/"));
        run.filter(|copy| copy.holder == all[1].host.name && !copy.own).count() > 0
    });
    fs::write(caches[1].path().join("kept"), b"of the second").unwrap();
    let pulled = all[1].files.as_ref().unwrap().pull_caches(User::own());
    assert_eq!(pulled.into_iter().map(|(_, pulled)| pulled.unwrap()).collect::<Vec<_>>(), [1]);
    assert_eq!(fs::read(caches[1].path().join("abc/kernel.cubin")).unwrap(), b"compiled here");
    assert_eq!(fs::read(caches[1].path().join("kept")).unwrap(), b"of the second", "what is there stays");
    assert!(!caches[1].path().join("jit-cache.tmp.9").exists());
}

#[test]
fn caches_of_several_hosts_are_combined_on_another_and_fetched_once() {
    let all = trainers(3, Kind::Auto);
    let caches = [0, 1, 2].map(|_| TempDir::new().unwrap());
    for (host, cache) in caches.iter().enumerate().take(2) {
        fs::create_dir(cache.path().join("kernels")).unwrap();
        fs::write(cache.path().join(format!("kernels/{host}.cubin")), content(host, 1)).unwrap();
        fs::write(cache.path().join("kernels/both"), format!("compiled on {host}")).unwrap();
    }
    // Both are sealed now, usually in the same second.
    for (trainer, directory) in all.iter().zip(&caches) {
        let directory = directory.path().to_owned();
        let wanted = CacheRequest { name: "triton".to_owned(), directory, quota: 1 << 20, quiet: 0 };
        trainer.files.as_ref().unwrap().cache(wanted).unwrap();
    }
    let sources = || worth_bringing(&all[2].service().copies(), "triton", &all[2].host.name, 1 << 20);
    until("both caches", || sources().len() == 2);
    let newest = sources()[0].key.run.clone();
    let newest = all.iter().position(|trainer| newest.ends_with(&trainer.host.name)).unwrap();
    let pull = || all[2].files.as_ref().unwrap().pull_caches(User::own()).remove(0).1.unwrap();
    assert_eq!(pull(), 3);
    let there = |name: &str| fs::read(caches[2].path().join("kernels").join(name)).unwrap();
    assert!(there("0.cubin") == content(0, 1) && there("1.cubin") == content(1, 1));
    assert_eq!(there("both"), format!("compiled on {newest}").into_bytes(), "the newest is taken first");
    assert_eq!(pull(), 0, "it is there");
    // A lost file is fetched again, and this host offers the fetched files.
    fs::remove_file(caches[2].path().join("kernels/1.cubin")).unwrap();
    assert_eq!(pull(), 1);
    let given = || worth_bringing(&all[0].service().copies(), "triton", &all[0].host.name, 1 << 20);
    until("all of it on the third host", || {
        given().iter().any(|member| member.key.run.ends_with(&all[2].host.name))
    });
}
