//! A small value that the agent stores in a file of its state directory across restarts: the position in the kernel
//! log, what was learned about the network. An operator can delete the file to make the agent forget it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The file that stores a value.
#[derive(Debug)]
pub struct ValueFile<T> {
    path: PathBuf,
    value: Option<T>,
}

impl<T: Clone + PartialEq + Serialize + DeserializeOwned> ValueFile<T> {
    /// The file at `path`. An unreadable file counts as absent.
    pub fn open(path: &Path) -> ValueFile<T> {
        let value = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .inspect_err(
                    |error| tracing::warn!(path = %path.display(), %error, "this file is not understood"),
                )
                .ok(),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "this file cannot be read");
                None
            }
        };
        ValueFile { path: path.to_owned(), value }
    }

    /// The stored value.
    pub fn value(&self) -> Option<&T> {
        self.value.as_ref()
    }

    /// Whether the file was deleted since it was last written: the stored value must be forgotten.
    pub fn was_deleted(&mut self) -> bool {
        let deleted = self.value.is_some()
            && fs::symlink_metadata(&self.path).is_err_and(|error| error.kind() == ErrorKind::NotFound);
        if deleted {
            self.value = None;
        }
        deleted
    }

    /// Stores another value; the file is complete at every moment.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&mut self, value: &T) -> io::Result<()> {
        if self.value.as_ref() == Some(value) {
            return Ok(());
        }
        let beside = self.path.with_extension("new");
        fs::write(&beside, serde_json::to_vec_pretty(value)?)?;
        fs::rename(&beside, &self.path)?;
        self.value = Some(value.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::id::BootId;
    use mainstay_model::kernel::LogCursor;

    use super::*;

    #[test]
    fn a_cursor_of_an_earlier_version_is_understood() {
        let directory = testing::tempdir().unwrap();
        let path = directory.path().join("kernel-log.cursor");
        let kmsg = LogCursor { boot: BootId("b".into()), log: "kmsg".into(), next: 7, journal: None };
        let journal = LogCursor { log: "journald".into(), journal: Some("s=1;i=2".into()), ..kmsg.clone() };
        for cursor in [&kmsg, &journal] {
            ValueFile::open(&path).keep(cursor).unwrap();
            assert_eq!(ValueFile::open(&path).value(), Some(cursor));
        }
        fs::write(&path, r#"{"boot":"b","log":"kmsg","next":7}"#).unwrap();
        assert_eq!(ValueFile::open(&path).value(), Some(&kmsg));
    }

    #[test]
    fn what_is_kept_is_there_after_a_restart_until_it_is_deleted() {
        let directory = testing::tempdir().unwrap();
        let path = directory.path().join("value.json");
        let mut kept: ValueFile<u32> = ValueFile::open(&path);
        assert_eq!((kept.value().copied(), kept.was_deleted()), (None, false));
        kept.keep(&7).unwrap();
        assert_eq!(ValueFile::<u32>::open(&path).value(), Some(&7));
        assert!(!kept.was_deleted());
        fs::remove_file(&path).unwrap();
        assert!(kept.was_deleted());
        assert_eq!((kept.value().copied(), kept.was_deleted()), (None, false));
        fs::write(&path, "no number").unwrap();
        assert_eq!(ValueFile::<u32>::open(&path).value(), None);
    }
}
