//! The host as read from directory trees, and from file systems that hang.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use mainstay_health::host::os::{
    Disk, GroupEvents, GroupUsage, HostSample, Memory, Pressure, Reading, Space,
};
use mainstay_model::id::Pid;
use mainstay_model::time::{Mono, Span};
use mainstay_sensors::source::host::{HostSource, Probed, Roots, identify, standard_paths};

/// A fake /proc, /sys and /etc.
struct Tree(testing::TempDir);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Tree {
        let tree = Tree(testing::tempdir().unwrap());
        files.iter().for_each(|(path, text)| tree.write(path, text));
        tree
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn roots(&self) -> Roots {
        let root = self.0.path();
        Roots { proc: root.join("proc"), sys: root.join("sys"), fstab: root.join("etc/fstab") }
    }

    fn sample(&self) -> HostSample {
        HostSource::new(self.roots(), vec![]).sample(Mono(1))
    }
}

const MEMINFO: &str = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nBuffers: 0 kB\nCached: 0 kB\n\
    SwapCached: 0 kB\nActive: 0 kB\nInactive: 0 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\nDirty: 0 kB\nWriteback: 0 kB\n\
    AnonPages: 0 kB\nMapped: 0 kB\nSlab: 0 kB\nCommitted_AS: 0 kB\nVmallocTotal: 0 kB\nVmallocUsed: 0 kB\n\
    VmallocChunk: 0 kB\n";

#[test]
fn every_reading_comes_from_the_tree() {
    let tree = Tree::new(&[
        ("proc/loadavg", "2.50 1.00 0.50 3/120 4711\n"),
        ("proc/meminfo", MEMINFO),
        ("proc/vmstat", "nr_free_pages 12\noom_kill 7\npgfault 1\n"),
        ("proc/pressure/cpu", "some avg10=12.50 avg60=0.00 avg300=0.00 total=9\n"),
        (
            "proc/pressure/memory",
            "some avg10=3.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=1.50 avg60=0.00 avg300=0.00 total=9\n",
        ),
        ("sys/devices/system/cpu/online", "0-3\n"),
    ]);
    let sample = tree.sample();
    assert_eq!(sample.load, Reading::Value(2.5));
    assert_eq!(sample.cpus, Reading::Value(4));
    assert_eq!(sample.oom_kills, Reading::Value(7));
    let kib = 1024;
    let memory =
        Memory { total: 1000 * kib, available: 600 * kib, swap_total: 50 * kib, swap_used: 30 * kib };
    assert_eq!(sample.memory, Reading::Value(memory));
    assert_eq!(sample.cpu_pressure, Reading::Value(Pressure { some_avg10: 12.5, full_avg10: 0.0 }));
    assert_eq!(sample.memory_pressure, Reading::Value(Pressure { some_avg10: 3.0, full_avg10: 1.5 }));
    assert_eq!(sample.groups, []);
}

#[test]
fn an_empty_tree_names_what_is_missing() {
    let sample = Tree::new(&[]).sample();
    for why in [
        sample.load.why_absent(),
        sample.memory.why_absent(),
        sample.cpus.why_absent(),
        sample.oom_kills.why_absent(),
    ] {
        assert!(why.is_some_and(|why| why.contains("/") && why.contains("o such file")), "{why:?}");
    }
    assert!(matches!(&sample.memory_pressure, Reading::NotAvailable(why) if why.contains("psi=0")));
}

#[test]
fn nonsense_is_reported_and_breaks_nothing() {
    for nonsense in ["", "\n", "full", "some", "some avg10=nan", "\u{0}", "oom_kill x", "a b c d e f g h"] {
        let tree = Tree::new(&[]);
        for file in [
            "proc/loadavg",
            "proc/meminfo",
            "proc/vmstat",
            "proc/pressure/cpu",
            "proc/pressure/memory",
            "proc/self/cgroup",
            "proc/self/mountinfo",
            "etc/fstab",
            "sys/devices/system/cpu/online",
        ] {
            tree.write(file, nonsense);
        }
        let sample = tree.sample();
        assert!(sample.load.value().is_none() && sample.cpus.value().is_none(), "{nonsense:?}: {sample:?}");
        assert!(
            sample.memory_pressure.value().is_none() && sample.oom_kills.value().is_none(),
            "{nonsense:?}"
        );
    }
}

