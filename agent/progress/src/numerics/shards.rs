//! Compares saved shards that should be equal by the checksums of their chunks.
//!
//! Which chunks should be equal is learned. If ranks had the same checksum in several checkpoints in a row, each time
//! with new content, they hold the same data. A rank's own data (the header, its random state, a shard of FSDP)
//! differs from the first checkpoint on and is never compared. Bytes that never change prove nothing: they may be a
//! buffer that is not filled yet.

use std::collections::BTreeMap;

/// Checkpoints in a row in which a chunk must be equal and new before a difference counts.
const LEARNED: u32 = 3;

/// The shards of one attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct Shards {
    chunks: Vec<Chunk>,
    /// By rank: the number of chunks in its shard.
    lengths: Vec<usize>,
    last: Option<u64>,
    /// The last step at which all compared chunks agreed.
    agreed: Option<u64>,
    /// The same, until replicas first differed.
    vouched: Option<u64>,
    differed: bool,
}

/// One chunk position in all shards.
#[derive(Clone, Debug)]
struct Chunk {
    /// By rank: its checksum in the last checkpoint. `None` beyond the end of its shard.
    sums: Vec<Option<u64>>,
    /// By rank: the first of the ranks with which it was equal in each checkpoint.
    with: Vec<usize>,
    /// In how many checkpoints in a row, each time with new content.
    times: u32,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Compared {
    /// Nothing is known yet that should be equal.
    Nothing,
    /// All chunks that should be equal are.
    Agreed,
    /// Some differ.
    ShardDivergence(ShardDivergence),
}

/// Shards that should be equal and differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardDivergence {
    /// The ranks that differ from a majority. Without a majority, all ranks that should be equal.
    pub(super) ranks: Vec<u32>,
    /// Whether a majority names them.
    pub(super) named: bool,
    /// The number of chunks that differ, and of all that were compared.
    pub(super) chunks: (usize, usize),
    /// The first chunk that differs.
    pub(super) first: usize,
    /// How many ranks should be equal there.
    pub(super) total: usize,
    pub(super) last_agreed: Option<u64>,
}

impl Shards {
    /// The last step at which everything that was compared agreed, while nothing had ever differed.
    pub(super) fn vouched(&self) -> Option<u64> {
        self.vouched
    }

    /// Whether something has differed: restarts must not return to anything later.
    pub(super) fn differed(&self) -> bool {
        self.differed
    }

    /// Compares what the ranks saved of a step: by rank the checksums of its chunks.
    pub(super) fn compare(&mut self, step: u64, tables: &[Vec<u64>]) -> Compared {
        if self.last.is_some_and(|last| step <= last) {
            return Compared::Nothing;
        }
        self.last = Some(step);
        let lengths: Vec<usize> = tables.iter().map(Vec::len).collect();
        if self.lengths != lengths {
            // The state has another layout from now on.
            (self.chunks, self.lengths) = (Vec::new(), lengths);
        }
        let places = self.lengths.iter().copied().max().unwrap_or(0);
        let (mut compared, mut differing, mut found) = (0, 0, None);
        for place in 0..places {
            let sums: Vec<Option<u64>> = tables.iter().map(|table| table.get(place).copied()).collect();
            let Some(chunk) = self.chunks.get_mut(place) else {
                self.chunks.push(Chunk::new(sums));
                continue;
            };
            if !chunk.is_learned() {
                chunk.learn(sums);
                compared += usize::from(chunk.is_learned());
                continue;
            }
            let split = chunk.split(&sums);
            match &split {
                Some(Split::ByDesign) => {
                    *chunk = Chunk::new(sums);
                    continue;
                }
                Some(Split::ShardDivergence { .. }) => differing += 1,
                None => {}
            }
            compared += 1;
            chunk.sums = sums;
            if let Some(Split::ShardDivergence { ranks, named, total }) = split {
                found = Some(match found {
                    None => (place, ranks, named, total),
                    Some((first, before, all_named, total)) => {
                        (first, joined(before, ranks), all_named && named, total)
                    }
                });
            }
        }
        match found {
            Some((first, ranks, named, total)) => {
                self.differed = true;
                let chunks = (differing, compared);
                Compared::ShardDivergence(ShardDivergence {
                    ranks,
                    named,
                    chunks,
                    first,
                    total,
                    last_agreed: self.agreed,
                })
            }
            None if compared == 0 => Compared::Nothing,
            None => {
                self.agreed = Some(step);
                if !self.differed {
                    self.vouched = self.agreed;
                }
                Compared::Agreed
            }
        }
    }
}

