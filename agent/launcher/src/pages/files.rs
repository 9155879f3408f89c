//! Heartbeat page files: one per rank and attempt, on tmpfs, complete before any other process can see them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
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
        if of_attempt(&entry.file_name().to_string_lossy()).is_some_and(|of| of <= attempt) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The attempt of a page, from its name.
fn of_attempt(name: &str) -> Option<u32> {
    let (_, attempt) = name.strip_suffix(".page")?.rsplit_once(".attempt-")?;
    attempt.parse().ok()
}

/// Creates a directory and its parents that only this user can enter. In `/dev/shm` and `/tmp` another user may have
/// created it before us, and could then read and change its files.
///
/// # Errors
/// It cannot be created, or what exists is not a directory of ours that only we can write to.
pub fn private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let found = fs::symlink_metadata(path)?;
    let ours = found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw();
    if !ours || found.mode() & 0o022 != 0 {
        let message = "it exists already and is not a directory that belongs to us alone";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) else { return Ok(()) };
    let above = fs::metadata(parent)?;
    let is_trusted = above.uid() == 0 || above.uid() == found.uid();
    // A user who may rename in the parent can replace this directory; in a sticky one only its owner can.
    let is_open = above.mode() & 0o002 != 0 && above.mode() & 0o1000 == 0;
    if !is_trusted || is_open {
        let message = format!(
            "{} belongs to user {}, who could exchange what is in it: have that directory removed, or name another one",
            parent.display(),
            above.uid()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_directory_below_one_of_another_user_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("skipped: only root can make directories of another user");
        }
        let root = testing::tempdir().expect("a directory");
        let made_beforehand = root.path().join("mainstay-1000");
        fs::create_dir(&made_beforehand).expect("made");
        std::os::unix::fs::chown(&made_beforehand, Some(61_001), None).expect("given away");
        let refused = private_directory(&made_beforehand.join("pools")).expect_err("another user's");
        assert!(refused.to_string().contains("61001"), "{refused}");
        std::os::unix::fs::chown(&made_beforehand, Some(0), None).expect("taken back");
        fs::set_permissions(&made_beforehand, fs::Permissions::from_mode(0o777)).expect("opened to all");
        private_directory(&made_beforehand.join("pools")).expect_err("anyone may rename in it");
        fs::set_permissions(&made_beforehand, fs::Permissions::from_mode(0o1777)).expect("made sticky");
        private_directory(&made_beforehand.join("pools")).expect("only its owner may rename it");
    }

    #[test]
    fn a_directory_that_others_may_write_to_and_a_link_are_refused() {
        let root = testing::tempdir().expect("a directory");
        let path = root.path().join("a/b");
        private_directory(&path).expect("made");
        private_directory(&path).expect("ours already");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("opened to all");
        private_directory(&path).expect_err("open to all");
        let link = root.path().join("link");
        symlink("/tmp", &link).expect("a link");
        private_directory(&link).expect_err("a link");
    }

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
