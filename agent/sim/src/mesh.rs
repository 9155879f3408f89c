//! The ranks of a job as a mesh of tensor, pipeline and data parallelism on hosts of eight ranks.

use mainstay_progress::straggler::{Peers, Role};

/// Ranks per host.
pub const PER_HOST: usize = 8;

/// Sizes of the mesh. The order is that of Megatron-LM: tensor-parallel ranks are neighbours, then come data-parallel
/// ranks, then stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks that share a layer.
    pub tensor: usize,
    /// Stages.
    pub pipeline: usize,
    /// Replicas.
    pub data: usize,
}

impl Mesh {
    /// The usual mesh of `ranks` ranks: tensor parallelism within a host, and one stage per 512 ranks, at most 16.
    pub fn usual(ranks: usize) -> Mesh {
        let tensor = PER_HOST.min(ranks);
        let pipeline = (ranks / 512).clamp(1, 16);
        Mesh { tensor, pipeline, data: ranks / tensor / pipeline }
    }

    /// The number of ranks.
    pub fn ranks(self) -> usize {
        self.tensor * self.pipeline * self.data
    }

    /// The stage of a rank.
    pub fn stage(self, rank: usize) -> usize {
        rank / (self.tensor * self.data)
    }

    /// The host of a rank.
    pub fn host(self, rank: usize) -> usize {
        rank / PER_HOST
    }

    /// The roles of all ranks.
    pub fn peers(self) -> Peers {
        let role = |rank| {
            let stage = self.stage(rank) as u32;
            Role { group: stage, stage: Some(stage), host: Some(self.host(rank) as u32) }
        };
        Peers::new((0..self.ranks()).map(role).collect())
    }
}
