//! The room for processes and threads in our control groups (versions 1 and 2), and how often the kernel refused one.

use std::fs;
use std::path::{Path, PathBuf};

/// The control groups that limit the number of our processes.
#[derive(Debug)]
pub struct ProcessLimits {
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    directory: PathBuf,
    /// How often it has refused a process, when that was last read.
    refused: u64,
    /// The most processes in it while the ranks of the current attempt ran.
    most: u64,
}

impl ProcessLimits {
    /// Those of this process, by its `/proc` and `/sys`.
    pub fn read(proc: &Path, sys: &Path) -> ProcessLimits {
        let membership = fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
        let mounts = sys.join("fs/cgroup");
        let mut groups = Vec::new();
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let mount = match controllers {
                "" if mounts.join("unified").is_dir() => mounts.join("unified"),
                "" => mounts.clone(),
                names if names.split(',').any(|name| name == "pids") => mounts.join("pids"),
                _ => continue,
            };
            let own = mount.join(path.trim_start_matches('/'));
            for directory in own.ancestors().take_while(|above| above.starts_with(&mount)) {
                if directory.join("pids.max").exists() {
                    let refused = refused(directory);
                    groups.push(Group { directory: directory.to_owned(), refused, most: 0 });
                }
            }
        }
        ProcessLimits { groups }
    }

    /// Remembers how many processes there are while the ranks run.
    pub fn sample(&mut self) {
        for group in &mut self.groups {
            group.most = group.most.max(number(&group.directory, "pids.current").unwrap_or(0));
        }
    }

    /// The group that has refused a process since this was last asked, as a sentence.
    pub fn refused(&mut self) -> Option<String> {
        let mut found = None;
        for group in &mut self.groups {
            let now = refused(&group.directory);
            if now > group.refused {
                let most = number(&group.directory, "pids.max");
                let limit = most.map_or_else(String::new, |most| format!(" of {most} (pids.max)"));
                found.get_or_insert_with(|| {
                    let times = now - group.refused;
                    let path = group.directory.display();
                    format!("the kernel refused {times} new process(es) or thread(s): the limit{limit} of the control group {path} was reached")
                });
            }
            group.refused = now;
        }
        found
    }

    /// Why as many processes as the last attempt had do not fit now, as a sentence. Call it when its ranks have ended.
    pub fn too_few(&self) -> Option<String> {
        self.groups.iter().find_map(|group| {
            let limit = number(&group.directory, "pids.max")?;
            (limit < group.most).then(|| {
                format!(
                    "the control group {} has room for {limit} processes and threads (pids.max), and there were {} while \
                     the ranks ran",
                    group.directory.display(),
                    group.most
                )
            })
        })
    }
}

/// A number in a file of a group; none for `max`.
fn number(directory: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok()
}

fn refused(directory: &Path) -> u64 {
    let events = fs::read_to_string(directory.join("pids.events")).unwrap_or_default();
    events.lines().find_map(|line| line.strip_prefix("max ")?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_is_reported_once_and_a_limit_below_what_ran_is_named() {
        let root = testing::tempdir().unwrap();
        let (proc, sys) = (root.path().join("proc"), root.path().join("sys"));
        for (membership, group) in
            [("0::/jobs/ours\n", "fs/cgroup/jobs/ours"), ("7:pids:/ours\n", "fs/cgroup/pids/ours")]
        {
            let group = sys.join(group);
            fs::create_dir_all(&group).unwrap();
            fs::create_dir_all(proc.join("self")).unwrap();
            fs::write(proc.join("self/cgroup"), membership).unwrap();
            let says = |file: &str, text: &str| fs::write(group.join(file), text).unwrap();
            says("pids.max", "max\n");
            says("pids.current", "40\n");
            says("pids.events", "max 3\n");
            let mut limits = ProcessLimits::read(&proc, &sys);
            limits.sample();
            assert_eq!((limits.refused(), limits.too_few()), (None, None));
            says("pids.max", "38\n");
            says("pids.current", "10\n");
            says("pids.events", "max 5\n");
            limits.sample();
            assert!(limits.refused().is_some_and(|words| words.contains("38")));
            assert_eq!(limits.refused(), None);
            assert!(limits.too_few().is_some_and(|words| words.contains("40")));
            says("pids.max", "max\n");
            assert_eq!(limits.too_few(), None);
        }
    }
}
