//! The messages that the followers of a large job send, as long as real ones.

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_hang::{Count, RankSample, RankSeen};
use mainstay_model::entry::{ExitStatus, Fact, Spent, StartedRank, StepDone};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::time::Mono;
use mainstay_recovery::protocol::Event;

use super::follower::{Follower, FollowerReport};
use super::{MS, Plan, SECOND};

/// Communicators of a rank: tensor, pipeline, data and context parallelism.
const COMMUNICATORS: u64 = 4;

pub(super) fn events(plan: &Plan, host: &Follower, answer: FollowerReport) -> Vec<Event> {
    let fact = Event::Fact;
    match answer {
        FollowerReport::Died => {
            let died = exited(host.attempt, host.ranks().next().unwrap_or(Rank(0)), false);
            vec![fact(died)]
        }
        FollowerReport::Stopped(attempt) => {
            let mut all: Vec<Event> = host.ranks().map(|rank| fact(exited(attempt, rank, true))).collect();
            all.push(fact(Fact::AttemptEnded { attempt, orphans_killed: 0, waiting: Vec::new() }));
            all
        }
        FollowerReport::Opened(attempt) => vec![Event::Opened { attempt, port: Ok(29_500) }],
        FollowerReport::Seated(attempt, seat) => vec![Event::Seated { attempt, seat }],
        FollowerReport::Holding(attempt) => vec![Event::Holding { attempt, copies: holding(plan, host) }],
        FollowerReport::Brought(attempt, step) => vec![Event::Brought { attempt, step, error: None }],
        FollowerReport::Started(attempt) => {
            let first = host.ranks().next().map_or(0, |rank| rank.0);
            let ranks = host.ranks().map(|rank| StartedRank {
                rank,
                local_rank: rank.0 - first,
                pid: pid(rank),
                page: Some(format!("rank{}-{attempt}", rank.0)),
                start_ticks: Some(1_234_567_890),
            });
            vec![fact(Fact::AttemptStarted {
                attempt,
                master_port: 29_500,
                ranks: ranks.collect(),
                hosts: Vec::new(),
            })]
        }
        FollowerReport::Connected(attempt) => {
            let client = || "python 0.1.0".to_owned();
            host.ranks().map(|rank| fact(Fact::RankConnected { attempt, rank, client: client() })).collect()
        }
    }
}

fn pid(rank: Rank) -> Pid {
    Pid(i32::try_from(rank.0).unwrap_or(0) + 1000)
}

fn exited(attempt: Attempt, rank: Rank, after_stop: bool) -> Fact {
    let line = "[rank] W1125 12:00:00.000000 torch/distributed/elastic: the process group is torn down";
    Fact::RankExited {
        attempt,
        rank,
        pid: pid(rank),
        status: ExitStatus::Signal(9),
        step: Some(1000),
        data: None,
        after_stop,
        stderr_tail: vec![line.to_owned(); 2],
        stdout_tail: Vec::new(),
        stderr_times: Vec::new(),
        stdout_times: Vec::new(),
    }
}

/// The newest two steps of each rank, and the same number of copies for another host.
fn holding(plan: &Plan, host: &Follower) -> Vec<Copy> {
    let world = plan.hosts * plan.ranks;
    let copy = |rank: u32, step: u64, own: bool| Copy {
        holder: "".into(),
        medium: Medium::Memory,
        own,
        verified: own,
        shard: Shard {
            key: StepKey { step, job: "job".into(), run: "llm@1732535000".into(), attempt: 0, world },
            rank,
            root: format!("{rank:064x}"),
            bytes: 400_000_000,
            created: 1_732_535_000,
            piece: None,
        },
    };
    let steps = [900, 1000];
    let own = host.ranks().flat_map(|rank| steps.map(|step| copy(rank.0, step, true)));
    let kept =
        host.ranks().flat_map(|rank| steps.map(|step| copy((rank.0 + plan.ranks) % world, step, false)));
    if plan.copies { own.chain(kept).collect() } else { Vec::new() }
}

pub(super) fn step(now: u64, step: u64) -> StepDone {
    StepDone {
        step,
        start: Mono(now - 6 * SECOND),
        end: Mono(now),
        spent: Spent { wait_ns: 412 * MS, pause_ns: 0, alone_ns: 1733 * MS },
        loss: Some(2.071_834_5),
        ..StepDone::default()
    }
}

pub(super) fn seen(now: u64, rank: Rank, step: u64) -> RankSeen {
    let count = |comm: u64| Count {
        comm: 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(comm + 1),
        entered: now / (step / 64),
        completed: now / (step / 64),
        signature: 0x1234_5678_9abc,
    };
    let sight = RankSample {
        registered: true,
        claim: 1,
        beats: now / (step / 5),
        beat_at: Mono(now),
        step: Some(now / step),
        since: Mono(now),
        ..RankSample::default()
    };
    RankSeen {
        rank,
        sample: sight,
        section: Some("forward".to_owned()),
        long: None,
        counts: (0..COMMUNICATORS).map(count).collect(),
        probe: None,
    }
}