/// How ranks differ at a position where they should be equal.
enum Split {
    /// All from each other: they diverge by design now.
    ByDesign,
    ShardDivergence {
        ranks: Vec<u32>,
        named: bool,
        total: usize,
    },
}

impl Chunk {
    fn new(sums: Vec<Option<u64>>) -> Chunk {
        let mut first: BTreeMap<u64, usize> = BTreeMap::new();
        let with = sums.iter().enumerate().map(|(rank, sum)| match sum {
            Some(sum) => *first.entry(*sum).or_insert(rank),
            None => rank,
        });
        Chunk { with: with.collect(), sums, times: 0 }
    }

    fn is_learned(&self) -> bool {
        self.times >= LEARNED
    }

    /// The groups of ranks that were always equal, with more than one rank.
    fn groups(&self) -> impl Iterator<Item = Vec<usize>> + '_ {
        let leads = (0..self.with.len()).filter(|rank| self.with[*rank] == *rank);
        leads
            .map(|lead| (0..self.with.len()).filter(|rank| self.with[*rank] == lead).collect())
            .filter(|group: &Vec<usize>| group.len() > 1)
    }

    fn learn(&mut self, sums: Vec<Option<u64>>) {
        let groups: Vec<Vec<usize>> = self.groups().collect();
        let is_same = groups.iter().all(|group| group.iter().all(|rank| sums[*rank] == sums[group[0]]));
        if !is_same {
            *self = Chunk::new(sums);
            return;
        }
        if !groups.is_empty() && groups.iter().all(|group| sums[group[0]] != self.sums[group[0]]) {
            self.times += 1;
            self.sums = sums;
        }
    }

    /// How ranks that should be equal differ. `None` if they do not.
    fn split(&self, sums: &[Option<u64>]) -> Option<Split> {
        let mut found: Option<(Vec<u32>, bool, usize)> = None;
        for group in self.groups() {
            let mut classes: BTreeMap<Option<u64>, Vec<u32>> = BTreeMap::new();
            group.iter().for_each(|rank| classes.entry(sums[*rank]).or_default().push(*rank as u32));
            if classes.len() == 1 {
                continue;
            }
            if classes.len() == group.len() && group.len() > 2 {
                return Some(Split::ByDesign);
            }
            let largest = classes.values().map(Vec::len).max().unwrap_or(0);
            let named = largest * 2 > group.len();
            let apart = classes.into_values().filter(|class| !named || class.len() < largest).flatten();
            let (before, all_named, total) = found.unwrap_or((Vec::new(), true, 0));
            found = Some((joined(before, apart.collect()), all_named && named, total.max(group.len())));
        }
        found.map(|(ranks, named, total)| Split::ShardDivergence { ranks, named, total })
    }
}

