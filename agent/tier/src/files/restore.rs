//! Returns a trainer's directory to the step that was decided for all hosts. Sealed files are compared with their checksums first: a damaged
//! step comes from another tier, or is not whole, so that an older one is decided. A trainer that takes the newest name finds only whole
//! steps.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use mainstay_checkpoint::files::{Proof, Rule, complete, matching_rule};
use mainstay_checkpoint_format::MANIFEST_NAME;
use rustix::fs::FileType;

use super::FilesError;
use super::all::{HostStorage, WatchRequest};
use super::host::{self, UserDirectory, report_line};
use super::pack::ARCHIVE_NAME;
use super::put_back::Changes;
use super::tree::Member;
use super::watch::{DirectoryScan, Inner, Settings, State};
use crate::files::put_back::{PartialCheckpoint, Started};
use crate::files::watch::is_alike;
use crate::peer::Progress;
use crate::peer::error::PeerError;
use crate::peer::user::User;
use crate::seal::SealedShard;

/// Time within which a directory that disappeared with all sealed steps may reappear.
const REAPPEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two checks for it.
const REAPPEAR_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum number of steps that are sealed before the decision: those that were complete when their trainer ended.
const MAX_SEALED_STEPS: usize = 4;

impl Inner {
    pub(super) fn restore(
        &self,
        again: bool,
        report: &(dyn Fn(Progress) + Sync),
    ) -> Result<Started, FilesError> {
        let Settings {
            request: WatchRequest { directory, run, .. },
            part,
            storage: HostStorage { spool, .. },
            ..
        } = &self.settings;
        fs::create_dir_all(spool).map_err(FilesError::reading(spool))?;
        self.wait_for_directory(again, report)?;
        let folder = self.directory_for_restore()?;
        let mut state = self.state();
        state.left = None;
        host::keep_decision(&self.service, run, &state.catalog);
        self.seal_what_is_complete(&mut state);
        self.compare_copied(&mut state);
        for (step, lost) in state.catalog.lost().iter().filter(|(_, lost)| !lost.is_gone && !lost.is_again) {
            report_line(
                report,
                *step,
                format!("step {step} is not offered from {}: {}", directory.display(), lost.why),
            );
        }
        let rank = if self.is_shared { 0 } else { part.0 };
        // If all hosts see the same files, one of them restores them.
        let is_bringing = !self.is_shared || host::is_first(&self.service, run);
        let ranks: &[u32] = if is_bringing { &[rank] } else { &[] };
        let restored = match self.service.restore(&host::spool_of(spool, run), Some(ranks), report) {
            Ok(restored) => restored,
            Err(error) => {
                self.note_bad(&mut state);
                return Err(self.refusal(&state, Some(&error)).unwrap_or_else(|| error.into()));
            }
        };
        self.note_bad(&mut state);
        host::keep_decision(&self.service, run, &state.catalog);
        let mut changes = Changes::new(&restored);
        match &restored.decision.step {
            None if is_bringing => {
                if let Some(refusal) = self.refusal(&state, None) {
                    return Err(refusal);
                }
            }
            None => return Ok(Started::Done(restored)),
            Some(key) => {
                let home = host::in_spool(spool, key.step, rank);
                if let Ok(sealed) =
                    SealedShard::read(&home.join(MANIFEST_NAME)).and_then(|sealed| sealed.owned_as(run))
                {
                    changes.archive = Some((home.join(ARCHIVE_NAME), sealed));
                } else if let Some(pack) = state.catalog.packs().get(&key.step) {
                    // The step is here, but its tracker may name a newer one that is not whole.
                    let members = pack.content.members().iter();
                    let texts =
                        members.filter_map(|member| Some((member.path.clone(), member.content.clone()?)));
                    changes.texts.extend(texts);
                }
            }
        }
        if is_bringing {
            changes.unfit =
                self.unfit(restored.decision.step.as_ref().map(|key| key.step), &folder, &mut state)?;
        }
        self.change(&mut state, &folder, changes, restored, report)
    }

