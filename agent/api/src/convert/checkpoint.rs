//! Converts steps, peers and restores to the types of `mainstay.v1.CheckpointService`.

use mainstay_checkpoint::inventory::{Medium, StepKey, StepState, steps};
use mainstay_checkpoint::{lineage, owner};
use mainstay_durable::Tier;
use mainstay_proto::v1::{
    CheckpointAdvice, CheckpointCopy, CheckpointCounts, CheckpointPeer, CheckpointStep, LentShard,
    ListCheckpointsResponse, PutBack, PutBackText, PutBackUnfit, RestoreProgress, RestoreResult,
};
use mainstay_tier::files;
use mainstay_tier::lent_files::RestoredShard;
use mainstay_tier::peer::{Peer, Progress, Restored, Service};
use mainstay_view::node::JobView;

use crate::{divergence, saving};

/// Maximum number of ranks without a copy that are named.
const MAX_NAMED_RANKS: usize = 64;

pub(crate) fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Which runs are reported.
pub(crate) struct RunFilter<'a> {
    /// The run with this name, as its user gave it; all runs if none.
    pub run: Option<&'a str>,
    /// Runs of this user; of all users if none.
    pub owner: Option<u32>,
}

impl RunFilter<'_> {
    pub fn has(&self, step: &StepKey) -> bool {
        let run = step.run_id();
        self.run.is_none_or(|wanted| lineage::is_asked(run, wanted))
            && self.owner.is_none_or(|uid| owner::owner(run) == Some(uid))
    }
}

pub(crate) fn listing(peers: &Service, seen: &RunFilter<'_>) -> ListCheckpointsResponse {
    let mut copies = peers.copies();
    copies.retain(|copy| seen.has(&copy.shard.key));
    let (store_used, store_quota) = peers.usage();
    let counts = peers.counts();
    ListCheckpointsResponse {
        steps: steps(&copies, None).iter().map(step_out).collect(),
        peers: peers.peers().into_iter().map(|(name, peer)| peer_out(name, peer)).collect(),
        name: peers.name().to_owned(),
        store_used,
        store_quota,
        counts: Some(CheckpointCounts {
            shards_sent: counts.shards_sent,
            bytes_sent: counts.bytes_sent,
            shards_taken: counts.shards_taken,
            bytes_taken: counts.bytes_taken,
            failures: counts.failures,
            damaged: counts.damaged,
        }),
        redundancy: small(peers.redundancy()),
        parity: peers.parity().map_or_else(String::new, |parity| parity.to_string()),
        advice: Vec::new(),
        unlike: peers
            .divergences()
            .iter()
            .filter(|found| seen.has(&found.key))
            .map(divergence::out)
            .collect(),
        excluded: peers.standing().excluded,
    }
}

pub(crate) fn advice_out(job: &JobView, peers: &Service) -> Vec<CheckpointAdvice> {
    let was_s = job.saving.map_or(0.0, |advised| advised.was);
    let tiers = saving::by_tier(job, Some(peers)).into_iter();
    tiers
        .map(|(tier, every_s)| CheckpointAdvice {
            job: job.id.0.clone(),
            tier: tier.as_str().to_owned(),
            every_s,
            was_s,
        })
        .collect()
}

pub(crate) fn step_out(state: &StepState) -> CheckpointStep {
    let all = state.ranks.iter().chain(&state.pieces);
    let mut copies: Vec<_> = all.flat_map(|(rank, copies)| copies.iter().map(|copy| (*rank, copy))).collect();
    copies.sort_by_key(|(rank, copy)| (*rank, copy.shard.piece.as_ref().map(|piece| piece.index)));
    let copies = copies.into_iter().map(|(rank, copy)| CheckpointCopy {
        rank,
        holder: copy.holder.to_string(),
        medium: match copy.medium {
            Medium::Memory => "memory",
            Medium::Disk => "disk",
            Medium::Durable => "durable",
        }
        .to_owned(),
        own: copy.own,
        root: copy.shard.root.clone(),
        bytes: copy.shard.bytes,
        piece: copy
            .shard
            .piece
            .as_ref()
            .map_or_else(String::new, |piece| format!("{} of {}", piece.index, piece.parity)),
    });
    CheckpointStep {
        run: owner::name(&state.key.run).to_owned(),
        owner: owner::owner(&state.key.run),
        job: state.key.job.to_string(),
        attempt: state.key.attempt,
        step: state.key.step,
        world_size: state.key.world,
        created: Some(prost_types::Timestamp { seconds: state.created, nanos: 0 }),
        bytes: state.bytes(),
        whole: state.is_whole(),
        missing_ranks: state.missing(MAX_NAMED_RANKS),
        least_copies: small(state.least_copies()),
        copies: copies.collect(),
    }
}

