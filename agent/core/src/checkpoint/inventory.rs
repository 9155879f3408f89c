//! What lies where: copies of shards as their holders tell of them, and which steps are whole by that.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// One step of one attempt of one run: what is restored together or not at all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepKey {
    /// The step. It weighs first: keys sort by it.
    pub step: u64,
    /// The launch of the job, as its launcher named it on its host.
    pub job: String,
    /// The run id that the user gave, the same on every host and in every launch; and behind an `@`, which no run id has, what
    /// tells launches of one name apart.
    pub run: String,
    /// The attempt that saved it: the epoch that fences late writers.
    pub attempt: u64,
    /// How many ranks the step has.
    pub world: u32,
}

impl StepKey {
    /// The run id that the user gave.
    pub fn run_id(&self) -> &str {
        self.run.split_once('@').map_or(&self.run, |(run_id, _)| run_id)
    }
}

/// One rank's part of a step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shard {
    /// The step.
    pub of: StepKey,
    /// The rank.
    pub rank: u32,
    /// The root over its manifest, in hex. Copies with the same root are the same bytes.
    pub root: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// When it was sealed, seconds since 1970 on its owner's clock. It only breaks ties within one step and rank.
    pub created: i64,
}

/// Where a holder keeps a copy. The nearer to use, the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    /// In memory: a pool or a tmpfs.
    Memory,
    /// On a disk.
    Disk,
    /// In storage that outlives the hosts.
    Durable,
}

/// One copy of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    /// The host that has it.
    pub holder: String,
    /// Where it lies there.
    pub medium: Medium,
    /// Whether it is the holder's own: made by a rank there, not kept for others.
    pub own: bool,
    /// Whether the holder has compared all bytes with the manifest.
    pub verified: bool,
    /// What it is a copy of.
    pub shard: Shard,
}

/// What is known of one step over all holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepState {
    /// The step.
    pub key: StepKey,
    /// When its newest shard was sealed, seconds since 1970.
    pub created: i64,
    /// The verified copies of each rank's shard, all of one root; ranks without any are absent.
    pub ranks: BTreeMap<u32, Vec<Copy>>,
}

impl StepState {
    /// Whether every rank's shard lies somewhere, verified.
    pub fn is_whole(&self) -> bool {
        self.key.world > 0 && self.ranks.len() == self.key.world as usize
    }

    /// The ranks of which no verified copy is known, at most `limit` of them.
    pub fn missing(&self, limit: usize) -> Vec<u32> {
        (0..self.key.world).filter(|rank| !self.ranks.contains_key(rank)).take(limit).collect()
    }

    /// On how many hosts the shard with the fewest copies lies; 0 if one is missing.
    pub fn least_copies(&self) -> usize {
        if !self.is_whole() {
            return 0;
        }
        self.ranks.values().map(|copies| holders(copies).len()).min().unwrap_or(0)
    }

    /// All bytes of the step, each shard counted once.
    pub fn bytes(&self) -> u64 {
        self.ranks.values().filter_map(|copies| copies.first()).map(|copy| copy.shard.bytes).sum()
    }
}

/// The hosts among `copies`, each once. Durable storage is no host: what lies only there is far, and frees nobody of keeping copies.
pub fn holders(copies: &[Copy]) -> BTreeSet<&str> {
    let on_hosts = copies.iter().filter(|copy| copy.medium != Medium::Durable);
    on_hosts.map(|copy| copy.holder.as_str()).collect()
}

/// All steps of `run` (of all runs without it) that `copies` tell of, newest first.
///
/// Shards of different attempts, launches or worlds never make one step. Where a rank sealed the same step of an attempt
/// twice, the later one counts.
pub fn steps(copies: &[Copy], run: Option<&str>) -> Vec<StepState> {
    let mut steps: BTreeMap<&StepKey, BTreeMap<u32, Vec<&Copy>>> = BTreeMap::new();
    let told = copies.iter().filter(|copy| run.is_none_or(|run| copy.shard.of.run_id() == run));
    for copy in told.filter(|copy| copy.verified && copy.shard.rank < copy.shard.of.world) {
        steps.entry(&copy.shard.of).or_default().entry(copy.shard.rank).or_default().push(copy);
    }
    let mut states: Vec<StepState> = steps.into_iter().map(|(key, ranks)| state(key, ranks)).collect();
    states.sort_by(|a, b| (b.key.step, b.created, &b.key).cmp(&(a.key.step, a.created, &a.key)));
    states
}

fn state(key: &StepKey, ranks: BTreeMap<u32, Vec<&Copy>>) -> StepState {
    let mut created = i64::MIN;
    let ranks = ranks.into_iter().map(|(rank, copies)| {
        let root = copies.iter().map(|copy| (copy.shard.created, &copy.shard.root)).max();
        let root = root.map(|(sealed, root)| {
            created = created.max(sealed);
            root.clone()
        });
        let same = copies.into_iter().filter(|copy| Some(&copy.shard.root) == root.as_ref());
        (rank, same.cloned().collect())
    });
    let ranks = ranks.collect();
    StepState { key: key.clone(), created, ranks }
}

/// The newest whole step of `run`.
pub fn newest_whole(copies: &[Copy], run: &str) -> Option<StepState> {
    steps(copies, Some(run)).into_iter().find(StepState::is_whole)
}
