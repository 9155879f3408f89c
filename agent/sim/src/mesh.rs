//! A job's ranks as a mesh of tensor, pipeline and data parallelism, on hosts of eight.

use mainstay_core::progress::straggler::{Peers, Role};

/// Ranks per host.
pub const PER_HOST: usize = 8;

/// Sizes of the mesh. Tensor-parallel ranks are neighbours, then come data-parallel ones, then stages, as
/// Megatron-LM orders them.
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
    /// The usual mesh of so many ranks: tensors over a host, stages so that each has at least 64 ranks.
    pub fn of(ranks: usize) -> Mesh {
        let tensor = PER_HOST.min(ranks);
        let pipeline = (ranks / 512).clamp(1, 16);
        Mesh { tensor, pipeline, data: ranks / tensor / pipeline }
    }

    /// How many ranks there are.
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