#[test]
fn limits_of_both_versions_of_control_groups_are_found() {
    let tree = Tree::new(&[
        ("proc/meminfo", MEMINFO),
        ("proc/self/cgroup", "0::/system/agent\n"),
        ("sys/fs/cgroup/system/agent/memory.max", "max\n"),
        ("sys/fs/cgroup/system/memory.max", "10000\n"),
        ("sys/fs/cgroup/system/memory.current", "9000\n"),
        ("sys/fs/cgroup/system/memory.stat", "anon 1\ninactive_file 4000\n"),
        (
            "sys/fs/cgroup/system/memory.events",
            "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
        ),
        ("sys/fs/cgroup/memory/job/memory.failcnt", "7\n"),
        ("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
        ("proc/41/cgroup", "5:cpu:/\n4:memory:/job\n0::/\n"),
        ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "20000\n"),
        ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "15000\n"),
        ("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 5000\n"),
        ("proc/42/cgroup", "4:memory:/job\n"),
        ("proc/43/cgroup", "4:memory:/unlimited\n"),
        ("sys/fs/cgroup/memory/unlimited/memory.limit_in_bytes", "9223372036854771712\n"),
    ]);
    let mut source = HostSource::new(tree.roots(), vec![]);
    source.watch_processes([41, 42, 43, 44].map(Pid).to_vec());
    let groups = source.sample(Mono(1)).groups;
    let used: Vec<Option<&GroupUsage>> = groups.iter().map(|group| group.usage.value()).collect();
    assert_eq!(
        used,
        [Some(&GroupUsage { limit: 10000, used: 5000 }), Some(&GroupUsage { limit: 20000, used: 10000 })]
    );
    assert!(groups[0].source.ends_with("fs/cgroup/system"));
    let events: Vec<Option<GroupEvents>> = groups.iter().map(|group| group.events).collect();
    assert_eq!(
        events,
        [Some(GroupEvents { kills: 2, at_limit: 12 }), Some(GroupEvents { kills: 1, at_limit: 7 })]
    );
}

#[test]
fn this_host_is_read() {
    let mut source = HostSource::new(Roots::default(), standard_paths(&[Path::new("/nowhere/yet")]));
    let sample = source.sample(Mono(1));
    assert!(sample.cpus.value().is_some_and(|cpus| *cpus > 0), "{sample:?}");
    assert!(sample.load.value().is_some() && sample.memory.value().is_some(), "{sample:?}");
    let root = sample.disks.iter().find(|disk| disk.mount == "/").unwrap();
    assert!(root.space.value().is_some_and(|space| space.total >= space.free), "{root:?}");
    assert!(identify().kernel.is_some());
}

/// File systems whose answers the test controls: each request waits for its answer.
#[derive(Clone, Default)]
struct FileSystems {
    held: Arc<Mutex<BTreeMap<PathBuf, Receiver<()>>>>,
    asked: Arc<Mutex<Vec<PathBuf>>>,
}

impl FileSystems {
    /// From now on `path` answers only when something is sent.
    fn hang(&self, path: &str) -> Sender<()> {
        let (answer, wait) = channel();
        self.held.lock().unwrap().insert(path.into(), wait);
        answer
    }

    fn ask(&self, path: &Path) -> io::Result<Probed> {
        self.asked.lock().unwrap().push(path.to_owned());
        let held = self.held.lock().unwrap().remove(path);
        if let Some(wait) = held {
            let _ = wait.recv();
        }
        let space = Space { total: 100, free: 50, inodes: 0, inodes_free: 0 };
        Ok(Probed { path: path.to_owned(), space, read_only: false })
    }

