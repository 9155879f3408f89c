//! How often the kernel has killed for lack of memory, by its own count. It can be read at any time.

use std::path::{Path, PathBuf};

use super::host;

/// The count since it was last read. Each user has a separate reader: each kill is reported once.
#[derive(Debug)]
pub struct OomKills {
    counter: Counter,
    seen: Option<u64>,
}

/// The counter in use.
#[derive(Debug)]
enum Counter {
    /// Our own control group (version 2) and its descendants: kills of other programs on the host do not count.
    Group(PathBuf),
    /// The whole host, from the `vmstat` in this `/proc`.
    Host(PathBuf),
}

impl Counter {
    fn read(&self) -> Option<u64> {
        match self {
            Counter::Group(dir) => host::oom_kills_of_group(dir),
            Counter::Host(proc) => host::oom_kills(proc),
        }
    }
}

impl OomKills {
    /// Counts from now on: in our own control group if the kernel counts there, else on the whole host.
    pub fn open(proc: PathBuf, sys: &Path) -> OomKills {
        let group = host::own_group(&proc, sys).filter(|dir| host::oom_kills_of_group(dir).is_some());
        let counter = group.map_or(Counter::Host(proc), Counter::Group);
        let seen = counter.read();
        OomKills { counter, seen }
    }

    /// Kills that were not reported yet; zero if the kernel does not count.
    pub fn new_ones(&mut self) -> u64 {
        let Some(now) = self.counter.read() else { return 0 };
        let before = self.seen.replace(now).unwrap_or(now);
        now.saturating_sub(before)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_kill_is_reported_once_and_earlier_kills_never() {
        let proc = testing::tempdir().unwrap();
        let says = |text: &str| fs::write(proc.path().join("vmstat"), text).unwrap();
        says("nr_free_pages 7\noom_kill 3\n");
        let mut kills = OomKills::open(proc.path().to_owned(), Path::new("/nowhere"));
        assert_eq!(kills.new_ones(), 0);
        says("nr_free_pages 7\noom_kill 5\n");
        assert_eq!((kills.new_ones(), kills.new_ones()), (2, 0));
        // It is unreadable for a while, and then there is one more.
        says("nr_free_pages 7\n");
        assert_eq!(kills.new_ones(), 0);
        says("oom_kill 6\n");
        assert_eq!(kills.new_ones(), 1);
    }

    #[test]
    fn kills_of_other_programs_do_not_count_where_our_own_group_counts() {
        let root = testing::tempdir().unwrap();
        let (proc, sys) = (root.path().join("proc"), root.path().join("sys"));
        let group = sys.join("fs/cgroup/jobs/ours");
        fs::create_dir_all(proc.join("self")).unwrap();
        fs::create_dir_all(&group).unwrap();
        fs::write(proc.join("self/cgroup"), "0::/jobs/ours\n").unwrap();
        let ours = |count: u64| {
            fs::write(group.join("memory.events"), format!("max 0\noom 9\noom_kill {count}\n")).unwrap();
        };
        ours(1);
        fs::write(proc.join("vmstat"), "oom_kill 3\n").unwrap();
        let mut kills = OomKills::open(proc.clone(), &sys);
        fs::write(proc.join("vmstat"), "oom_kill 4\n").unwrap();
        assert_eq!(kills.new_ones(), 0);
        ours(2);
        assert_eq!(kills.new_ones(), 1);
    }

    #[test]
    fn where_the_kernel_does_not_count_there_is_none() {
        let mut kills = OomKills::open("/nowhere".into(), Path::new("/nowhere"));
        assert_eq!(kills.new_ones(), 0);
    }
}
