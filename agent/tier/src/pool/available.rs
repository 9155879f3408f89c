//! Determines the available memory before it is reserved, so that a reservation is refused instead of a save being killed halfway.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes available on the tmpfs of `directory`: what the tmpfs, the host and every control group above this process leave.
pub fn available(directory: &Path) -> u64 {
    let tmpfs = nix::sys::statvfs::statvfs(directory)
        .map_or(0, |found| found.blocks_available().saturating_mul(found.fragment_size()));
    tmpfs.min(host().unwrap_or(u64::MAX)).min(groups(Path::new("/sys/fs/cgroup")).unwrap_or(u64::MAX))
}

fn host() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the tightest control group (version 2) of this process leaves; file pages that it can drop count as available.
fn groups(root: &Path) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mut group: PathBuf = root.join(own.trim_start_matches('/'));
    let mut left = None;
    while group.starts_with(root) {
        if let Some(here) = in_group(&group) {
            left = Some(left.map_or(here, |left: u64| left.min(here)));
        }
        group = group.parent()?.to_owned();
    }
    left
}

fn in_group(group: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let most = number("memory.max")?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let dropped = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok());
    Some(most.saturating_sub(number("memory.current")?.saturating_sub(dropped.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_leaves_its_limit_minus_what_cannot_be_dropped() {
        let group = testing::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        assert_eq!(in_group(group.path()), None);
        put("memory.max", "1000\n");
        put("memory.current", "700\n");
        assert_eq!(in_group(group.path()), Some(300));
        put("memory.stat", "anon 1\ninactive_file 200\n");
        assert_eq!(in_group(group.path()), Some(500));
        put("memory.max", "max\n");
        assert_eq!(in_group(group.path()), None, "no limit");
        assert!(available(Path::new("/dev/shm")) > 0);
    }
}
