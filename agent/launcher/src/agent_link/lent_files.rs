//! Files for a restore by an agent that may not write as this user: created below the checkpoint directory, lent, and moved
//! to their places or unpacked when the agent has written them.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainstay_checkpoint::files::{Kind, Rule};
use mainstay_proto::v1::{LentShard, PutBack, PutBackUnfit, RestoreProgress};
use mainstay_sys::handover::MAX_DESCRIPTORS;
use mainstay_tier::lent_files::RestoredShard;
use mainstay_tier::peer::settle_lent;
use mainstay_tier::{aside, files};

use crate::agent_link::handover;

/// Names of directories with lent files. Launchers that write shards remove directories with the first name if this
/// process cannot; trainers and the rules for their files do not know the second.
const RESTORING: &str = "step-restoring";
const RESTORING_TRAINER: &str = "mainstay-restoring";

/// The files of one restore. Files that are not moved to their places are removed with it.
#[derive(Clone, Debug)]
pub struct LentFiles(Arc<Files>);

#[derive(Debug)]
struct Files {
    directory: PathBuf,
    /// What the name of the directory with the files begins with.
    what: &'static str,
    /// Their directory, once created.
    aside: Mutex<Option<PathBuf>>,
}

impl LentFiles {
    /// For restores into `directory`.
    pub fn new(directory: &Path) -> LentFiles {
        LentFiles::named(directory, RESTORING)
    }

    /// For restores into a directory into which a trainer writes in its own format.
    pub fn for_trainer(directory: &Path) -> LentFiles {
        LentFiles::named(directory, RESTORING_TRAINER)
    }

    fn named(directory: &Path, what: &'static str) -> LentFiles {
        LentFiles(Arc::new(Files { directory: directory.to_owned(), what, aside: Mutex::default() }))
    }

    /// Creates as many files as the agent at `socket` wants, and lends them.
    ///
    /// # Errors
    /// They cannot be created, or the agent does not accept them.
    pub async fn lend(&self, socket: &Path, wanted: RestoreProgress) -> io::Result<()> {
        let (files, socket) = (Arc::clone(&self.0), socket.to_owned());
        tokio::task::spawn_blocking(move || {
            files.lend(&socket, &wanted.files_token, wanted.files_wanted as usize)
        })
        .await?
    }

    /// Moves what the agent has written to its places.
    ///
    /// # Errors
    /// The agent names no valid place of a shard, its bytes are not what was sealed, or a disk operation fails.
    pub async fn settle(&self, written: Vec<LentShard>) -> io::Result<()> {
        if written.is_empty() {
            return Ok(());
        }
        let files = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || files.settle(written)).await?
    }

    /// Carries out the agent's request in the directory, with this process's rights. `kind`: the trainer's format. `step`:
    /// the step that is restored. Returns what was done, as lines.
    ///
    /// # Errors
    /// The agent requests a file that no such trainer writes, its bytes are not what was sealed, or a disk operation fails.
    pub async fn put_back(&self, kind: &str, step: Option<u64>, asked: PutBack) -> io::Result<Vec<String>> {
        let rules = Kind::parse(kind).map_err(io::Error::other)?.rules();
        let files = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || files.put_back(&rules, step, asked)).await?
    }
}

impl Files {
    fn lend(&self, socket: &Path, token: &str, count: usize) -> io::Result<()> {
        self.remove();
        fs::create_dir_all(&self.directory)?;
        self.remove_those_of_ended();
        // A unique name, also in a directory that is shared with another host, and one that is removed later if this
        // process cannot do it.
        let name = PathBuf::from(aside::name(self.what));
        let aside = self.directory.join(&name);
        fs::create_dir(&aside)?;
        *self.aside() = Some(name);
        let new = |number: usize| File::create_new(aside.join(number.to_string())).map(OwnedFd::from);
        // In portions: a process may have a thousand files open, and a step may have more shards.
        for first in (0..count).step_by(MAX_DESCRIPTORS) {
            let files =
                (first..count.min(first + MAX_DESCRIPTORS)).map(new).collect::<io::Result<Vec<OwnedFd>>>()?;
            handover::lend(socket, token, first, &files)?;
        }
        Ok(())
    }

    fn settle(&self, written: Vec<LentShard>) -> io::Result<()> {
        let Some(aside) = self.aside().clone() else { return Err(io::Error::other("no files were lent")) };
        for LentShard { file, directory, name, manifest } in written {
            let landed = RestoredShard { file: file as usize, home: directory.into(), name, manifest };
            settle_lent(&self.directory, &aside.join(file.to_string()), &landed)?;
        }
        Ok(())
    }

    fn put_back(&self, rules: &[Rule], step: Option<u64>, asked: PutBack) -> io::Result<Vec<String>> {
        let PutBack { token, archive, texts, unfit } = asked;
        let aside = self.aside().clone();
        let lent = archive.as_ref().zip(aside);
        let lent = lent.map(|(archive, aside)| self.directory.join(aside).join(archive.file.to_string()));
        let landed = archive.map(|LentShard { file, directory, name, manifest }| RestoredShard {
            file: file as usize,
            home: directory.into(),
            name,
            manifest,
        });
        let unfit = unfit.into_iter().map(|PutBackUnfit { name, step, why }| files::PartialCheckpoint {
            name,
            step,
            why,
        });
        let asked = files::PutBack {
            token,
            step,
            archive: landed,
            texts: texts.into_iter().map(|text| (text.name, text.text)).collect(),
            unfit: unfit.collect(),
        };
        files::put_back(&self.directory, rules, lent.as_deref(), &asked).map_err(io::Error::other)
    }

    /// Removes what a process of this host created that was killed during a restore.
    fn remove_those_of_ended(&self) {
        if self.what != RESTORING_TRAINER {
            // Launchers that write shards remove the others.
            return;
        }
        let lives = |process: u32| Path::new(&format!("/proc/{process}")).exists();
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| aside::is_left(name, |what| what == self.what, &lives)) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    fn aside(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes what this object created.
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_a_killed_process_of_this_host_lent_is_removed_and_nothing_else() {
        let home = testing::tempdir().unwrap();
        let of_trainer = LentFiles::for_trainer(home.path());
        let of_this = aside::name(RESTORING_TRAINER);
        // No process has this number: it is larger than the kernel's maximum.
        let (own, none) = (format!(".{}-", std::process::id()), format!(".{}-", i32::MAX));
        let killed = of_this.replace(&own, &none);
        let place = of_this.split('-').nth(2).expect("a place");
        let others = [
            of_this.clone(),
            killed.trim_end_matches(".tmp").to_owned(),
            killed.replace(&none, ".x-"),
            killed.replace(place, "0123456789abcdef"),
            aside::name(RESTORING).replace(&own, &none),
            "checkpoint-20".to_owned(),
        ];
        for name in others.iter().chain([&killed]) {
            fs::create_dir(home.path().join(name)).unwrap();
            fs::write(home.path().join(name).join("0"), "").unwrap();
        }
        let there = || -> BTreeSet<String> {
            let entries = fs::read_dir(home.path()).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        LentFiles::new(home.path()).0.remove_those_of_ended();
        assert!(there().contains(&killed), "restores of shards leave that to the client");
        of_trainer.0.remove_those_of_ended();
        assert_eq!(there(), others.into_iter().collect());
    }
}
