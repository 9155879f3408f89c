//! Ranks that declared the same content and saved different bytes, as API messages.

use mainstay_checkpoint::divergence::{Member, ReplicaDivergence};
use mainstay_checkpoint::owner;
use mainstay_proto::v1::{CheckpointUnlike, CheckpointUnlikeMember};

/// A step in which they saved different bytes.
pub(super) fn out(found: &ReplicaDivergence) -> CheckpointUnlike {
    let member = |member: &Member| CheckpointUnlikeMember {
        rank: member.rank,
        holder: member.holder.clone(),
        root: member.root.clone(),
        apart: found.apart.contains(&member.rank),
    };
    CheckpointUnlike {
        run: owner::name(found.key.run_id()).to_owned(),
        step: found.key.step,
        attempt: found.key.attempt,
        group: found.group.clone(),
        members: found.members.iter().map(member).collect(),
        headline: found.sentence(),
    }
}
