//! How often the kernel has killed for lack of memory, by its own count: at any time, for who must know now.

use std::path::PathBuf;

use super::host;

/// The count since it was last asked for. One reader for each who counts: each kill is told once.
#[derive(Debug)]
pub struct OomKills {
    proc: PathBuf,
    seen: Option<u64>,
}

impl OomKills {
    /// Counts from now on, by the `vmstat` in `proc`.
    pub fn of(proc: PathBuf) -> OomKills {
        let seen = host::oom_kills(&proc);
        OomKills { proc, seen }
    }

    /// Kills that were not told yet; none where the kernel does not count.
    pub fn new_ones(&mut self) -> u64 {
        let Some(now) = host::oom_kills(&self.proc) else { return 0 };
        let before = self.seen.replace(now).unwrap_or(now);
        now.saturating_sub(before)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_kill_is_told_once_and_what_was_before_never() {
        let proc = tempfile::tempdir().unwrap();
        let says = |text: &str| fs::write(proc.path().join("vmstat"), text).unwrap();
        says("nr_free_pages 7\noom_kill 3\n");
        let mut kills = OomKills::of(proc.path().to_owned());
        assert_eq!(kills.new_ones(), 0);
        says("nr_free_pages 7\noom_kill 5\n");
        assert_eq!((kills.new_ones(), kills.new_ones()), (2, 0));
        // It cannot be read for a while, and then it was one more.
        says("nr_free_pages 7\n");
        assert_eq!(kills.new_ones(), 0);
        says("oom_kill 6\n");
        assert_eq!(kills.new_ones(), 1);
    }

    #[test]
    fn where_the_kernel_does_not_count_there_is_none() {
        let mut kills = OomKills::of("/nowhere".into());
        assert_eq!(kills.new_ones(), 0);
    }
}