fn joined(mut ranks: Vec<u32>, more: Vec<u32>) -> Vec<u32> {
    ranks.extend(more);
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shard of four chunks. The first and the last belong to the rank alone.
    fn shard(rank: u64, step: u64) -> Vec<u64> {
        vec![rank * 1000 + step, step * 7 + 1, step * 7 + 2, rank * 5000 + 3]
    }

    fn saved(ranks: u64, step: u64) -> Vec<Vec<u64>> {
        (0..ranks).map(|rank| shard(rank, step)).collect()
    }

    fn learned(ranks: u64) -> Shards {
        let mut shards = Shards::default();
        for step in 1..=3 {
            assert_eq!(shards.compare(step, &saved(ranks, step)), Compared::Nothing, "step {step}");
        }
        assert_eq!(shards.compare(4, &saved(ranks, 4)), Compared::Agreed);
        assert_eq!(shards.compare(5, &saved(ranks, 5)), Compared::Agreed);
        shards
    }

    #[test]
    fn the_majority_names_the_rank_whose_chunk_changed() {
        let mut shards = learned(4);
        let mut tables = saved(4, 6);
        tables[2][1] ^= 1;
        let found = shards.compare(6, &tables);
        let apart = ShardDivergence {
            ranks: vec![2],
            named: true,
            chunks: (1, 2),
            first: 1,
            total: 4,
            last_agreed: Some(5),
        };
        assert_eq!(found, Compared::ShardDivergence(apart));
        assert!(shards.differed());
        // They agree again: what was saved in between stays doubtful.
        assert_eq!(shards.compare(7, &saved(4, 7)), Compared::Agreed);
        assert_eq!(shards.vouched(), Some(5));
    }

    #[test]
    fn with_two_ranks_neither_is_named() {
        let mut shards = learned(2);
        let mut tables = saved(2, 6);
        tables[1][2] ^= 1;
        let Compared::ShardDivergence(apart) = shards.compare(6, &tables) else { panic!("they differ") };
        assert_eq!((apart.ranks.as_slice(), apart.named), ([0, 1].as_slice(), false));
    }

    #[test]
    fn data_of_single_ranks_is_never_compared() {
        let mut shards = Shards::default();
        for step in 1..20 {
            let tables: Vec<Vec<u64>> =
                (0..4).map(|rank| vec![rank * 99 + step, rank * 77 + step * 3]).collect();
            assert_eq!(shards.compare(step, &tables), Compared::Nothing);
        }
        assert_eq!((shards.vouched(), shards.differed()), (None, false));
    }

    #[test]
    fn shards_with_replicas_are_compared_with_their_own() {
        let mut shards = Shards::default();
        let tables =
            |step: u64| -> Vec<Vec<u64>> { (0..6).map(|rank| vec![rank % 2 * 1000 + step]).collect() };
        (1..=4).for_each(|step| _ = shards.compare(step, &tables(step)));
        let mut spoilt = tables(5);
        spoilt[3][0] += 1;
        let Compared::ShardDivergence(apart) = shards.compare(5, &spoilt) else { panic!("one differs") };
        assert_eq!((apart.ranks.as_slice(), apart.named, apart.total), ([3].as_slice(), true, 3));
    }

    #[test]
    fn ranks_that_diverge_by_design_or_fill_a_buffer_are_not_corrupt() {
        let mut shards = learned(3);
        let own: Vec<Vec<u64>> = (0..3).map(|rank| shard(rank, 6 + rank)).collect();
        assert_eq!(shards.compare(6, &own), Compared::Nothing);
        // A buffer of zeros that one of them starts to fill.
        let mut buffer = Shards::default();
        let mut tables = vec![vec![0]; 3];
        for step in 1..10 {
            assert_eq!(buffer.compare(step, &tables), Compared::Nothing);
        }
        tables[1][0] = 5;
        assert_eq!(buffer.compare(10, &tables), Compared::Nothing);
    }

    #[test]
    fn another_state_is_learned_again() {
        let mut shards = learned(3);
        let longer: Vec<Vec<u64>> = (0..3).map(|rank| vec![rank, 1, 2, 3, 4]).collect();
        assert_eq!(shards.compare(6, &longer), Compared::Nothing);
        let mut other = longer.clone();
        other[0][1] = 9;
        assert_eq!(shards.compare(7, &other), Compared::Nothing);
    }
}
