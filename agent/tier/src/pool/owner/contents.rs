//! The content of the memory: which steps are whole in it, and which of them are written next.

use std::collections::BTreeSet;

use mainstay_checkpoint_format::control::Control;

use super::{Inner, Whole};
use crate::pool::Settings;
use crate::pool::choose::{self, At, SealedSlot};
use crate::pool::memory::Memory;

/// Maximum number of steps that wait to be taken.
const WHOLE: usize = 4;

impl Inner {
    pub(super) fn pages(&self) -> impl Iterator<Item = Control<'_>> {
        self.ranks.iter().filter_map(|memory| memory.control().ok())
    }

    pub(super) fn add_notice(&mut self, words: String) {
        if self.last_messages != words {
            tracing::debug!("{words}");
            self.last_messages.clone_from(&words);
            self.messages.push(words);
        }
    }

    pub(super) fn held(&self) -> Vec<SealedSlot> {
        let held = self.sealed.iter().map(|((rank, index), sealed)| SealedSlot {
            rank: *rank,
            index: *index,
            at: (sealed.slot.epoch, sealed.slot.step),
            writing: sealed.writing,
        });
        held.collect()
    }

    /// The newest step that is whole over memory and the shards that ranks wrote to disk themselves when they had no slot.
    pub(super) fn newest_whole(&self, settings: &Settings) -> Option<At> {
        self.newest_whole_of(&self.held(), settings)
    }

    /// The shards to write next: first the step to go back to, then the newest whole one.
    pub(super) fn unsaved(&self, settings: &Settings) -> Vec<SealedSlot> {
        let held = self.held();
        let on_disk = |at: At, rank: u32| self.on_disk.contains(&(at, rank));
        let vouched = choose::to_write(&held, self.vouched, &on_disk);
        if vouched.is_empty() {
            choose::to_write(&held, self.newest_whole_of(&held, settings), &on_disk)
        } else {
            vouched
        }
    }

    /// Determines the whole step that was saved before the replicas last agreed.
    pub(super) fn vouch(&mut self, settings: &Settings) {
        let Some((attempt, agreed)) = self.agreed else { return };
        let mut held = self.held();
        held.retain(|shard| shard.at.0 == attempt && shard.at.1 <= agreed);
        let newest = self.newest_whole_of(&held, settings).filter(|at| Some(*at) > self.vouched);
        if let Some(at) = newest {
            self.vouched = Some(at);
            self.pages().for_each(|control| control.set_vouched(at.1));
        }
    }

    /// Records a step whose last shard was sealed, for the comparison of what ranks saved.
    pub(super) fn note_whole(&mut self, at: At) {
        let of_rank = |memory: &Memory| {
            let sealed = self.sealed.range((memory.rank, 0)..=(memory.rank, usize::MAX));
            let mut found = sealed.filter(|(_, sealed)| (sealed.slot.epoch, sealed.slot.step) == at);
            found.next().and_then(|(_, sealed)| Some(sealed.manifest.chunks.as_ref()?.sums.clone()))
        };
        if self.ranks.len() < 2 {
            return;
        }
        let Some(chunks) = self.ranks.iter().map(of_rank).collect::<Option<Vec<_>>>() else { return };
        if self.whole.len() == WHOLE {
            self.whole.remove(0);
        }
        self.whole.push(Whole { attempt: at.0, step: at.1, chunks });
    }

    pub(super) fn newest_whole_of(&self, held: &[SealedSlot], settings: &Settings) -> Option<At> {
        let elsewhere =
            |at: At, rank: u32| self.on_disk.contains(&(at, rank)) || self.elsewhere.contains(&(at, rank));
        choose::newest_whole(held, &settings.ranks, &elsewhere)
    }

    /// Shards that steps in memory lack: their ranks may have written them to the disk themselves.
    pub(super) fn lacking(&self, settings: &Settings) -> Vec<(At, u32)> {
        let held: BTreeSet<(At, u32)> =
            self.sealed.iter().map(|((rank, _), of)| ((of.slot.epoch, of.slot.step), *rank)).collect();
        let steps: BTreeSet<At> = held.iter().map(|(at, _)| *at).collect();
        let all = steps.into_iter().flat_map(|at| settings.ranks.clone().map(move |rank| (at, rank)));
        all.filter(|shard| !held.contains(shard) && !self.on_disk.contains(shard)).collect()
    }
}
