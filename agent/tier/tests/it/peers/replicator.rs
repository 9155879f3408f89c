//! GKE's multi-tier checkpointing: a simulated trainer follows its contract, with real files on several hosts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_tier::files::{Files, FilesSettings};
use mainstay_tier::peer::Service;
use testing::TempDir;

use super::support::{Host, bytes, end_watches, hosts, until};

const JOB: &str = "llama-7b";

/// A node of the job: its volume, its agent and its trainer.
struct Node {
    files: Option<Files>,
    service: Option<Arc<Service>>,
    host: Host,
    notes: TempDir,
    volume: TempDir,
    rank: usize,
}

fn nodes(count: usize) -> Vec<Node> {
    let nodes = hosts(count, |_, _| {}).into_iter().enumerate().map(|(rank, mut host)| {
        let service = host.service.take().map(Arc::new);
        let (notes, volume) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut node = Node { host, service, files: None, notes, volume, rank };
        node.serve();
        node
    });
    nodes.collect()
}

impl Drop for Node {
    fn drop(&mut self) {
        end_watches(&mut self.files, self.service.as_ref());
    }
}

impl Node {
    fn serve(&mut self) {
        let plan = FilesSettings {
            home: self.notes.path().to_owned(),
            spool: self.host.store.path().join("files"),
            hosts: Vec::new(),
            interval: self.host.settings.interval,
        };
        let files = Files::new(Arc::clone(self.service.as_ref().unwrap()), plan);
        files.replicate(self.volume.path()).unwrap();
        self.files = Some(files);
    }

    fn local(&self, name: &str) -> PathBuf {
        self.volume.path().join(name)
    }

    /// Starts as the trainer does: waits until no request is pending, then writes its request.
    fn begin(&self, nodes: usize, workers: u32) {
        until("what was asked before to be taken", || !self.local("replicator.yaml").exists());
        let asked = format!(
            "job-name: {JOB}\nframework: orbax\nnode-rank: {}\nnodes: {nodes}\nworkers-per-node: {workers}\n\
             peers-per-node: 1\nbackup-interval-minutes: 30\n",
            self.rank
        );
        fs::write(self.local("replicator.yaml.tmp"), asked).unwrap();
        fs::rename(self.local("replicator.yaml.tmp"), self.local("replicator.yaml")).unwrap();
    }

    /// Waits for the step to load, as each worker does. Returns the step; none if there is nothing.
    fn restored(&self, workers: u32) -> Option<u64> {
        until("replicator.prerestore", || self.local("replicator.prerestore").exists());
        let restore = |worker: u32| {
            let suffix = format!("-n{}-w{worker}.restore", self.rank);
            let names = fs::read_dir(self.volume.path()).unwrap();
            names
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .find(|name| name.starts_with(JOB) && name.ends_with(&suffix))
        };
        let mut step = None;
        for worker in 0..workers {
            until("a .restore", || restore(worker).is_some());
            let name = restore(worker).unwrap();
            let found: u64 =
                name.strip_prefix(&format!("{JOB}-s")).unwrap().split('-').next().unwrap().parse().unwrap();
            let path = self.local(&name);
            if fs::symlink_metadata(&path).unwrap().is_file() {
                assert_eq!((found, fs::metadata(&path).unwrap().len()), (0, 0));
                assert_eq!(fs::read_to_string(self.local("replicator.prerestore")).unwrap(), "{}\n");
                fs::remove_file(path).unwrap();
            } else {
                fs::rename(path, self.local(&found.to_string())).unwrap();
                step = Some(found);
            }
        }
        if let Some(step) = step {
            let reported = fs::read_to_string(self.local("replicator.prerestore")).unwrap();
            assert_eq!(reported, format!("restore-step: {step}\n"));
        }
        assert!(!self.local("replicator.failed").exists() && !self.local("replicator.errors").exists());
        step
    }

    /// Saves as Orbax does: into a temporary name, which is renamed when all files are there.
    fn save(&self, step: u64) {
        let aside = self.local(&format!("{step}.orbax-checkpoint-tmp-7"));
        fs::create_dir_all(aside.join("items/d")).unwrap();
        fs::write(aside.join("items/d/0"), bytes(step, self.rank as u32)).unwrap();
        fs::write(aside.join("_CHECKPOINT_METADATA"), format!("{{\"step\": {step}}}")).unwrap();
        fs::rename(&aside, self.local(&step.to_string())).unwrap();
    }

