//! Heartbeat page files: one per rank and attempt, on tmpfs, complete before any other process can see them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mainstay_heartbeat::{PAGE_BYTES, PageSpec, format};
use nix::fcntl::{FallocateFlags, fallocate};

/// Creates the page described by `spec` in `directory`. The file is allocated in full, so that a full tmpfs causes an error
/// here and never a SIGBUS in training.
///
/// # Errors
/// The directory cannot be written, or the tmpfs is full.
pub fn make(directory: &Path, spec: &PageSpec<'_>) -> io::Result<(PathBuf, File)> {
    let path = directory.join(format!("rank-{}.attempt-{}.page", spec.rank, spec.attempt));
    let aside = path.with_extension("new");
    let write = || {
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        fallocate(&file, FallocateFlags::empty(), 0, PAGE_BYTES as i64)?;
        file.write_all(&format(spec))?;
        fs::rename(&aside, &path)?;
        Ok(file)
    };
    let made = write();
    if made.is_err() {
        let _ = fs::remove_file(&aside);
    }
    made.map(|file| (path, file))
}

/// Removes the pages of an attempt and of earlier ones; the newest two attempts are kept, for the black box.
pub fn remove(directory: &Path, attempt: u32) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if attempt_in(&entry.file_name().to_string_lossy()).is_some_and(|number| number <= attempt) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The attempt of a page, from its name.
fn attempt_in(name: &str) -> Option<u32> {
    let (_, attempt) = name.strip_suffix(".page")?.rsplit_once(".attempt-")?;
    attempt.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_allocated_in_full_and_goes_with_its_attempt() {
        let root = testing::tempdir().expect("a directory");
        let spec = PageSpec {
            job: "j",
            rank: 3,
            local_rank: 3,
            world_size: 4,
            attempt: 1,
            boot_id: [0; 16],
            creator_pid: 1,
            created_mono_ns: 1,
        };
        let (path, file) = make(root.path(), &spec).expect("a page");
        assert_eq!(file.metadata().expect("a file").len(), PAGE_BYTES as u64);
        assert!(path.ends_with("rank-3.attempt-1.page"));
        remove(root.path(), 0);
        assert!(path.exists(), "it is of a later attempt");
        remove(root.path(), 1);
        assert!(!path.exists());
        let nowhere = root.path().join("nowhere");
        make(&nowhere, &spec).expect_err("no such directory");
    }
}
