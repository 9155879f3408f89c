//! Temporary directories that are removed also while something still writes in them.

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long a thread may continue to write after the end of its test.
const PATIENCE: Duration = Duration::from_secs(10);

/// A directory of a test; it is removed when it is dropped.
///
/// `tempfile::TempDir` gives up if a file appears during the removal: threads of a stopped service that are
/// not joined complete their last write. This one repeats the removal until nothing is left.
#[derive(Debug)]
pub struct TempDir(PathBuf);

/// A directory in the system's folder for temporary files.
///
/// # Errors
/// It cannot be made.
pub fn tempdir() -> io::Result<TempDir> {
    TempDir::new()
}

impl TempDir {
    /// Same as [`tempdir`].
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new() -> io::Result<TempDir> {
        TempDir::new_in(std::env::temp_dir())
    }

    /// A directory in this one.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new_in(parent: impl AsRef<Path>) -> io::Result<TempDir> {
        TempDir::named(".tmp", parent)
    }

    /// A directory whose name starts with this prefix.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn named(prefix: &str, parent: impl AsRef<Path>) -> io::Result<TempDir> {
        Ok(TempDir(tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?.keep()))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for TempDir {
    fn as_ref(&self) -> &Path {
        self.path()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        while std::fs::remove_dir_all(&self.0).is_err() && self.0.exists() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_directory_is_removed_while_a_thread_still_creates_files_in_it() {
        let directory = tempdir().expect("a directory");
        let path = directory.path().to_owned();
        fs::create_dir(path.join("sub")).expect("a directory");
        let writer = thread::spawn({
            let sub = path.join("sub");
            move || {
                // Ends when the directory is gone.
                (0..).take_while(|number| fs::write(sub.join(number.to_string()), "").is_ok()).count()
            }
        });
        while fs::read_dir(path.join("sub")).expect("a directory").count() < 100 {
            thread::yield_now();
        }
        drop(directory);
        assert!(writer.join().expect("no panic") >= 100);
        assert!(!path.exists());
    }
}
