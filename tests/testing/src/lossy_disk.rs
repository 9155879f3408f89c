//! A disk that loses written data, for tests of code that must not trust it. Only root can mount one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::silent::run;

/// A file system on an image that is larger than the disk where it is stored: data that does not fit is accepted,
/// and lost when it is written back. fdatasync(2) then fails at most twice, and succeeds when it is called again.
#[derive(Debug)]
pub struct LossyDisk {
    at: PathBuf,
    backing: PathBuf,
}

impl LossyDisk {
    /// Mounts one over this directory that stores `mib` MiB of 64; none if that is not possible here.
    #[must_use]
    pub fn over(at: &Path, mib: u32) -> Option<LossyDisk> {
        let backing = at.with_extension("backing");
        fs::create_dir(&backing).ok()?;
        let disk = LossyDisk { at: at.to_owned(), backing };
        let (at, backing) = (disk.at.display().to_string(), disk.backing.display().to_string());
        let image = format!("{backing}/image");
        let made = run("mount", &["-t", "tmpfs", "-o", &format!("size={mib}m"), "lossy", &backing])
            && File::create(&image).and_then(|file| file.set_len(64 << 20)).is_ok()
            && run("mkfs.ext4", &["-q", "-O", "^has_journal", "-N", "64", &image])
            && run("mount", &["-o", "loop", &image, &at]);
        made.then_some(disk)
    }

    /// Stops losing data.
    ///
    /// # Panics
    /// If it cannot be done.
    pub fn enlarge(&self) {
        let backing = self.backing.display().to_string();
        assert!(run("mount", &["-o", "remount,size=80m", &backing]), "remount of {backing}");
    }
}

impl Drop for LossyDisk {
    fn drop(&mut self) {
        run("umount", &["-l", &self.at.display().to_string()]);
        run("umount", &["-l", &self.backing.display().to_string()]);
    }
}