    fn has(&self, step: u64) {
        let home = self.local(&step.to_string());
        assert_eq!(
            fs::read(home.join("items/d/0")).unwrap(),
            bytes(step, self.rank as u32),
            "through the link"
        );
        assert!(home.join("_CHECKPOINT_METADATA").exists());
    }

    fn wait_for(&self, step: u64, copies: usize) {
        until(&format!("step {step} on {copies} hosts"), || {
            let copies_now = self.service.as_ref().unwrap().copies();
            let all = mainstay_checkpoint::inventory::steps(&copies_now, Some(JOB));
            all.iter()
                .any(|state| state.key.step == step && state.is_whole() && state.least_copies() >= copies)
        });
    }

    /// The node is lost with all its data; another one takes its place.
    fn replace(&mut self) {
        end_watches(&mut self.files, self.service.as_ref());
        self.service = None;
        (self.volume, self.notes) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        self.host.store = TempDir::new().unwrap();
        self.host.settings.store = self.host.store.path().to_owned();
        self.host.start();
        self.service = self.host.service.take().map(Arc::new);
        self.serve();
    }
}

fn data_directories(volume: &Path) -> usize {
    let names = fs::read_dir(volume).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".data")).count()
}

#[test]
fn a_trainer_finds_nothing_at_first_and_its_newest_step_when_a_node_was_replaced() {
    let mut all = nodes(3);
    all.iter().for_each(|node| node.begin(3, 1));
    for node in &all {
        assert_eq!(node.restored(1), None);
        fs::write(node.local("jax-init-info.txt"), "0\n10.0.0.1:8476\n").unwrap();
    }
    all.iter().for_each(|node| node.save(5));
    all[0].wait_for(5, 2);
    assert!(!all[0].local("5").exists(), "it was taken, as the contract says");
    // Not all nodes save the next step: it is not whole.
    all[0].save(10);
    all[2].replace();
    // All trainers start again, on a new node and on those that stayed.
    all.iter().for_each(|node| node.begin(3, 1));
    for node in &all {
        assert_eq!(node.restored(1), Some(5));
        node.has(5);
    }
    assert!(all[0].local("jax-init-info.txt").exists(), "it stays over restarts");
    assert!(!all[0].local("10").exists(), "what was of the life before is gone");
    // Training continues from there, and old steps are deleted when newer ones are safe.
    for step in [10, 15, 20] {
        all.iter().for_each(|node| node.save(step));
        all[1].wait_for(step, 2);
    }
    until("old steps to go", || all.iter().all(|node| data_directories(node.volume.path()) <= 3));
}

#[test]
fn a_restarted_agent_continues_to_serve_and_each_worker_is_notified() {
    let mut all = nodes(2);
    all.iter().for_each(|node| node.begin(2, 2));
    all.iter().for_each(|node| assert_eq!(node.restored(2), None));
    all[1].files = None;
    all[1].service = None;
    all[1].host.start();
    all[1].service = all[1].host.service.take().map(Arc::new);
    all[1].serve();
    all.iter().for_each(|node| node.save(7));
    all[0].wait_for(7, 2);
    all.iter().for_each(|node| node.begin(2, 2));
    for node in &all {
        assert_eq!(node.restored(2), Some(7));
        node.has(7);
    }
}

#[test]
fn an_invalid_request_fails_immediately_with_its_reason() {
    let all = nodes(1);
    // Renamed into its place, as trainers do: a file that is still being written is not read.
    fs::write(all[0].local("replicator.yaml.tmp"), "job-name: x\nnode-rank: 2\nnodes: 2\n").unwrap();
    fs::rename(all[0].local("replicator.yaml.tmp"), all[0].local("replicator.yaml")).unwrap();
    until("replicator.failed", || all[0].local("replicator.failed").exists());
    let reported = fs::read_to_string(all[0].local("replicator.failed")).unwrap();
    testing::snapshot!(
        "messages",
        "replicator: an invalid request fails immediately with its reason",
        reported
    );
    until("what was asked to be taken", || !all[0].local("replicator.yaml").exists());
}
