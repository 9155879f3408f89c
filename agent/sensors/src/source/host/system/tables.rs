//! Tables of the kernel and their use.

use std::path::{Path, PathBuf};

use mainstay_health::host::os::{Reading, Tables, Usage};

use crate::source::host::proc::read;

pub(super) fn read_tables(proc: &Path, sys: &Path) -> Tables {
    Tables {
        files: files(proc).map_or_else(Reading::Failed, Reading::Value),
        tasks: tasks(proc).map_or_else(Reading::Failed, Reading::Value),
        group_tasks: group_tasks(proc, sys),
    }
}

fn number(path: &Path) -> Result<u64, String> {
    let text = read(path)?;
    text.trim().parse().map_err(|_| format!("{} says {text:?}, which is not a number", path.display()))
}

/// `/proc/sys/fs/file-nr`: in use, of those free (always 0 since Linux 2.6), the maximum.
fn files(proc: &Path) -> Result<Usage, String> {
    let path = proc.join("sys/fs/file-nr");
    let text = read(&path)?;
    let mut numbers = text.split_whitespace().map(str::parse::<u64>);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(used)), Some(Ok(_)), Some(Ok(limit))) => Ok(Usage { used, limit }),
        _ => Err(format!("{} says {text:?}", path.display())),
    }
}

/// Tasks from `/proc/loadavg` and the lower of the limits for them.
fn tasks(proc: &Path) -> Result<Usage, String> {
    let path = proc.join("loadavg");
    let text = read(&path)?;
    let total = text.split_whitespace().nth(3).and_then(|tasks| tasks.split_once('/')?.1.parse().ok());
    let used =
        total.ok_or_else(|| format!("{} says {text:?}, which has no number of tasks", path.display()))?;
    let limits = [number(&proc.join("sys/kernel/pid_max"))?, number(&proc.join("sys/kernel/threads-max"))?];
    Ok(Usage { used, limit: limits[0].min(limits[1]) })
}

/// The fullest of our control groups that limit tasks.
fn group_tasks(proc: &Path, sys: &Path) -> Option<Usage> {
    let membership = read(&proc.join("self/cgroup")).ok()?;
    let (mount, path) = membership.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let mount = match controllers {
            "" => sys.join("fs/cgroup"),
            several if several.split(',').any(|name| name == "pids") => sys.join("fs/cgroup/pids"),
            _ => return None,
        };
        Some((mount, PathBuf::from(path.trim_start_matches('/'))))
    })?;
    path.ancestors()
        .filter_map(|group| {
            let group = mount.join(group);
            let limit = number(&group.join("pids.max")).ok()?;
            Some(Usage { used: number(&group.join("pids.current")).ok()?, limit })
        })
        .max_by_key(|usage| usage.used.saturating_mul(1000) / usage.limit.max(1))
}
