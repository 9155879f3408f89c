//! Heartbeat page files: one per rank and attempt, on tmpfs, whole before anyone can see them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mainstay_heartbeat::{PAGE_BYTES, PageSpec, format};
use nix::fcntl::{FallocateFlags, fallocate};

/// Makes the page described by `spec` in `directory`. The file is allocated in full, so that a full tmpfs is an
/// error here and never a SIGBUS in training.
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

/// Removes the pages of one attempt; the newest two attempts are kept, for the black box.
pub fn remove(directory: &Path, attempt: u32) {
    let suffix = format!(".attempt-{attempt}.page");
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().ends_with(&suffix) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Makes a directory, and those above it, that only we can enter.
///
/// # Errors
/// One of them cannot be made, or what is there is not a directory.
pub fn private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
