//! Caches of compiled programs (XLA, torchinductor, Triton): selects the files to keep for other hosts.
//!
//! Compilers name their files by content and never change one. So the caches of several hosts are merged by adding
//! missing files, the newest first. An existing file is never replaced.

use std::cmp::Reverse;

use crate::inventory::{Copy, StepState, steps};

/// Maximum number of hosts whose caches are merged: ranks wait for the merge, and each further cache adds less.
const MAX_HOSTS: usize = 8;

/// A file of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Its path relative to the directory.
    pub path: String,
    /// Size, bytes.
    pub size: u64,
    /// When it was last written, seconds since 1970.
    pub written: i64,
}

/// Whether a file is incomplete or of no use to other hosts, by its name.
pub fn is_passing(path: &str) -> bool {
    let passing = |part: &str| {
        let is_lock =
            part.ends_with(".lock") || part == "lock" || part == "locks" || part.starts_with(".nfs");
        let is_half = part.starts_with("tmp.")
            || part.starts_with(".tmp")
            || part.ends_with(".tmp")
            || part.contains(".tmp.")
            || part.contains(".mainstay-");
        is_lock || is_half
    };
    path.split('/').any(passing)
}

/// The files of a cache to keep, sorted by name: those without a change for `quiet` seconds, the newest first as far as
/// they fit into `quota` bytes.
pub fn chosen(files: &[Cached], now: i64, quiet: i64, quota: u64) -> Vec<&Cached> {
    let mut ready: Vec<&Cached> = files
        .iter()
        .filter(|file| !is_passing(&file.path) && now.saturating_sub(file.written) >= quiet)
        .collect();
    ready.sort_by(|a, b| (b.written, &a.path).cmp(&(a.written, &b.path)));
    let mut left = quota;
    ready.retain(|file| {
        let fits = file.size <= left;
        left -= if fits { file.size } else { 0 };
        fits
    });
    ready.sort_by(|a, b| a.path.cmp(&b.path));
    ready
}

/// The run of one host's cache. It includes the host, so that caches that two hosts seal in the same second do not
/// collide. It has no `@`, where the run id would end.
pub fn run_of(name: &str, host: &str) -> String {
    format!("{}{}", prefix(name), host.replace('@', "%"))
}

fn prefix(name: &str) -> String {
    format!("cache:{}/", name.replace('@', "%"))
}

/// The caches with this name that `me` should merge: the newest whole one of each host, the newest first, except those
/// that are stored here as its own. Limited to `quota` bytes in total, but always includes the first.
pub fn worth_bringing(copies: &[Copy], name: &str, me: &str, quota: u64) -> Vec<StepState> {
    let prefix = prefix(name);
    let of_cache = copies.iter().filter(|copy| copy.shard.key.run_id().starts_with(&prefix));
    // Host names have no `/`: a `/` here belongs to the name of another cache.
    let of_cache = of_cache.filter(|copy| !copy.shard.key.run_id()[prefix.len()..].contains('/')).cloned();
    let of_cache: Vec<Copy> = of_cache.collect();
    let mut newest: Vec<StepState> = Vec::new();
    for state in steps(&of_cache, None).into_iter().filter(StepState::is_whole) {
        // `steps` returns the newest first.
        if newest.iter().all(|other| other.key.run_id() != state.key.run_id()) {
            newest.push(state);
        }
    }
    let is_mine =
        |state: &StepState| state.ranks.values().flatten().any(|copy| copy.own && copy.holder == me);
    newest.retain(|state| !is_mine(state));
    newest.sort_by_key(|state| Reverse((state.created, state.key.clone())));
    newest.truncate(MAX_HOSTS);
    let mut left = quota;
    let fits = |state: &StepState| {
        let fits = state.bytes() <= left;
        left = left.saturating_sub(state.bytes());
        fits
    };
    let count = newest.iter().map(fits).take_while(|fits| *fits).count();
    newest.truncate(count.max(1));
    newest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Medium, Shard, StepKey};

    fn sealed(name: &str, host: &str, holder: &str, created: i64, bytes: u64) -> Copy {
        let run = run_of(name, host);
        let step = created.unsigned_abs();
        let key = StepKey { step, job: "cache".into(), run: run.into(), attempt: 0, world: 1 };
        let shard = Shard { key, rank: 0, root: format!("{host}{created}"), bytes, created, piece: None };
        Copy { holder: holder.into(), medium: Medium::Disk, own: holder == host, verified: true, shard }
    }

    fn brought(copies: &[Copy], quota: u64) -> Vec<(String, i64)> {
        let worth = worth_bringing(copies, "xla", "me", quota);
        worth.iter().map(|state| (state.key.run.to_string(), state.created)).collect()
    }

    #[test]
    fn the_newest_cache_of_each_other_host_is_selected_newest_first() {
        let mut copies = vec![
            sealed("xla", "a", "a", 10, 1),
            sealed("xla", "a", "a", 30, 1),
            sealed("xla", "a", "b", 30, 1),
            // Sealed in the same second as the cache of another host.
            sealed("xla", "b", "b", 30, 1),
            sealed("xla", "c", "b", 40, 1),
            // Stored here as its own: skipped. Without an own copy, that of an earlier host with this name is selected.
            sealed("xla", "me", "me", 50, 1),
            sealed("triton", "d", "d", 60, 1),
            sealed("xla/d", "d", "d", 60, 1),
        ];
        let expected = |names: &[(&str, i64)]| -> Vec<(String, i64)> {
            names.iter().map(|(host, created)| (run_of("xla", host), *created)).collect()
        };
        assert_eq!(brought(&copies, 100), expected(&[("c", 40), ("b", 30), ("a", 30)]));
        copies.retain(|copy| copy.holder != "me");
        copies.push(sealed("xla", "me", "a", 5, 1));
        assert_eq!(brought(&copies, 100).last(), expected(&[("me", 5)]).first());
        assert_eq!(brought(&[], 100), []);
    }

    #[test]
    fn selected_caches_are_limited_and_always_include_the_newest() {
        let copies: Vec<Copy> =
            (0..20).map(|host| sealed("xla", &format!("h{host}"), "x", 100 + host, 10)).collect();
        assert_eq!(brought(&copies, 1000).len(), MAX_HOSTS);
        assert_eq!(brought(&copies, 35).len(), 3);
        assert_eq!(brought(&copies, 1), [(run_of("xla", "h19"), 119)]);
    }

    fn file(path: &str, size: u64, written: i64) -> Cached {
        Cached { path: path.to_owned(), size, written }
    }

    #[test]
    fn incomplete_lock_and_recently_changed_files_are_left_out() {
        let files = [
            file("b/kernel.cubin", 10, 100),
            file("a.py", 10, 50),
            file("a.py.lock", 0, 50),
            file("b/tmp.123/kernel.so", 10, 50),
            file("jit_f-cache.tmp.7", 10, 50),
            file("new", 10, 195),
        ];
        let names: Vec<&str> = chosen(&files, 200, 30, 1000).iter().map(|file| file.path.as_str()).collect();
        assert_eq!(names, ["a.py", "b/kernel.cubin"]);
    }

    #[test]
    fn the_oldest_files_are_left_out_beyond_the_quota() {
        let files = [file("old", 60, 1), file("young", 60, 3), file("small", 40, 2)];
        let kept_within =
            |quota| chosen(&files, 100, 0, quota).iter().map(|file| file.path.as_str()).collect::<Vec<_>>();
        assert_eq!(kept_within(100), ["small", "young"]);
        assert_eq!(kept_within(1000), ["old", "small", "young"]);
        assert!(kept_within(10).is_empty());
    }
}
