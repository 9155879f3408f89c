//! Files for shards that an agent restores which may not write as this user: made below the checkpoint directory, lent, and moved to
//! their places when the agent has written them.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use mainstay_proto::v1::{LentShard, RestoreProgress};
use mainstay_tier::lent_files::Landed;
use mainstay_tier::peer::settle_lent;

use super::handover;
use crate::os::handover::MOST;

/// The files of one restore. What is not moved to its place goes with them.
#[derive(Clone, Debug)]
pub struct LentFiles(Arc<Files>);

#[derive(Debug)]
struct Files {
    directory: PathBuf,
    /// Where they are, below the directory, once they were made.
    aside: Mutex<Option<PathBuf>>,
}

impl LentFiles {
    /// For restores into `directory`.
    pub fn new(directory: &Path) -> LentFiles {
        LentFiles(Arc::new(Files { directory: directory.to_owned(), aside: Mutex::default() }))
    }

    /// Makes as many as the agent at `socket` wants, and lends them.
    ///
    /// # Errors
    /// They cannot be made, or the agent does not take them.
    pub async fn lend(&self, socket: &Path, wanted: RestoreProgress) -> io::Result<()> {
        let (files, socket) = (Arc::clone(&self.0), socket.to_owned());
        tokio::task::spawn_blocking(move || {
            files.lend(&socket, &wanted.files_token, wanted.files_wanted as usize)
        })
        .await?
    }

    /// Puts what the agent has written in its places.
    ///
    /// # Errors
    /// The agent names no place of a shard, its bytes are not what was sealed, or what the disk says.
    pub async fn settle(&self, written: Vec<LentShard>) -> io::Result<()> {
        if written.is_empty() {
            return Ok(());
        }
        let files = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || files.settle(written)).await?
    }
}

impl Files {
    fn lend(&self, socket: &Path, token: &str, count: usize) -> io::Result<()> {
        self.remove();
        fs::create_dir_all(&self.directory)?;
        // A name of its own, also where the directory is shared with another host; and one that is tidied up if this process does not
        // come to it.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = PathBuf::from(format!(".step-restoring-{since:x}.{}.tmp", std::process::id()));
        let aside = self.directory.join(&name);
        fs::create_dir(&aside)?;
        *self.aside() = Some(name);
        let new = |number: usize| File::create_new(aside.join(number.to_string())).map(OwnedFd::from);
        // Not all at once: a process may have a thousand files open, and a step may have more shards.
        for first in (0..count).step_by(MOST) {
            let files = (first..count.min(first + MOST)).map(new).collect::<io::Result<Vec<OwnedFd>>>()?;
            handover::lend(socket, token, first, &files)?;
        }
        Ok(())
    }

    fn settle(&self, written: Vec<LentShard>) -> io::Result<()> {
        let Some(aside) = self.aside().clone() else { return Err(io::Error::other("no files were lent")) };
        for LentShard { file, directory, name, manifest } in written {
            let landed = Landed { file: file as usize, home: directory.into(), name, manifest };
            settle_lent(&self.directory, &aside.join(file.to_string()), &landed)?;
        }
        Ok(())
    }

    fn aside(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this object made.
    fn remove(&self) {
        if let Some(aside) = self.aside().take() {
            let _ = fs::remove_dir_all(self.directory.join(aside));
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.remove();
    }
}