pub(crate) fn peer_out(name: String, peer: Peer) -> CheckpointPeer {
    CheckpointPeer {
        name,
        alive: peer.alive,
        error: peer.error,
        domain: peer.inventory.domain,
        version: peer.inventory.software,
        store_used: peer.inventory.used,
        store_quota: peer.inventory.quota,
        rate: peer.rate,
        failures: u32::try_from(peer.inventory.failures.len()).unwrap_or(u32::MAX),
        excluded: peer.inventory.standing.excluded,
    }
}

/// Durable storage as a peer that keeps everything: a search for problems finds it in the list of peers.
pub(crate) fn durable_out(tier: &Tier) -> CheckpointPeer {
    let error = tier.status().error;
    CheckpointPeer { name: tier.url().to_owned(), alive: error.is_none(), error, ..CheckpointPeer::default() }
}

pub(crate) fn progress_out(at: Progress) -> RestoreProgress {
    RestoreProgress {
        step: at.step,
        shards_done: small(at.shards.0),
        shards: small(at.shards.1),
        bytes_done: at.bytes.0,
        bytes: at.bytes.1,
        told: at.message,
        files_wanted: small(at.files_wanted),
        files_token: at.files_token,
    }
}

/// What the caller has to do. The result follows when it is done.
pub(crate) fn put_back_out(left: files::PutBack) -> RestoreResult {
    let files::PutBack { token, step, archive, texts, unfit } = left;
    let unfit = unfit.into_iter().map(|files::PartialCheckpoint { name, step, why }| PutBackUnfit {
        name,
        step,
        why,
    });
    let put_back = PutBack {
        token,
        archive: archive.map(lent_out),
        texts: texts.into_iter().map(|(name, text)| PutBackText { name, text }).collect(),
        unfit: unfit.collect(),
    };
    RestoreResult { step, put_back: Some(put_back), ..RestoreResult::default() }
}

fn lent_out(landed: RestoredShard) -> LentShard {
    LentShard {
        file: small(landed.file),
        directory: landed.home.display().to_string(),
        name: landed.name,
        manifest: landed.manifest,
    }
}

/// What keeps copies of the shards sealed here, for the first lines of a job.
pub(crate) fn kept_by(peers: &Service, durable: Option<&Tier>) -> String {
    let others = peers.peers().len();
    let replicas = peers.redundancy().min(others);
    let at_peers = match (peers.parity().filter(|_| others > 0), replicas) {
        (Some(_), _) => Some("pieces on peers".to_owned()),
        (None, 0) => None,
        (None, 1) => Some("1 replica on a peer".to_owned()),
        (None, several) => Some(format!("{several} replicas on peers")),
    };
    let durable = durable.map(|tier| format!("durable storage {}", tier.url()));
    at_peers.into_iter().chain(durable).collect::<Vec<_>>().join(", ")
}

pub(crate) fn result_out(restored: Restored) -> RestoreResult {
    RestoreResult {
        kept_by: String::new(),
        step: restored.decision.step.map(|key| key.step),
        fence: restored.decision.fence,
        decided_by: restored.decision.by,
        bytes_fetched: restored.bytes,
        shards_fetched: small(restored.fetched),
        shards_here: small(restored.here),
        seconds: restored.seconds,
        lent: restored.landed.into_iter().map(lent_out).collect(),
        put_back: None,
    }
}
