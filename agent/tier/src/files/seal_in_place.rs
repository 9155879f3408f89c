//! Seals a step of a trainer in place: checks its files by their formats, reads them once and writes a note.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use mainstay_checkpoint::files::{Complete, DirectorySnapshot, proof};
use mainstay_checkpoint::inventory::Shard;
use mainstay_checkpoint_format::Identity;

use super::FilesError;
use super::catalog::Note;
use super::host::{self, AGAIN, Place};
use super::pack::{Content, Pack};
use super::tree::{Mark, Member};
use super::watch::{Inner, Settings, State};

/// Job name of the steps in watched directories; the run id distinguishes the jobs.
const JOB: &str = "files";

/// A step that is written again more than this many seconds after it was sealed is another step. Before that, its writer was not done.
const ANOTHER: u64 = 120;

impl Inner {
    /// Seals a step that has its mark, if its files are sound. Returns whether it was sealed.
    pub(super) fn seal(
        &self,
        state: &mut State,
        of: &Complete,
        look: &DirectorySnapshot,
        files: Option<&Vec<Member>>,
        place: &Place,
    ) -> Result<bool, FilesError> {
        let Some(mut members) = files.cloned().filter(|files| !files.is_empty()) else { return Ok(false) };
        let Settings { directory, run, part, .. } = &self.settings;
        if let Err(why) = sound(place, &members) {
            tracing::warn!(run, step = of.step, directory = %directory.display(), "a step has its mark and is not sealed: {why}");
            state.unsound.insert(of.step, (members, why));
            return Ok(false);
        }
        let of_another_run = |pack: &&Arc<Pack>| pack.sealed.shard.of.run_id() != run;
        if let Some(known) = state.catalog.sealed(of.step).filter(of_another_run).cloned()
            && known.content.is_still()
            && !matches!(known.sealed.first_bad_from_start(&known.content), Ok(None))
        {
            let why = "its bytes are not those that were sealed for another run".to_owned();
            self.lose(state, of.step, why, false, false);
            return Ok(false);
        }
        let trackers = of.trackers.iter().map(|(name, words)| {
            let written = look.texts.get(name).map_or_else(Default::default, |(_, written)| *written);
            let mark = Mark { written, ..Mark::default() };
            Member { path: name.clone(), mode: 0o644, mark, words: Some(words.clone()) }
        });
        members.extend(trackers);
        let former = state.catalog.sealed(of.step).map(|pack| pack.sealed.shard.clone());
        if former.as_ref().is_some_and(|former| former.of.run_id() != run) {
            state.first_seen.insert(of.step, host::fence(&self.service, run) * AGAIN);
        } else if let Some(former) = former.as_ref().filter(|_| !state.grown.contains(&of.step)) {
            let age = host::now_unix_s().saturating_sub(former.created.max(0).unsigned_abs());
            if age > ANOTHER {
                // Written by a trainer that went back: must not be joined with parts that other hosts have of the earlier step.
                state.first_seen.insert(of.step, former.of.attempt + 1);
            }
        }
        let (rank, world_size) = if self.is_shared { (0, 1) } else { *part };
        let attempt = state.first_seen.get(&of.step).copied().unwrap_or(0);
        let identity = Identity { job: JOB.to_owned(), attempt, step: of.step, rank, world_size };
        let content = Content::of(directory, place.access.clone(), members)?;
        let manifest = match content.seal(&identity, run, host::now_unix_s()) {
            // The next check decides.
            Err(FilesError::Changed(_)) => return Ok(false),
            sealed => sealed?,
        };
        let manifest =
            String::from_utf8(manifest.encode()).map_err(|error| FilesError::Manifest(error.to_string()))?;
        let members = content.members().to_vec();
        let note = Note { manifest, base: directory.clone(), user: place.access.user(), members };
        let pack = state.catalog.insert(note, self.is_shared)?;
        state.unsound.remove(&of.step);
        let replaced = |former: &Shard| former.root != pack.sealed.shard.root && former.of.run_id() == run;
        if let Some(former) = former.filter(replaced) {
            // Its replicas are of files that no longer exist.
            self.service.shared.own.forget_pack(&former.root);
            self.service.shared.withdraw(&former.root);
        }
        if self.is_in_place(&pack.content)
            && let Err(error) = self.copies.keep(&self.service, &pack)
        {
            tracing::warn!(run, directory = %directory.display(), %error, "no copy of a file that is written over could be kept");
        }
        tracing::info!(run, step = of.step, directory = %directory.display(), "a step was sealed as its trainer wrote it");
        Ok(true)
    }
}

/// Checks by their formats whether all files are complete.
fn sound(place: &Place, members: &[Member]) -> Result<(), String> {
    for member in members {
        let problem = |problem: String| format!("{}: {problem}", member.path);
        let open = || {
            let _as_user = place.act().map_err(|error| error.to_string())?;
            place.at.read(Path::new(&member.path)).map_err(|error| error.to_string())
        };
        let file = open().map_err(problem)?;
        let mut read = |at: u64, buffer: &mut [u8]| {
            FileExt::read_exact_at(&file, buffer, at).map_err(|error| error.to_string())
        };
        proof::sound(&member.path, member.mark.size, &mut read).map_err(problem)?;
    }
    Ok(())
}