    /// Waits for a directory that disappeared with all sealed steps: its absence may be temporary.
    fn wait_for_directory(&self, again: bool, report: &(dyn Fn(Progress) + Sync)) -> Result<(), FilesError> {
        let directory = &self.settings.request.directory;
        let newest = {
            let state = self.state();
            state.catalog.packs().keys().chain(state.catalog.lost().keys()).max().copied()
        };
        let Some(newest) = newest.filter(|_| self.is_away()) else { return Ok(()) };
        let what = format!(
            "{} is gone, or is another directory than the one in which steps up to {newest} were sealed",
            directory.display()
        );
        report_line(
            report,
            newest,
            format!("{what}; waiting for it, {} s at most", REAPPEAR_TIMEOUT.as_secs()),
        );
        let began = Instant::now();
        while self.is_away() {
            if began.elapsed() < REAPPEAR_TIMEOUT {
                std::thread::sleep(REAPPEAR_INTERVAL);
                continue;
            }
            if again && !self.has_copies() {
                return Err(FilesError::Lost(format!(
                    "{what}, and no other copy of them is known. The job does not start from the beginning: bring the directory \
                     back and start the job again"
                )));
            }
            return Ok(());
        }
        Ok(())
    }

    /// Whether the directory is not the one in which steps were sealed. In that one, a trainer or its user may delete all steps.
    fn is_away(&self) -> bool {
        let Some(folder) = self.acting.in_directory(&self.settings.request.directory) else { return true };
        let state = self.state();
        let lost = state.catalog.lost().values().map(|lost| &lost.pack);
        let mut files = state.catalog.packs().values().chain(lost).flat_map(|pack| pack.content.members());
        if files.any(|member| member.content.is_none() && folder.at.is_there(Path::new(&member.path))) {
            return false;
        }
        match state.home {
            Some(home) => host::identity(&folder) != Some(home),
            None => folder.at.list(Path::new("")).is_ok_and(|names| names.is_empty()),
        }
    }

    /// Whether a copy of a step of this run is known outside the directory.
    fn has_copies(&self) -> bool {
        // After this check, steps in the directory are no longer offered.
        let _ = self.look(&mut self.state(), self.settings.storage.interval);
        self.service.refresh();
        let run = &self.settings.request.run;
        self.service.copies().iter().any(|copy| copy.shard.key.run_id() == run)
    }

