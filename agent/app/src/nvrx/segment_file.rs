//! NVRx's segment health files: a file that is not empty keeps a part of a Slurm job out of the next rendezvous. All hosts
//! of the job share the directory; files of another host are left alone.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The files of this host in the shared directory.
#[derive(Clone, Debug)]
pub struct SegmentFiles {
    directory: PathBuf,
    /// Prefix of the content of each of our files.
    mark: String,
}

impl SegmentFiles {
    /// Files of `host` in `directory`.
    pub fn new(directory: &Path, host: &str) -> SegmentFiles {
        SegmentFiles { directory: directory.to_owned(), mark: format!("mainstay on {host}: ") }
    }

    /// The path that the launcher of this part of a job reads.
    pub fn path(&self, job: &str, task: &str) -> PathBuf {
        self.directory.join(format!("segment_health_check.{job}.{task}"))
    }

    /// Keeps a part of a job out, with the reason for people who read the file. The file appears atomically.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn exclude(&self, job: &str, task: &str, reason: &str) -> io::Result<()> {
        let path = self.path(job, task);
        if fs::symlink_metadata(&path).is_ok_and(|file| file.is_file() && file.len() > 0) {
            return Ok(());
        }
        let host = self.mark.trim_start_matches("mainstay on ").trim_end_matches(": ");
        let beside = self.directory.join(format!(".segment_health_check.{job}.{task}.{host}"));
        // Users may write here too: remove an existing file of that name, and never write through it.
        match fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&beside)?;
        file.write_all(format!("{}{reason}\n", self.mark).as_bytes())?;
        fs::rename(&beside, &path).inspect_err(|_| drop(fs::remove_file(&beside)))
    }

    /// Removes the files that this host wrote, also those from before its agent's last start.
    ///
    /// # Errors
    /// The directory cannot be read, or a file of ours cannot be removed.
    pub fn admit_all(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let named = entry.file_name().to_string_lossy().starts_with("segment_health_check.");
            let ours = || begins_with(&entry.path(), self.mark.as_bytes());
            if named && ours() {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// Whether a plain file starts with `mark`. Follows no link, opens no pipe or device, and reads only that many bytes.
fn begins_with(path: &Path, mark: &[u8]) -> bool {
    if !fs::symlink_metadata(path).is_ok_and(|file| file.is_file()) {
        return false;
    }
    // Do not wait either for a file that was exchanged since the look.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let Ok(mut file) = opened else { return false };
    let mut start = vec![0; mark.len()];
    file.metadata().is_ok_and(|found| found.is_file()) && file.read_exact(&mut start).is_ok() && start == mark
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_host_wrote_is_taken_back_and_nothing_else() {
        let directory = testing::tempdir().unwrap();
        let (ours, theirs) =
            (SegmentFiles::new(directory.path(), "node-1"), SegmentFiles::new(directory.path(), "node-2"));
        ours.exclude("7", "7", "gpu.0000:3b:00: gone").unwrap();
        theirs.exclude("8", "0", "gone too").unwrap();
        fs::write(directory.path().join("segment_health_check.9.9"), "").unwrap();
        assert_eq!(
            fs::read_to_string(ours.path("7", "7")).unwrap(),
            "mainstay on node-1: gpu.0000:3b:00: gone\n"
        );
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3, "nothing half made is left");
        ours.exclude("8", "0", "here as well").unwrap();
        ours.admit_all().unwrap();
        assert!(!ours.path("7", "7").exists());
        assert!(theirs.path("8", "0").exists(), "another host's word stands");
        assert!(directory.path().join("segment_health_check.9.9").exists());
    }

    #[test]
    fn what_a_user_puts_there_is_neither_written_through_nor_waited_for() {
        let directory = testing::tempdir().unwrap();
        let files = SegmentFiles::new(directory.path(), "node-1");
        let secret = directory.path().join("secret");
        fs::write(&secret, "mainstay on node-1: keep").unwrap();
        let named = |name: &str| directory.path().join(name);
        std::os::unix::fs::symlink(&secret, named(".segment_health_check.7.7.node-1")).unwrap();
        std::os::unix::fs::symlink(&secret, named("segment_health_check.link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", named("segment_health_check.zero")).unwrap();
        nix::unistd::mkfifo(&named("segment_health_check.fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        files.exclude("7", "7", "gone").unwrap();
        assert_eq!(fs::read_to_string(&secret).unwrap(), "mainstay on node-1: keep");
        assert_eq!(fs::read_to_string(files.path("7", "7")).unwrap(), "mainstay on node-1: gone\n");
        files.admit_all().unwrap();
        assert!(!files.path("7", "7").exists());
        for name in ["segment_health_check.link", "segment_health_check.zero", "segment_health_check.fifo"] {
            assert!(fs::symlink_metadata(named(name)).is_ok(), "{name} is not ours");
        }
    }

    #[test]
    fn a_hard_link_to_anothers_file_is_not_written_through_and_a_giant_name_is_an_error() {
        let directory = testing::tempdir().unwrap();
        let files = SegmentFiles::new(directory.path(), "node-1");
        let secret = directory.path().join("secret");
        fs::write(&secret, "mainstay on node-1: keep").unwrap();
        let named = |name: &str| directory.path().join(name);
        fs::hard_link(&secret, named(".segment_health_check.7.7.node-1")).unwrap();
        fs::hard_link(&secret, named("segment_health_check.8.8")).unwrap();
        files.exclude("7", "7", "gone").unwrap();
        files.exclude("8", "8", "gone").unwrap();
        files.admit_all().unwrap();
        assert_eq!(fs::read_to_string(&secret).unwrap(), "mainstay on node-1: keep");
        let giant = "9".repeat(300);
        assert!(files.exclude(&giant, &giant, "gone").is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing half made is left");
    }

    #[test]
    fn names_that_are_exchanged_all_the_time_lead_to_no_other_file() {
        let directory = testing::tempdir().unwrap();
        let files = SegmentFiles::new(directory.path(), "node-1");
        let secret = directory.path().join("secret");
        fs::write(&secret, "mainstay on node-1: keep").unwrap();
        let aside = directory.path().join(".segment_health_check.7.7.node-1");
        let (plain, way) = (files.path("7", "7"), directory.path().join("way"));
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = std::os::unix::fs::symlink(&secret, &way);
                    for name in [&aside, &plain] {
                        let _ = renameat_with(CWD, name, CWD, &way, RenameFlags::EXCHANGE);
                    }
                }
            });
            for _ in 0..2_000 {
                let _ = files.exclude("7", "7", "gone");
                let _ = files.admit_all();
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(fs::read_to_string(&secret).unwrap(), "mainstay on node-1: keep");
    }

    #[test]
    fn without_descriptors_it_is_an_error_and_nothing_is_left_or_taken_back() {
        let directory = testing::tempdir().unwrap();
        let files = SegmentFiles::new(directory.path(), "node-1");
        files.exclude("7", "7", "gone").unwrap();
        testing::without_descriptors(|| {
            assert!(files.exclude("8", "8", "gone").is_err());
            assert!(files.admit_all().is_err());
        });
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(files.path("7", "7").exists());
    }
}
