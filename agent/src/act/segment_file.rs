//! NVRx's segment health files: a file that is not empty keeps a part of a Slurm job out of the next rendezvous. The
//! directory is shared by all hosts of the job; a file that another host wrote is left alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The files of this host in the shared directory.
#[derive(Clone, Debug)]
pub struct SegmentFiles {
    directory: PathBuf,
    /// How every file of ours begins.
    mark: String,
}

impl SegmentFiles {
    /// Files of `host` in `directory`.
    pub fn new(directory: &Path, host: &str) -> SegmentFiles {
        SegmentFiles { directory: directory.to_owned(), mark: format!("mainstay on {host}: ") }
    }

    /// Where the launcher of this part of a job looks.
    pub fn path(&self, job: &str, task: &str) -> PathBuf {
        self.directory.join(format!("segment_health_check.{job}.{task}"))
    }

    /// Keeps a part of a job out, with the reason for people who look into the file. It appears whole.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn exclude(&self, job: &str, task: &str, reason: &str) -> io::Result<()> {
        let path = self.path(job, task);
        if fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() > 0) {
            return Ok(());
        }
        let host = self.mark.trim_start_matches("mainstay on ").trim_end_matches(": ");
        let beside = self.directory.join(format!(".segment_health_check.{job}.{task}.{host}"));
        fs::write(&beside, format!("{}{reason}\n", self.mark))?;
        fs::rename(&beside, &path).inspect_err(|_| drop(fs::remove_file(&beside)))
    }

    /// Takes back what this host wrote, also before its agent's last start.
    ///
    /// # Errors
    /// The directory cannot be read, or a file of ours cannot be removed.
    pub fn admit_all(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let named = entry.file_name().to_string_lossy().starts_with("segment_health_check.");
            let ours = || fs::read(entry.path()).is_ok_and(|text| text.starts_with(self.mark.as_bytes()));
            if named && ours() {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_host_wrote_is_taken_back_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
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
}
