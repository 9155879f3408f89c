//! Checks that the suite leaves nothing behind. Each run has two separate folders that its tests use in place of
//! `/tmp` and `/dev/shm`, because other runs may be on the machine.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;
use fs_err as fs;
use procfs::process::{Process, all_processes};
use walkdir::WalkDir;

use crate::check::Verdict;
use crate::paths;

/// Passes the folder on a tmpfs to the tests.
const MEMORY: &str = "MAINSTAY_TEST_SHM";

/// The time for things that end by themselves: a killed process, a group whose last process is being reaped.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Snapshot {
    disk: PathBuf,
    memory: PathBuf,
    groups: BTreeSet<PathBuf>,
    spaces: BTreeSet<PathBuf>,
}

impl Snapshot {
    /// Makes them, with short names for the sockets in them.
    pub fn new() -> Result<Snapshot> {
        let name = format!("mst.{}", std::process::id());
        let (disk, memory) = (std::env::temp_dir().join(&name), paths::memory().join(&name));
        for folder in [&disk, &memory] {
            fs::create_dir_all(folder)?;
            // As the folders that they replace: some tests run as other users.
            fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1777))?;
        }
        Ok(Snapshot { disk, memory, groups: control_groups(), spaces: network_spaces() })
    }

    /// Makes a command and all its children use them.
    pub fn give(&self, command: &mut Command) {
        command.env("TMPDIR", &self.disk).env(MEMORY, &self.memory);
    }

    /// Fails if anything of the run is left; deletes its folders.
    pub fn check(self) -> Result<Verdict> {
        let end = Instant::now() + PATIENCE;
        let mut left = self.left();
        while !left.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(100));
            left = self.left();
        }
        for line in &left {
            println!("{line}");
        }
        for folder in [&self.disk, &self.memory] {
            // A mount point in it stays, and has been reported.
            let _ = fs::remove_dir_all(folder);
        }
        Ok(Verdict::without(left))
    }

    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut report = |what: &str, found: Vec<String>| {
            left.extend(found.into_iter().map(|of| format!("left behind: {what} {of}")));
        };
        let folders = [&self.disk, &self.memory];
        report("the process", self.processes());
        let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let points = table.lines().filter_map(|line| line.split(' ').nth(1));
        let below = |point: &&str| folders.iter().any(|folder| Path::new(point).starts_with(folder));
        report("the mount", points.filter(below).map(str::to_owned).collect());
        let kept = folders.into_iter().flat_map(|folder| entries(folder));
        report("", kept.filter(|path| !is_of_python(path)).map(|path| with_some_of_it(&path)).collect());
        let (groups, spaces) = (control_groups(), network_spaces());
        let named = |new: &PathBuf| is_of_tests(new).then(|| new.display().to_string());
        let new = groups.difference(&self.groups).filter(|group| is_empty(group));
        report("the control group", new.filter_map(named).collect());
        report("the network namespace", spaces.difference(&self.spaces).filter_map(named).collect());
        left
    }

    /// Processes with the folders in their environment, except those that pass them to the tests.
    fn processes(&self) -> Vec<String> {
        let is_mine = |process: &Process| process.pid.cast_unsigned() == std::process::id();
        let marks = |process: &Process| {
            // It is another user's, or has just ended.
            let environment = process.environ().unwrap_or_default();
            environment.values().any(|value| [&self.disk, &self.memory].iter().any(|mark| *mark == value))
        };
        let all = all_processes().into_iter().flatten().flatten();
        let left = all.filter(|process| !is_mine(process) && marks(process));
        left.map(|process| format!("{}: {}", process.pid, process.cmdline().unwrap_or_default().join(" ")))
            .collect()
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Files that Python, pytest and PyTorch make for themselves (`tempfile`, `multiprocessing`, the folders of
/// tests, the compiler's cache): a killed rank cannot delete them, and the others keep theirs.
fn is_of_python(path: &Path) -> bool {
    ["tmp", "pymp-", "pytest-of-", "torchinductor_"].iter().any(|of| name(path).starts_with(of))
}

/// The visible groups of all hierarchies, two levels deep: deeper ones go with those above them.
fn control_groups() -> BTreeSet<PathBuf> {
    let all = WalkDir::new("/sys/fs/cgroup").min_depth(1).max_depth(4).into_iter().flatten();
    all.filter(|entry| entry.file_type().is_dir()).map(walkdir::DirEntry::into_path).collect()
}

/// Whether a group is empty: one with processes is in use, by any owner.
fn is_empty(group: &Path) -> bool {
    fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|processes| processes.is_empty())
}

fn network_spaces() -> BTreeSet<PathBuf> {
    entries(Path::new("/run/netns")).into_iter().collect()
}

/// Names that tests and their jobs use: jobs are named after the folders of their scenarios.
fn is_of_tests(path: &Path) -> bool {
    name(path).contains("mst-") || name(path).starts_with("mainstay-test")
}

/// A path with some of its content and the file written last: the names show which test left it.
fn with_some_of_it(path: &Path) -> String {
    let names: Vec<String> = entries(path).iter().take(5).map(|entry| name(entry)).collect();
    if names.is_empty() {
        return path.display().to_string();
    }
    let all = WalkDir::new(path).min_depth(1).into_iter().flatten();
    let newest = all.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.into_path())));
    let newest = newest.max().map(|(_, newest)| format!("; last: {}", newest.display())).unwrap_or_default();
    format!("{} ({}{newest})", path.display(), names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remains_of_a_run_are_found_and_reported() {
        let places = Snapshot::new().expect("folders");
        assert_eq!(places.left(), Vec::<String>::new());
        fs::write(places.disk.join("a"), "").expect("a file");
        let mut sleeper = Command::new("sleep");
        places.give(&mut sleeper);
        let mut sleeper = sleeper.arg("1000").spawn().expect("sleep can be started");
        let left = || places.left();
        // Between fork and exec it still has our environment.
        while left().len() < 2 {
            std::thread::yield_now();
        }
        assert!(left()[0].contains("sleep 1000") && left()[1].ends_with("/a"), "{:?}", left());
        sleeper.kill().expect("our own child");
        sleeper.wait().expect("our own child");
        fs::remove_file(places.disk.join("a")).expect("our own");
        assert!(places.check().is_ok_and(|verdict| verdict == Verdict::of(true)));
    }
}
