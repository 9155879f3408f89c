//! One host of the job, as its leader sees it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Evidence;
use crate::round::Seated;
use mainstay_checkpoint::inventory::Copy;
use mainstay_model::entry::StartedRank;
use mainstay_model::id::{Pid, Rank};
use mainstay_model::time::Mono;
use mainstay_recovery::protocol::Event;

/// One host.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) seated: Seated,
    pub(super) here: bool,
    /// How its loss was detected; empty while it is here.
    pub(super) lost: String,
    /// Whether its launcher knows its seat.
    pub(super) knows: bool,
    pub(super) started: Option<Vec<StartedRank>>,
    /// The number of orphans killed, and the ranks that wait in their processes.
    pub(super) ended: Option<(u32, Vec<Rank>)>,
    pub(super) exited: BTreeSet<Rank>,
    /// The shards of checkpoints on it.
    pub(super) holding: Option<Vec<Copy>>,
    /// Whether the shards of its ranks are present.
    pub(super) brought: bool,
    pub(super) held: VecDeque<(Mono, Event)>,
    pub(super) evidence: Option<Evidence>,
    /// Its ranks send no heartbeats, and none of its processes does anything.
    pub(super) idle: bool,
}

impl Host {
    pub(super) fn new(seated: Seated) -> Host {
        Host {
            seated,
            here: true,
            lost: String::new(),
            knows: true,
            started: None,
            ended: None,
            exited: BTreeSet::new(),
            holding: None,
            brought: false,
            held: VecDeque::new(),
            evidence: None,
            idle: false,
        }
    }

    /// Ranks that were started and have not ended, in order.
    pub(super) fn running(&self) -> impl Iterator<Item = (Rank, Pid)> {
        let pids: BTreeMap<Rank, Pid> =
            self.started.iter().flatten().map(|started| (started.rank, started.pid)).collect();
        pids.into_iter().filter(|(rank, _)| !self.exited.contains(rank))
    }

    /// Its ranks, with unknown processes.
    pub(super) fn unseen(&self) -> Vec<StartedRank> {
        let first = self.seated.seat.first_rank;
        let started = |rank| StartedRank {
            rank: Rank(rank),
            local_rank: rank - first,
            pid: Pid(0),
            page: None,
            start_ticks: None,
        };
        (first..first + self.seated.member.ranks).map(started).collect()
    }

    /// The host for messages: "host b (node rank 1, ranks 2 to 3)".
    pub(super) fn named(&self) -> String {
        let Seated { member, seat } = &self.seated;
        let last = seat.first_rank + member.ranks.saturating_sub(1);
        let ranks = if last == seat.first_rank {
            format!("rank {last}")
        } else {
            format!("ranks {} to {last}", seat.first_rank)
        };
        format!("host {} (node rank {}, {ranks})", member.host, seat.group_rank)
    }
}
