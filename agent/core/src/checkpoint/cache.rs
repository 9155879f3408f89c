//! Directories of compiled programs (XLA, torchinductor, Triton): which of their files are kept for other hosts.
//!
//! Compilers name their files by what is in them and never change one. So two hosts' caches go together by adding what is missing,
//! and a file that is there is never replaced.

/// A file of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Its name below the directory.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// When it was last written, seconds since 1970.
    pub written: i64,
}

/// Whether a file is being written, or is of use to nobody else: by the names that compilers give to such.
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

/// What is kept of a cache: what has not changed for `quiet` seconds, youngest first until `quota` bytes are full. In the order of
/// names.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, size: u64, written: i64) -> Cached {
        Cached { path: path.to_owned(), size, written }
    }

    #[test]
    fn what_is_half_written_locked_or_too_new_is_left_out() {
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
    fn the_oldest_files_give_way_to_the_quota() {
        let files = [file("old", 60, 1), file("young", 60, 3), file("small", 40, 2)];
        let of =
            |quota| chosen(&files, 100, 0, quota).iter().map(|file| file.path.as_str()).collect::<Vec<_>>();
        assert_eq!(of(100), ["small", "young"]);
        assert_eq!(of(1000), ["old", "small", "young"]);
        assert!(of(10).is_empty());
    }
}
