//! Memory limits of control groups, version 1 and 2: our own and those of processes of interest.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use mainstay_health::host::os::{GroupEvents, GroupUsage, MemoryGroup, Reading};
use mainstay_model::id::Pid;

use super::proc::read;

/// The names of the files with memory statistics.
struct Files {
    limit: &'static str,
    usage: &'static str,
    droppable: &'static str,
    /// The file that counts kills, and its key.
    kills: (&'static str, &'static str),
    /// The file that counts how often the limit was reached, and its key; without a key the whole file is the number.
    at_limit: (&'static str, &'static str),
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file ",
    kills: ("memory.oom_control", "oom_kill "),
    at_limit: ("memory.failcnt", ""),
};
const VERSION_2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    droppable: "inactive_file ",
    kills: ("memory.events", "oom_kill "),
    at_limit: ("memory.events", "max "),
};

/// The groups that limit us or these processes below what the host has. A group without a limit is left out.
pub(super) fn groups(
    proc: &Path,
    sys: &Path,
    processes: &[Pid],
    host_total: Option<u64>,
) -> Vec<MemoryGroup> {
    let owners = std::iter::once("self".to_owned()).chain(processes.iter().map(|pid| pid.0.to_string()));
    let mut seen = BTreeSet::new();
    let mut groups = Vec::new();
    for owner in owners {
        // A process that is gone has no limit, and a host without control groups has none.
        let Ok(membership) = read(&proc.join(owner).join("cgroup")) else { continue };
        let Some((mount, path, files)) = memory_group(sys, &membership) else { continue };
        let Some((dir, limit)) = tightest(&mount, &path, &files) else { continue };
        if host_total.is_some_and(|total| limit >= total) || !seen.insert(dir.clone()) {
            continue;
        }
        let usage = match usage(&dir, &files) {
            Ok(used) => Reading::Value(GroupUsage { limit, used }),
            Err(why) => Reading::NotAvailable(why),
        };
        groups.push(MemoryGroup { source: dir.display().to_string(), usage, events: events(&dir, &files) });
    }
    groups
}

/// The hierarchy that counts memory, and the group's path in it. On hosts with both versions, memory belongs to version 1
/// if that lists it.
fn memory_group(sys: &Path, membership: &str) -> Option<(PathBuf, PathBuf, Files)> {
    let mut unified = None;
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let path = PathBuf::from(path.trim_start_matches('/'));
        if controllers.split(',').any(|controller| controller == "memory") {
            return Some((sys.join("fs/cgroup/memory"), path, VERSION_1));
        }
        if controllers.is_empty() {
            unified = Some((sys.join("fs/cgroup"), path, VERSION_2));
        }
    }
    unified
}

/// Our own group of version 2; none if version 1 counts memory.
pub(super) fn unified_group(proc: &Path, sys: &Path) -> Option<PathBuf> {
    let membership = read(&proc.join("self/cgroup")).ok()?;
    let (mount, path, files) = memory_group(sys, &membership)?;
    (files.kills == VERSION_2.kills).then(|| mount.join(path))
}

/// The control group that counts the memory of a process, as the kernel names it in its log.
pub(super) fn of_process(proc: &Path, pid: Pid) -> Option<String> {
    let membership = read(&proc.join(pid.0.to_string()).join("cgroup")).ok()?;
    let (_, path, _) = memory_group(Path::new(""), &membership)?;
    Some(format!("/{}", path.display()))
}

/// How often the kernel killed processes in a group of version 2 and its descendants.
pub(super) fn kills(dir: &Path) -> Option<u64> {
    count(dir, VERSION_2.kills)
}

/// The lowest limit on the path from the group to the root. Inside a container the path may not be visible; then the
/// visible root is the container's own group.
fn tightest(mount: &Path, path: &Path, files: &Files) -> Option<(PathBuf, u64)> {
    path.ancestors()
        .map(|group| mount.join(group))
        .filter_map(|dir| {
            let limit = read(&dir.join(files.limit)).ok()?.trim().parse().ok()?;
            Some((dir, limit))
        })
        .min_by_key(|(_, limit)| *limit)
}

/// The events of the group; none if the kernel does not report them (before 4.13, or the root).
fn events(dir: &Path, files: &Files) -> Option<GroupEvents> {
    Some(GroupEvents { kills: count(dir, files.kills)?, at_limit: count(dir, files.at_limit)? })
}

/// The number after a key in a file of a group.
fn count(dir: &Path, (file, word): (&str, &str)) -> Option<u64> {
    let text = read(&dir.join(file)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(word))?.trim().parse().ok()
}

/// Bytes in use, without page cache that the kernel would reclaim first.
fn usage(dir: &Path, files: &Files) -> Result<u64, String> {
    let path = dir.join(files.usage);
    let used: u64 =
        read(&path)?.trim().parse().map_err(|error| format!("reading {}: {error}", path.display()))?;
    let stat = read(&dir.join("memory.stat"))?;
    let droppable = stat
        .lines()
        .find_map(|line| line.strip_prefix(files.droppable))
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0);
    Ok(used.saturating_sub(droppable))
}
