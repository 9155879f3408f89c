//! Notes of sealed steps, kept over restarts of the agent: one file for each step, outside the user's directories.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_checkpoint::decision::Decision;
use serde::{Deserialize, Serialize};

use super::FilesError;
use super::pack::{Content, Pack};
use super::tree::Member;
use crate::aside::write_at_once;
use crate::peer::user::{User, Users};

/// Name of the file with the current decision.
const DECISION_NAME: &str = "decision.json";

/// The note of a step.
#[derive(Serialize, Deserialize)]
struct StepNote {
    manifest: String,
    /// Directory of the files.
    base: PathBuf,
    /// Owner of the files.
    user: User,
    /// The files as they were sealed, in the archive's order.
    members: Vec<Member>,
}

/// A step that was sealed and is no longer whole in its directory.
#[derive(Clone, Debug)]
pub(super) struct LostStep {
    /// What was sealed.
    pub(super) pack: Arc<Pack>,
    /// The reason.
    pub(super) why: String,
    /// Whether the files that have its names now may be sealed as another step.
    pub(super) is_again: bool,
    /// Whether none of its files exists.
    pub(super) is_gone: bool,
}

/// All notes of one directory.
#[derive(Debug)]
pub(super) struct Catalog {
    home: PathBuf,
    users: Arc<Users>,
    packs: BTreeMap<u64, Arc<Pack>>,
    lost: BTreeMap<u64, LostStep>,
}

impl Catalog {
    /// Reads the notes of steps whose files are unchanged.
    pub(super) fn open(home: &Path, users: &Arc<Users>, is_shared: bool) -> Result<Catalog, FilesError> {
        let mut catalog = Catalog::open_with_lost(home, users, is_shared)?;
        let lost: Vec<u64> = catalog.lost.keys().copied().collect();
        lost.into_iter().for_each(|step| _ = catalog.remove(step));
        Ok(catalog)
    }

    /// Reads all notes. Steps whose files have changed are recorded as lost.
    pub(super) fn open_with_lost(
        home: &Path,
        users: &Arc<Users>,
        is_shared: bool,
    ) -> Result<Catalog, FilesError> {
        fs::create_dir_all(home).map_err(FilesError::reading(home))?;
        let mut catalog = Catalog {
            home: home.to_owned(),
            users: Arc::clone(users),
            packs: BTreeMap::new(),
            lost: BTreeMap::new(),
        };
        for entry in fs::read_dir(home).map_err(FilesError::reading(home))?.flatten() {
            let path = entry.path();
            let named = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !named.starts_with("step-") {
                continue;
            }
            match read(&path, users, is_shared) {
                Some(pack) => {
                    let (step, is_still) = (pack.sealed.shard.key.step, pack.content.is_still());
                    catalog.packs.insert(step, Arc::new(pack));
                    if !is_still {
                        catalog.lose(step, "it changed between two readings".to_owned(), false, false);
                    }
                }
                None => _ = fs::remove_file(&path),
            }
        }
        Ok(catalog)
    }

    /// Steps that were sealed and are no longer whole here.
    pub(super) fn lost(&self) -> &BTreeMap<u64, LostStep> {
        &self.lost
    }

    /// Records that a step differs from what was sealed: it is no longer offered, but not forgotten. Returns whether that is new.
    pub(super) fn lose(&mut self, step: u64, why: String, is_again: bool, is_gone: bool) -> bool {
        let known = self.lost.get(&step).map(|lost| (lost.pack.clone(), lost.why.clone()));
        let (pack, before) = match (self.packs.remove(&step), known) {
            (Some(pack), _) => (pack, None),
            (None, Some((pack, before))) => (pack, Some(before)),
            (None, None) => return false,
        };
        let is_news = before.as_ref() != Some(&why);
        self.lost.insert(step, LostStep { pack, why, is_again, is_gone });
        is_news
    }

    /// Records that a lost step matches its seal again, for instance after its directory was temporarily missing.
    pub(super) fn find(&mut self, step: u64) -> bool {
        let found = self.lost.remove(&step).map(|lost| self.packs.insert(step, lost.pack));
        found.is_some()
    }

    /// A step that was sealed, whole or not.
    pub(super) fn sealed(&self, step: u64) -> Option<&Arc<Pack>> {
        self.packs.get(&step).or_else(|| self.lost.get(&step).map(|lost| &lost.pack))
    }

    pub(super) fn packs(&self) -> &BTreeMap<u64, Arc<Pack>> {
        &self.packs
    }

    /// Writes the note of a step and replaces a previous one.
    pub(super) fn insert(
        &mut self,
        manifest: Vec<u8>,
        base: &Path,
        user: User,
        members: Vec<Member>,
        is_shared: bool,
    ) -> Result<Arc<Pack>, FilesError> {
        let content = Content::new(base, self.users.access(user), members.clone())?;
        let pack = Arc::new(Pack::new(content, manifest.clone(), is_shared)?);
        let manifest =
            String::from_utf8(manifest).map_err(|error| FilesError::Manifest(error.to_string()))?;
        let note = StepNote { manifest, base: base.to_owned(), user, members };
        let step = pack.sealed.shard.key.step;
        let bytes = serde_json::to_vec(&note).map_err(|error| FilesError::Manifest(error.to_string()))?;
        write_at_once(&self.home, &name(step), &bytes).map_err(FilesError::reading(&self.home))?;
        self.lost.remove(&step);
        self.packs.insert(step, Arc::clone(&pack));
        Ok(pack)
    }

    /// Forgets a step.
    pub(super) fn remove(&mut self, step: u64) -> Option<Arc<Pack>> {
        let _ = fs::remove_file(self.home.join(name(step)));
        let lost = self.lost.remove(&step).map(|lost| lost.pack);
        self.packs.remove(&step).or(lost)
    }

    /// The stored decision.
    pub(super) fn decision(&self) -> Option<Decision> {
        serde_json::from_slice(&fs::read(self.home.join(DECISION_NAME)).ok()?).ok()
    }

    pub(super) fn note_decision(&self, decision: &Decision) {
        let bytes = serde_json::to_vec(decision).unwrap_or_default();
        if let Err(error) = write_at_once(&self.home, DECISION_NAME, &bytes) {
            tracing::warn!(home = %self.home.display(), %error, "a decision cannot be written down");
        }
    }
}

fn name(step: u64) -> String {
    format!("step-{step:012}.json")
}

fn read(path: &Path, users: &Arc<Users>, is_shared: bool) -> Option<Pack> {
    let note: StepNote = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let content = Content::new(&note.base, users.access(note.user), note.members).ok()?;
    Pack::new(content, note.manifest.into_bytes(), is_shared).ok()
}
