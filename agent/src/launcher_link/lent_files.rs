//! Files for shards that an agent restores which may not write as this user: made below the checkpoint directory, lent, and moved to
//! their places when the agent has written them.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_proto::v1::LentShard;
use mainstay_tier::lent_files::Landed;
use mainstay_tier::peer::settle_lent;

use super::handover;

/// The files of one restore. What is not moved to its place goes with them.
#[derive(Clone, Debug)]
pub struct LentFiles(Arc<Files>);

#[derive(Debug)]
struct Files {
    directory: PathBuf,
    aside: PathBuf,
}

impl LentFiles {
    /// For restores into `directory`.
    pub fn new(directory: &Path) -> LentFiles {
        let aside = PathBuf::from(format!(".mainstay-restoring-{}", std::process::id()));
        LentFiles(Arc::new(Files { directory: directory.to_owned(), aside }))
    }

    /// Makes so many and lends them to the agent at `socket`.
    ///
    /// # Errors
    /// They cannot be made, or the agent does not take them.
    pub async fn lend(&self, socket: &Path, count: u32) -> io::Result<()> {
        let (files, socket) = (Arc::clone(&self.0), socket.to_owned());
        tokio::task::spawn_blocking(move || files.lend(&socket, count)).await?
    }

    /// Puts what the agent has written in its places.
    ///
    /// # Errors
    /// The agent names no place of a shard, or what the disk says.
    pub async fn settle(&self, written: Vec<LentShard>) -> io::Result<()> {
        if written.is_empty() {
            return Ok(());
        }
        let files = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || files.settle(written)).await?
    }
}

impl Files {
    fn lend(&self, socket: &Path, count: u32) -> io::Result<()> {
        self.remove();
        let aside = self.directory.join(&self.aside);
        fs::create_dir_all(&aside)?;
        let new = |number: u32| File::create_new(aside.join(number.to_string())).map(OwnedFd::from);
        let files = (0..count).map(new).collect::<io::Result<Vec<OwnedFd>>>()?;
        handover::lend(socket, &self.directory, files)
    }

    fn settle(&self, written: Vec<LentShard>) -> io::Result<()> {
        for LentShard { file, directory, name, manifest } in written {
            let landed = Landed { file: file as usize, home: directory.into(), name, manifest };
            settle_lent(&self.directory, &self.aside.join(file.to_string()), &landed)?;
        }
        Ok(())
    }

    fn remove(&self) {
        let _ = fs::remove_dir_all(self.directory.join(&self.aside));
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.remove();
    }
}
