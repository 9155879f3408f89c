//! Steps whose files stay open until their copies are made. If saves are faster than copies, each step is overwritten in memory and
//! deleted from disk before it is sent, so that no step would ever get its copies.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;

use mainstay_checkpoint::inventory::{Medium, StepKey};

use super::{Found, Inner, LocalShards, Watched};
use crate::peer::sealed::Sealed;

/// A shard whose bytes exist as long as its file is open, even if it is deleted.
#[derive(Debug)]
pub(super) struct PinnedShard {
    found: Found,
    file: Arc<File>,
}

impl PinnedShard {
    pub(super) fn sealed(&self) -> &Sealed {
        &self.found.sealed
    }

    pub(super) fn medium(&self) -> Medium {
        self.found.medium
    }

    /// Whether it is from that directory.
    pub(super) fn is_of(&self, place: &Watched) -> bool {
        self.found.root == place.directory && self.found.access.user().uid == place.user.uid
    }
}

impl LocalShards {
    /// The steps of which all ranks of this host have their shard on disk, or held.
    pub(crate) fn on_disk(&self) -> BTreeSet<StepKey> {
        let inner = self.inner();
        let in_files = || {
            let held = inner.held.values().map(|of| &of.found.sealed);
            inner.shards.values().map(|of| &of.sealed).chain(held)
        };
        let all = ranks_of_steps(inner.pooled.values().map(|of| &of.sealed).chain(in_files()));
        // A rank that has saved nothing of a step yet may be about to.
        let most = |run: &str| {
            let of_run = all.iter().filter(|(key, _)| key.run_id() == run);
            of_run.map(|(_, ranks)| ranks.len()).max().unwrap_or(0)
        };
        let on_disk = ranks_of_steps(in_files()).into_iter();
        on_disk.filter(|(key, ranks)| ranks.len() == most(key.run_id())).map(|(key, _)| key.clone()).collect()
    }

    /// Whether the files of this step are kept open, those of all ranks of this host.
    pub(crate) fn holds_all_of(&self, launch: &str, at: (u64, u64)) -> bool {
        let inner = self.inner();
        // In another attempt this host may have other ranks.
        let of_attempt = |sealed: &&Arc<Sealed>| {
            let of = &sealed.shard.of;
            of.run == launch && of.attempt == at.0
        };
        let in_memory = inner.pooled.values().map(|of| &of.sealed);
        let saved = in_memory.chain(inner.shards.values().map(|of| &of.sealed)).filter(of_attempt);
        let ranks: BTreeSet<u32> = saved.map(|sealed| sealed.shard.rank).collect();
        let held = inner.held.values().map(|of| &of.found.sealed).filter(of_attempt);
        let of_step = held.filter(|sealed| sealed.shard.of.step == at.1);
        let held: BTreeSet<u32> = of_step.map(|sealed| sealed.shard.rank).collect();
        !held.is_empty() && held.is_superset(&ranks)
    }

    /// Keeps the files of a step that are on disk open.
    pub(crate) fn hold(&self, of: &StepKey) {
        let wanted: Vec<(String, Found)> = {
            let Inner { shards, held, bad, .. } = &*self.inner();
            let of_step = shards.iter().filter(|(_, found)| found.sealed.shard.of == *of);
            let wanted = of_step.filter(|(root, _)| !held.contains_key(*root) && !bad.contains(*root));
            wanted.map(|(root, found)| (root.clone(), found.clone())).collect()
        };
        for (root, found) in wanted {
            if let Some((_, file)) = self.open_file(&root) {
                self.inner().held.insert(root, PinnedShard { found, file: Arc::new(file) });
            }
        }
    }

    /// Sets the step that is being sent, or none. A step that is sent from memory may be overwritten there and deleted from disk before its
    /// copy is complete: without its owner's copy, it would have one too few. So its files are opened as soon as they are on disk.
    pub(crate) fn set_sending(&self, of: Option<StepKey>) {
        self.inner().sending = of;
    }

    /// Closes the files of all steps except the wanted ones, and those of the step of a launch that is kept from. A step of an
    /// attempt before the newest is not wanted: its owner has continued from another step.
    pub(crate) fn hold_only(&self, wanted: &BTreeSet<&StepKey>, from: Option<&(String, (u64, u64))>) {
        let Inner { shards, pooled, held, .. } = &mut *self.inner();
        if held.is_empty() {
            return;
        }
        let own = shards.values().map(|of| &of.sealed).chain(pooled.values().map(|of| &of.sealed));
        let mut attempts: BTreeMap<&str, u64> = BTreeMap::new();
        for of in own.map(|sealed| &sealed.shard.of) {
            let newest = attempts.entry(of.run_id()).or_default();
            *newest = of.attempt.max(*newest);
        }
        held.retain(|_, shard| {
            let of = &shard.sealed().shard.of;
            let is_kept = from.is_some_and(|(launch, at)| of.run == *launch && (of.attempt, of.step) == *at);
            (is_kept || wanted.contains(of))
                && attempts.get(of.run_id()).is_none_or(|newest| of.attempt >= *newest)
        });
    }

