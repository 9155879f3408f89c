//! Checks the sealed steps of one directory: which are still offered, and which may be sealed as another step.

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_checkpoint::files::{DirectorySnapshot, Written, in_place};

use super::FilesError;
use super::catalog::Lost;
use super::compare::{StepChange, compare};
use super::host::{self, AGAIN, Place};
use super::pack::{Content, Pack};
use super::tree::{self, Member};
use super::watch::{Inner, Settings, State};

impl Inner {
    /// Compares each sealed step with the files.
    pub(super) fn judge(
        &self,
        state: &mut State,
        look: &DirectorySnapshot,
        files: &BTreeMap<u64, Vec<Member>>,
        place: &Place,
    ) -> Result<(), FilesError> {
        let Settings { run, .. } = &self.settings;
        let trackers: BTreeMap<String, Written> =
            look.texts.iter().map(|(name, (_, written))| (name.clone(), *written)).collect();
        let lost = state.catalog.lost().iter().map(|(step, lost)| (*step, Arc::clone(&lost.pack)));
        let known: Vec<(u64, Arc<Pack>)> =
            state.catalog.packs().iter().map(|(step, pack)| (*step, Arc::clone(pack))).chain(lost).collect();
        let fence = host::fence(&self.service, run);
        state.grown.clear();
        for (step, pack) in known {
            let members = pack.content.members();
            let now = match files.get(&step) {
                Some(now) => now.clone(),
                // An older step, or one whose names are gone.
                None => {
                    let _as_user = place.act()?;
                    let there = |of: &&Member| of.words.is_none();
                    let of = |of: &Member| tree::one(&place.at, &of.path);
                    members.iter().filter(there).filter_map(of).collect()
                }
            };
            let went_back = fence * AGAIN > pack.sealed.shard.of.attempt;
            let became = compare(members, &now, &trackers, went_back);
            if pack.sealed.shard.of.run_id() != run
                && matches!(became, StepChange::Unchanged | StepChange::Extended)
            {
                // It is sealed for this run too after its bytes are compared.
                self.lose(state, step, "it was sealed for another run".to_owned(), true, false);
                continue;
            }
            match became {
                StepChange::Unchanged => _ = state.catalog.find(step),
                StepChange::Extended => {
                    state.catalog.find(step);
                    state.grown.push(step);
                }
                StepChange::Rewritten => {
                    self.lose(state, step, "it was written again".to_owned(), true, false);
                }
                StepChange::Damaged(why) => self.lose(state, step, why, false, false),
                // Its trainer has deleted it; its copies stay valid.
                StepChange::Missing => self.lose(state, step, "its files are gone".to_owned(), false, true),
            }
        }
        // A step that a trainer deletes when it has newer ones is no loss.
        let newest = state.catalog.packs().keys().next_back().copied();
        let is_over = |(step, lost): (&u64, &Lost)| {
            let is_replaced = self.is_in_place(&lost.pack.content);
            ((lost.is_gone || is_replaced) && Some(*step) < newest).then_some(*step)
        };
        let over: Vec<u64> = state.catalog.lost().iter().filter_map(is_over).collect();
        for step in over {
            state.catalog.remove(step);
            state.first_seen.remove(&step);
        }
        Ok(())
    }

    pub(super) fn lose(&self, state: &mut State, step: u64, why: String, is_again: bool, is_gone: bool) {
        let words = why.clone();
        let sealed = state.catalog.sealed(step);
        let is_overwritten = is_again && sealed.is_some_and(|pack| self.is_in_place(&pack.content));
        if !state.catalog.lose(step, why, is_again, is_gone) || is_gone {
            return;
        }
        let Settings { run, directory, .. } = &self.settings;
        let place = directory.display();
        if !is_overwritten {
            tracing::warn!(run, step, directory = %place, "a sealed step is no longer offered here: {words}");
        } else if !std::mem::replace(&mut state.overwriting_reported, true) {
            tracing::warn!(
                "{place}: each save overwrites the one before, so a failure during a save leaves no whole step there: write \
                 each step to a file of its own, or keep copies on peers (`checkpoint.peers` of the agent)"
            );
        }
    }

    /// Whether the next step overwrites these files.
    pub(super) fn is_in_place(&self, content: &Content) -> bool {
        content.members().iter().all(|of| in_place(&self.settings.rules, &of.path, false).is_some())
    }
}
