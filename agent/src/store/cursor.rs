//! How far the kernel log was read, across restarts of the agent. The journal's facts say it too; this file covers
//! the lines that were no facts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mainstay_core::kernel::LogCursor;

/// The file that keeps a cursor.
#[derive(Debug)]
pub struct CursorFile {
    path: PathBuf,
    kept: Option<LogCursor>,
}

impl CursorFile {
    /// The file at `path`. One that cannot be read is as one that is not there: the journal still knows the facts.
    pub fn open(path: &Path) -> CursorFile {
        let kept = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .inspect_err(|error| tracing::warn!(path = %path.display(), %error, "this is no cursor"))
                .ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the cursor of the kernel log cannot be read");
                None
            }
        };
        CursorFile { path: path.to_owned(), kept }
    }

    /// The cursor that it keeps.
    pub fn kept(&self) -> Option<&LogCursor> {
        self.kept.as_ref()
    }

    /// Keeps another cursor; the file is whole at every moment.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&mut self, cursor: &LogCursor) -> io::Result<()> {
        if self.kept.as_ref() == Some(cursor) {
            return Ok(());
        }
        let beside = self.path.with_extension("new");
        fs::write(&beside, serde_json::to_vec(cursor)?)?;
        fs::rename(&beside, &self.path)?;
        self.kept = Some(cursor.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mainstay_core::id::BootId;

    use super::*;

    #[test]
    fn what_is_kept_is_there_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kernel-log.cursor");
        let mut file = CursorFile::open(&path);
        assert_eq!(file.kept(), None);
        let kmsg = LogCursor { boot: BootId("b".into()), log: "kmsg".into(), next: 7, journal: None };
        let journal = LogCursor { log: "journald".into(), journal: Some("s=1;i=2".into()), ..kmsg.clone() };
        for cursor in [kmsg, journal] {
            file.keep(&cursor).unwrap();
            assert_eq!(CursorFile::open(&path).kept(), Some(&cursor));
        }
        fs::write(&path, r#"{"boot":"b","log":"kmsg","next":7}"#).unwrap();
        assert_eq!(
            CursorFile::open(&path).kept().map(|cursor| cursor.next),
            Some(7),
            "of an earlier version"
        );
        fs::write(&path, "no cursor").unwrap();
        assert_eq!(CursorFile::open(&path).kept(), None);
    }
}