    /// The runs with files that are kept open.
    pub(crate) fn pinned_runs(&self) -> BTreeSet<String> {
        self.inner().held.values().map(|shard| shard.sealed().shard.of.run_id().to_owned()).collect()
    }

    /// Whether the file of a shard is kept open.
    pub(crate) fn is_held(&self, root: &str) -> bool {
        self.inner().held.contains_key(root)
    }

    /// Opens a shard whose file is kept open.
    pub(crate) fn open_pinned(&self, root: &str) -> Option<(Arc<Sealed>, File)> {
        let inner = self.inner();
        let shard = inner.held.get(root)?;
        Some((Arc::clone(&shard.found.sealed), shard.file.try_clone().ok()?))
    }
}

/// The ranks that have saved each step.
fn ranks_of_steps<'s>(shards: impl Iterator<Item = &'s Arc<Sealed>>) -> BTreeMap<&'s StepKey, BTreeSet<u32>> {
    let mut steps: BTreeMap<&StepKey, BTreeSet<u32>> = BTreeMap::new();
    for shard in shards.map(|sealed| &sealed.shard) {
        steps.entry(&shard.of).or_default().insert(shard.rank);
    }
    steps
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use mainstay_checkpoint_format::{Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, chunk_sum};

    use super::*;
    use crate::peer::User;

    /// The shard of a rank, as its launcher seals it on disk.
    fn seal(directory: &Path, step: u64, rank: u32) {
        let identity = Identity { job: "job".into(), attempt: 0, step, rank, world_size: 2 };
        let content = b"weights".as_slice();
        let manifest = Manifest {
            identity,
            run: "run".to_owned(),
            created_unix_s: 1_700_000_000,
            serialisation: "safetensors".to_owned(),
            software: BTreeMap::new(),
            file: SealedFile {
                name: "state".to_owned(),
                size: 7,
                xxh3_128: twox_hash::XxHash3_128::oneshot(content),
            },
            chunks: Some(Chunks { bytes: 4096, sums: vec![chunk_sum(content)] }),
            shared_content: None,
        };
        let home = directory.join(format!("step-{step:012}/rank-{rank:05}"));
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("state"), content).unwrap();
        fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
    }

    /// The shards of a directory, before the first look.
    fn watching(directory: &Path) -> LocalShards {
        let own = LocalShards::default();
        let (run, directory) = ("run".to_owned(), directory.to_owned());
        own.watch(Watched { run, directory, user: User::own(), pool: None });
        own
    }

    #[test]
    fn a_step_that_is_being_sent_keeps_its_files_from_the_time_they_are_on_disk() {
        let directory = testing::tempdir().unwrap();
        let own = watching(directory.path());
        [10, 20].into_iter().for_each(|step| seal(directory.path(), step, 0));
        own.look();
        let shards: Vec<_> = own.list().into_iter().map(|(shard, ..)| shard).collect();
        let of = |step: u64| shards.iter().find(|shard| shard.of.step == step).unwrap().clone();
        let (sent, other) = (of(10), of(20));
        fs::remove_dir_all(directory.path().join("step-000000000010")).unwrap();
        own.look();
        // As if it had been sent from memory all the time.
        own.set_sending(Some(sent.of.clone()));
        seal(directory.path(), 10, 0);
        own.look();
        // A newer step has replaced it.
        fs::remove_dir_all(directory.path()).unwrap();
        own.look();
        assert!(own.is_held(&sent.root), "its owner still has it");
        assert!(!own.is_held(&other.root));
        assert_eq!(own.open_pinned(&sent.root).map(|(sealed, _)| sealed.shard.of.step), Some(10));
        // It stays as long as it is the step that the job goes back to.
        let launch = sent.of.run.to_string();
        assert!(own.holds_all_of(&launch, (0, 10)) && !own.holds_all_of(&launch, (0, 20)));
        own.hold_only(&BTreeSet::new(), Some(&(launch.clone(), (0, 10))));
        assert!(own.holds_all_of(&launch, (0, 10)));
        own.hold_only(&BTreeSet::new(), Some(&(launch.clone(), (0, 20))));
        assert!(!own.holds_all_of(&launch, (0, 10)));
    }

    #[test]
    fn a_step_is_held_only_with_the_shards_of_all_ranks_of_the_host() {
        let directory = testing::tempdir().unwrap();
        let own = watching(directory.path());
        seal(directory.path(), 10, 0);
        seal(directory.path(), 20, 1);
        own.look();
        let shards = own.list();
        let of = |step: u64| &shards.iter().find(|(shard, ..)| shard.of.step == step).unwrap().0.of;
        own.hold(of(10));
        assert!(!own.holds_all_of(&of(10).run, (0, 10)), "the other rank of the host has no shard of it");
        seal(directory.path(), 10, 1);
        own.look();
        own.hold(of(10));
        assert!(own.holds_all_of(&of(10).run, (0, 10)));
        assert!(!own.holds_all_of("another", (0, 10)));
    }
}