    fn times_asked(&self, path: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| asked.as_path() == Path::new(path)).count()
    }

    fn source(&self, tree: &Tree, paths: &[&str]) -> HostSource {
        let systems = self.clone();
        let paths = paths.iter().map(PathBuf::from).collect();
        HostSource::asking(tree.roots(), paths, Box::new(move |path| systems.ask(path)))
    }
}

fn tree_of_mounts() -> Tree {
    Tree::new(&[
        (
            "proc/self/mountinfo",
            "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /nfs rw - nfs4 host:/x rw\n3 1 8:3 / /ckpt rw - ext4 /dev/b ro\n",
        ),
        ("etc/fstab", "/dev/b /ckpt ext4 defaults 0 0\n"),
    ])
}

fn silent(disks: &[Disk]) -> Vec<(&str, Option<Mono>)> {
    disks.iter().map(|disk| (disk.mount.as_str(), disk.silent_since)).collect()
}

#[test]
fn one_entry_per_mount_with_what_the_tables_say() {
    let tree = tree_of_mounts();
    let disks = FileSystems::default().source(&tree, &["/", "/home/run", "/ckpt/job"]).sample(Mono(1)).disks;
    assert_eq!(silent(&disks), [("/", None), ("/ckpt", None)]);
    assert_eq!((&disks[0].read_only, disks[0].meant_writable), (&Reading::Value(false), None));
    assert_eq!((&disks[1].read_only, disks[1].meant_writable), (&Reading::Value(true), Some(true)));
    assert_eq!(disks[1].space.value().map(|space| space.free), Some(50));
}

#[test]
fn a_file_system_that_hangs_blocks_no_other_and_is_asked_once() {
    let tree = tree_of_mounts();
    let systems = FileSystems::default();
    let answer = systems.hang("/nfs/a");
    // It is the first path on its mount, and before others in the order of requests.
    let mut source = systems.source(&tree, &["/nfs/a", "/nfs/b", "/z", "/ckpt"]);
    let at = |seconds| Mono(1).after(Span::seconds(seconds));
    for seconds in [0, 5, 10] {
        let disks = source.sample(at(seconds)).disks;
        assert_eq!(silent(&disks), [("/", None), ("/ckpt", None), ("/nfs", Some(at(0)))]);
        assert!(disks[0].space.value().is_some() && disks[1].space.value().is_some(), "{disks:?}");
    }
    assert_eq!((systems.times_asked("/nfs/a"), systems.times_asked("/nfs/b")), (1, 0));
    assert_eq!(systems.times_asked("/z"), 3);

    answer.send(()).unwrap();
    // The answer is available as soon as its thread runs.
    let mut seconds = 15;
    while source.sample(at(seconds)).disks[2].silent_since.is_some() {
        seconds += 5;
        std::thread::yield_now();
    }
    assert!(systems.times_asked("/nfs/b") >= 1);
}

#[test]
fn one_that_has_answered_before_gets_ten_seconds() {
    let tree = tree_of_mounts();
    let systems = FileSystems::default();
    let mut source = systems.source(&tree, &["/nfs"]);
    let at = |seconds| Mono(1).after(Span::seconds(seconds));
    source.sample(at(0));
    let answer = systems.hang("/nfs");
    assert_eq!(silent(&source.sample(at(5)).disks), [("/nfs", None)]);
    assert_eq!(silent(&source.sample(at(14)).disks), [("/nfs", None)]);
    assert_eq!(silent(&source.sample(at(15)).disks), [("/nfs", Some(at(5)))]);
    // Paths that are no longer watched are not shown, hanging or not.
    source.watch_paths(vec!["/".into()]);
    assert_eq!(silent(&source.sample(at(20)).disks), [("/", None)]);
    drop(answer);
}
