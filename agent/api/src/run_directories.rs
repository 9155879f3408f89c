//! Which directory of this host each run wrote into. A run's id includes its name and the path of its directory. If
//! the directory at that path is not the one used before, only the user can decide whether the job is the same.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use mainstay_checkpoint::lineage::DirectoryId;
use mainstay_checkpoint::owner;
use mainstay_tier::peer::WatchedDirectory;
use serde::{Deserialize, Serialize};
use tonic::Status;

use super::refusal::invalid;
use mainstay_journal::store::value_file::ValueFile;

/// Maximum number of directories remembered for each user: the newest.
const MAX_DIRECTORIES_PER_USER: usize = 64;

/// Letters of a directory's id.
const MAX_ID_CHARS: usize = 128;

/// A run, and the directory that it writes into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Home {
    /// The run, with its owner.
    pub(super) run: String,
    /// Where the directory was when it was last used.
    directory: PathBuf,
    /// Identifies the directory.
    id: String,
}

impl Home {
    /// The home of a launcher that sends its directory's id; none if it sends none.
    ///
    /// # Errors
    /// The id is not a valid directory id.
    pub(super) fn find(place: &WatchedDirectory, id: &str) -> Result<Option<Home>, Status> {
        if id.is_empty() {
            return Ok(None);
        }
        if id.len() > MAX_ID_CHARS || id.parse::<DirectoryId>().is_err() {
            return Err(invalid("directory_id", "must be BOOT:DEVICE:INODE:BIRTH"));
        }
        Ok(Some(Home { run: place.run.clone(), directory: place.directory.clone(), id: id.to_owned() }))
    }

    fn is_same(&self, other: &Home) -> bool {
        let parsed = |home: &Home| home.id.parse::<DirectoryId>();
        matches!((parsed(self), parsed(other)), (Ok(one), Ok(two)) if one.is_same(&two))
    }
}

/// The directories of all runs of this host.
#[derive(Debug)]
pub(super) struct Homes {
    kept: Mutex<ValueFile<Vec<Home>>>,
}

impl Homes {
    /// The directories that are stored in the agent's state directory.
    pub(super) fn open(state_dir: &Path) -> Homes {
        Homes { kept: Mutex::new(ValueFile::open(&state_dir.join("checkpoint-homes.json"))) }
    }

    /// Registers a launcher that wants the steps of a run in a directory. `newest`: the newest whole step of the
    /// run, if there is one.
    ///
    /// # Errors
    /// The run wrote into another directory of this name; the message contains what to do.
    pub(super) fn enter(
        &self,
        home: &Home,
        on_purpose: bool,
        newest: impl FnOnce() -> Option<u64>,
    ) -> Result<(), String> {
        let mut all: Vec<Home> = self.kept().value().cloned().unwrap_or_default();
        let before = all.iter().find(|before| before.run == home.run);
        if let Some(before) = before.filter(|before| !on_purpose && !before.is_same(home))
            // Asks peers, so it runs without the lock.
            && let Some(step) = newest()
        {
            let run = owner::name(&home.run);
            return Err(format!(
                "{}: this is not the directory from which run {run} was saved ({}, newest whole step {step}): it has the same name \
                 and was created later. To resume from that run, start with --resume-from {run}; to start a new one, choose \
                 another --rdzv-id or directory",
                home.directory.display(),
                before.directory.display()
            ));
        }
        let mut kept = self.kept();
        all = kept.value().cloned().unwrap_or_default();
        all.retain(|before| before.run != home.run);
        all.push(home.clone());
        let all = newest_of_each(all, |home| owner::owner(&home.run));
        if let Err(error) = kept.keep(&all) {
            tracing::warn!(%error, "the directories of runs cannot be written down");
        }
        Ok(())
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, ValueFile<Vec<Home>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The newest of each user: a user who watches many directories loses only their own.
pub(super) fn newest_of_each<T>(mut all: Vec<T>, uid: impl Fn(&T) -> Option<u32>) -> Vec<T> {
    let mut seen: BTreeMap<Option<u32>, usize> = BTreeMap::new();
    all.reverse();
    all.retain(|place| {
        let of_user = seen.entry(uid(place)).or_insert(0);
        *of_user += 1;
        *of_user <= MAX_DIRECTORIES_PER_USER
    });
    all.reverse();
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_tier::peer::User;

    fn home(uid: u32, id: &str) -> Home {
        let user = User { uid, gid: uid };
        let run = owner::owned(uid, "train~ab12");
        let place = WatchedDirectory { run, directory: PathBuf::from("/out"), user, pool: None };
        Home::find(&place, id).expect("an id").expect("a home")
    }

    #[test]
    fn a_new_directory_with_an_old_name_is_not_resumed_into_unless_the_user_says_so() {
        let state = testing::tempdir().expect("a directory");
        let homes = Homes::open(state.path());
        let (old, new) = (home(1000, "b1:2:3:4"), home(1000, "b1:2:7:9"));
        let newest = || Some(400);
        homes.enter(&old, false, newest).expect("the first one");
        homes.enter(&home(1000, "b2:8:3:4"), false, newest).expect("the same after a reboot");
        homes.enter(&home(1001, "b1:2:7:9"), false, newest).expect("another user's");
        // A restarted agent still knows it.
        let homes = Homes::open(state.path());
        let reported = homes.enter(&new, false, newest).expect_err("another directory");
        assert!(reported.contains("--resume-from train~ab12") && reported.contains("step 400"), "{reported}");
        homes.enter(&old, false, newest).expect("the old one still");
        homes.enter(&new, true, newest).expect("on purpose");
        homes.enter(&new, false, newest).expect("it is the run's from then on");
        homes.enter(&old, false, || None).expect("there is nothing to resume from");
    }

    #[test]
    fn an_invalid_directory_id_is_refused() {
        let place = WatchedDirectory {
            run: "1000!train".to_owned(),
            directory: PathBuf::from("/out"),
            user: User { uid: 1000, gid: 1000 },
            pool: None,
        };
        assert!(Home::find(&place, "words").is_err() && Home::find(&place, &"1:".repeat(500)).is_err());
        assert_eq!(Home::find(&place, "").expect("none"), None);
    }
}
