//! A copy of files that the next checkpoint overwrites: a writer that is killed while it overwrites them leaves no intact checkpoint.
//! The copy is stored next to the notes, as an ordinary shard.

use std::fs;
use std::path::{Path, PathBuf};

use super::pack::Pack;
use crate::peer::error::PeerError;
use crate::peer::user::User;
use crate::peer::{Service, Watched, land};

/// The copies of one watched directory.
#[derive(Debug)]
pub(super) struct Copies {
    directory: PathBuf,
    run: String,
}

impl Copies {
    /// Opens the copies and offers existing ones.
    pub(super) fn open(home: &Path, run: &str, service: &Service) -> Copies {
        let copies = Copies { directory: home.join("copies"), run: run.to_owned() };
        if copies.directory.is_dir() {
            service.watch(copies.watched());
        }
        copies
    }

    fn watched(&self) -> Watched {
        Watched { run: self.run.clone(), directory: self.directory.clone(), user: User::own(), pool: None }
    }

    /// Copies a step and removes previous copies.
    ///
    /// # Errors
    /// The step changed while it was copied, or there is no room.
    pub(super) fn keep(&self, service: &Service, pack: &Pack) -> Result<(), PeerError> {
        let local =
            |error: std::io::Error| PeerError::Local(format!("{}: {error}", self.directory.display()));
        fs::create_dir_all(&self.directory).map_err(local)?;
        land(service, &self.directory, &pack.sealed, &pack.content)?;
        let newest = format!("step-{:012}", pack.sealed.shard.of.step);
        for entry in fs::read_dir(&self.directory).map_err(local)?.flatten() {
            if entry.file_name().to_str() != Some(&newest) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        service.watch(self.watched());
        Ok(())
    }
}