    /// Seals complete steps without a second check: their trainer has ended.
    fn seal_what_is_complete(&self, state: &mut State) {
        for _ in 0..MAX_SEALED_STEPS {
            match self.look(state, Duration::ZERO) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    let directory = self.settings.request.directory.display();
                    tracing::warn!("checkpoints in {directory}, before a start: {error}");
                    return;
                }
            }
        }
    }

    /// Verifies files that the next step overwrites, before the decision: their copy replaces them only if they are known to be damaged.
    fn compare_copied(&self, state: &mut State) {
        let of_copies = state.catalog.packs().iter().filter(|(_, pack)| self.is_in_place(&pack.content));
        let bad = of_copies
            .filter(|(_, pack)| !matches!(pack.sealed.first_bad_from_start(&pack.content), Ok(None)));
        let bad: Vec<u64> = bad.map(|(step, _)| *step).collect();
        for step in bad {
            state.catalog.lose(step, "its bytes are not those that were sealed".to_owned(), false, false);
        }
        self.offer(state);
    }

    /// Records the steps that were found damaged when they were read.
    fn note_bad(&self, state: &mut State) {
        let listed = self.service.shared.own.list();
        let is_bad = |root: &str| listed.iter().any(|(shard, _, is_good)| shard.root == root && !is_good);
        let bad = state.catalog.packs().iter().filter(|(_, pack)| is_bad(&pack.sealed.shard.root));
        let bad: Vec<u64> = bad.map(|(step, _)| *step).collect();
        for step in bad {
            state.catalog.lose(step, "its bytes are not those that were sealed".to_owned(), false, false);
        }
    }

    /// Why the trainer must not be started, if steps were sealed and none is whole.
    fn refusal(&self, state: &State, error: Option<&PeerError>) -> Option<FilesError> {
        let lost = state.catalog.lost().iter().filter(|(_, lost)| !lost.is_gone);
        let lost = lost.map(|(step, lost)| format!("step {step}: {}", lost.why));
        let unsound = state.unsound.iter().map(|(step, (_, why))| format!("step {step}: {why}"));
        let all: Vec<String> = lost.chain(unsound).collect();
        let error = error.map(|error| format!(" ({error})")).unwrap_or_default();
        (!all.is_empty()).then(|| {
            FilesError::Lost(format!(
                "no whole checkpoint is left in {} or elsewhere{error}: {}. The trainer is not started: bring a whole one back, or \
                 move these away to start from the beginning",
                self.settings.request.directory.display(),
                all.join("; ")
            ))
        })
    }

    /// The directory and user for the restore. A missing directory is created with that user's rights, never with this process's.
    fn directory_for_restore(&self) -> Result<UserDirectory, FilesError> {
        let directory = &self.settings.request.directory;
        if let Some(folder) = self.acting.in_directory(directory) {
            return Ok(folder);
        }
        let own = User::own();
        let maker = self.acting.known().or_else(|| (own.uid != 0).then_some(own));
        if let Some(maker) = maker {
            let cannot = |error| {
                FilesError::Lost(format!(
                    "{} is gone, and it cannot be made again ({error}): make it, and start the job again",
                    directory.display()
                ))
            };
            let _as_user = self.service.users().access(maker).act_to_write().map_err(cannot)?;
            fs::create_dir_all(directory).map_err(FilesError::reading(directory))?;
        }
        let refused = || {
            PeerError::Local(format!(
                "{} is not a directory of the user whose it was when it was registered (it is a link, or another user's): nothing is \
                 written there",
                directory.display()
            ))
        };
        Ok(self.acting.in_directory(directory).ok_or_else(refused)?)
    }

    /// Names of incomplete or invalid checkpoints that a trainer that loads the newest name must not find. Excludes
    /// names that may not be checkpoints.
    fn unfit(
        &self,
        step: Option<u64>,
        folder: &UserDirectory,
        state: &mut State,
    ) -> Result<Vec<PartialCheckpoint>, FilesError> {
        let Settings { request: WatchRequest { directory, rules, expect, quiet, .. }, .. } = &self.settings;
        let DirectoryScan { look, .. } = self.scan(folder, state)?;
        let done: Vec<u64> =
            complete(rules, &look, *expect, *quiet).iter().map(|found_step| found_step.step).collect();
        let _as_user = folder.act()?;
        let mut unfit = Vec::new();
        for (name, kind) in folder.at.list(Path::new("")).map_err(FilesError::reading(directory))? {
            let Ok(name) = name.into_string() else { continue };
            let Some((rule, found_step)) = matching_rule(rules, &name, kind == FileType::Directory) else {
                continue;
            };
            if step.is_some_and(|step| found_step <= step) || matches!(rule.proof, Proof::Tracker(_)) {
                continue;
            }
            if let Some(why) = not_whole(state, rule, &name, found_step, done.contains(&found_step)) {
                unfit.push(PartialCheckpoint { name, step: found_step, why });
            }
        }
        Ok(unfit)
    }
}

/// Why a job must not go back to the checkpoint of this name; none if there is no reason.
fn not_whole(state: &State, rule: &Rule, name: &str, step: u64, is_complete: bool) -> Option<String> {
    if let Some(lost) = state.catalog.lost().get(&step).filter(|lost| !lost.is_gone) {
        return Some(lost.why.clone());
    }
    if let Some((_, why)) = state.unsound.get(&step) {
        return Some(why.clone());
    }
    if state.catalog.packs().contains_key(&step) {
        return Some("not every host has its part of it".to_owned());
    }
    let first_names = |pack: &std::sync::Arc<super::Pack>| -> Vec<String> {
        let first = |member: &Member| member.path.split('/').next().unwrap_or_default().to_owned();
        pack.content.members().iter().map(first).collect()
    };
    let mut sealed = state.catalog.packs().values().flat_map(first_names);
    // A pattern such as `*{step}` also matches names that are not checkpoints.
    let is_particular = !rule.pattern.written().starts_with(['*', '{']);
    let is_checkpoint = is_particular || sealed.any(|known| is_alike(&known, name));
    (is_checkpoint && !is_complete).then(|| "its writer has not finished it".to_owned())
}
