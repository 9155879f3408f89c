//! Checks that the suite leaves nothing behind. Each run has two separate folders that its tests use in place of
//! `/tmp` and `/dev/shm`, because other runs may be on the machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::check::Verdict;

/// Passes the folder on a tmpfs to the tests.
const MEMORY: &str = "MAINSTAY_TEST_SHM";

/// The time for things that end by themselves: a killed process, a group whose last process is being reaped.
const PATIENCE: Duration = Duration::from_secs(10);

/// The places of one run.
#[derive(Debug)]
pub struct Snapshot {
    disk: PathBuf,
    memory: PathBuf,
    groups: BTreeSet<PathBuf>,
    spaces: BTreeSet<PathBuf>,
}

impl Snapshot {
    /// Makes them, with short names for the sockets in them.
    ///
    /// # Errors
    /// A folder cannot be made.
    pub fn new() -> Result<Snapshot> {
        let name = format!("mst.{}", std::process::id());
        let shm = Path::new("/dev/shm");
        let places = Snapshot {
            disk: std::env::temp_dir().join(&name),
            memory: if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() }.join(&name),
            groups: control_groups(),
            spaces: network_spaces(),
        };
        for folder in [&places.disk, &places.memory] {
            fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
            // As the folders that they replace: some tests run as other users.
            let for_all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
            fs::set_permissions(folder, for_all).with_context(|| format!("opening {}", folder.display()))?;
        }
        Ok(places)
    }

    /// Makes a command and all its children use them.
    pub fn give(&self, command: &mut Command) {
        command.env("TMPDIR", &self.disk).env(MEMORY, &self.memory);
    }

    /// Fails if anything of the run is left; deletes its folders.
    ///
    /// # Errors
    /// None: places that cannot be read are reported as left over.
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
        let reported = |what: &'static str| move |of: String| format!("left behind: {what} {of}");
        let mut left: Vec<String> = self.processes().into_iter().map(reported("the process")).collect();
        left.extend(self.mounts().into_iter().map(reported("the mount")));
        for folder in [&self.disk, &self.memory] {
            let kept = entries(folder).into_iter().filter(|path| !is_of_python(path));
            left.extend(kept.map(|path| with_some_of_it(&path)).map(reported("")));
        }
        let groups = control_groups();
        let groups = groups.difference(&self.groups).filter(|group| is_of_tests(group) && is_empty(group));
        left.extend(groups.map(|group| group.display().to_string()).map(reported("the control group")));
        let spaces = network_spaces();
        let spaces = spaces.difference(&self.spaces).filter(|space| is_of_tests(space));
        left.extend(spaces.map(|space| space.display().to_string()).map(reported("the network namespace")));
        left
    }

    /// Processes with the folders in their environment, except those that pass them to the tests.
    fn processes(&self) -> Vec<String> {
        let mine = std::process::id().to_string();
        let marks = [&self.disk, &self.memory].map(|folder| folder.display().to_string());
        let mut found = Vec::new();
        for process in entries(Path::new("/proc")) {
            let pid = process.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if pid == mine || pid.parse::<u32>().is_err() {
                continue;
            }
            // It is another user's, or has just ended.
            let Ok(environment) = fs::read(process.join("environ")) else { continue };
            let environment = String::from_utf8_lossy(&environment);
            if environment.split('\0').any(|of| marks.iter().any(|mark| of.ends_with(mark.as_str()))) {
                let line = fs::read(process.join("cmdline")).unwrap_or_default();
                found
                    .push(format!("{pid}: {}", String::from_utf8_lossy(&line).replace('\0', " ").trim_end()));
            }
        }
        found
    }

    fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let points = table.lines().filter_map(|line| line.split(' ').nth(1));
        let below =
            |point: &&str| [&self.disk, &self.memory].iter().any(|of| Path::new(point).starts_with(of));
        points.filter(below).map(str::to_owned).collect()
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Files that Python, pytest and PyTorch make for themselves (`tempfile`, `multiprocessing`, the folders of tests,
/// the compiler's cache): a killed rank cannot delete them, and the others keep theirs.
fn is_of_python(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    ["tmp", "pymp-", "pytest-of-", "torchinductor_"].iter().any(|of| name.starts_with(of))
}

/// The visible groups of all hierarchies, two levels deep: deeper ones go with those above them.
fn control_groups() -> BTreeSet<PathBuf> {
    let mut groups = BTreeSet::new();
    let mut folders = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in entries(&folder).into_iter().filter(|entry| entry.is_dir()) {
            if depth < 3 {
                folders.push((entry.clone(), depth + 1));
            }
            groups.insert(entry);
        }
    }
    groups
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
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    name.contains("mst-") || name.starts_with("mainstay-test")
}

/// A path with some of its content and the file written last: the names show which test left it.
fn with_some_of_it(path: &Path) -> String {
    let names = entries(path).into_iter().take(5);
    let names = names.filter_map(|of| Some(of.file_name()?.to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect();
    if names.is_empty() {
        return path.display().to_string();
    }
    let newest = newest(path).map(|newest| format!("; last: {}", newest.display())).unwrap_or_default();
    format!("{} ({}{newest})", path.display(), names.join(", "))
}

/// The file that was written last below a folder.
fn newest(path: &Path) -> Option<PathBuf> {
    let mut folders = vec![path.to_owned()];
    let mut all = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder) {
            let Ok(found) = entry.symlink_metadata() else { continue };
            all.extend(found.modified().ok().map(|at| (at, entry.clone())));
            if found.is_dir() {
                folders.push(entry);
            }
        }
    }
    all.into_iter().max().map(|(_, path)| path)
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
        assert!(matches!(places.check(), Ok(Verdict::Counted { failed: 0, .. })));
    }
}
