//! The cost for training while its steps are sent to a peer: the time of steps between saves, with a peer and
//! without.
//!
//! Both agents are on this machine, so the peer's work is counted too; training itself has one core. On a shared
//! machine a step takes up to a tenth more in one minute than in the next. So the job with a peer and the one
//! without take turns of a few seconds, and each turn is compared with the one next to it. A third job's bytes
//! go through a bare TCP connection: no replica costs less.

mod job;

use std::thread;

use serde_json::{Value, json};

use self::job::{Copies, Cycle, Job, Load};
use super::prelude::*;
use super::stop;

/// 1 GiB a second, which is the limit that agents have by default.
const AT_THE_LIMIT: Load = Load { state_mib: 512, steps: 10, turns: 45, warm: 20 };

/// 128 MiB a second: more than the hosts of a large job save, and an eighth of the limit.
const STEADY: Load = Load { state_mib: 256, steps: 40, turns: 20, warm: 5 };

/// After a turn the replica of its last save is sent, which must not take time from the other job's turn.
const SETTLES: Duration = Duration::from_millis(700);

/// The figures of a load: of percents that a step took longer with a peer, and their standard error; in CPU time
/// of the training thread, which is what contention for memory adds; while the bytes went through a bare
/// connection; and as measured by the agent, which delays replicas by that. Then of the saves that reached the
/// peer, later and in the first turns; the others were skipped for newer ones. The last is the cost of new
/// memory on this machine, and so for the peer with its first replicas.
const FIGURES: [(&str, &str); 8] = [
    ("slowed", "% of a step"),
    ("slowed_error", "% of a step"),
    ("slowed_cpu", "% of a step's CPU time"),
    ("slowed_bare", "% of a step"),
    ("slowed_counted", "% of a step"),
    ("replicated", "% of saves"),
    ("replicated_first", "% of saves"),
    ("new_memory", "s/GiB"),
];

/// The same beside other benches. A pair of jobs takes some four minutes: `training --quick` is a separate
/// bench.
pub fn measure_beside(bench: &mut Bench, bed: &Bed) {
    if !bench.args.quick {
        jobs(bench, bed, 2);
    }
}

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let rounds = bench.samples(3, 1);
    jobs(bench, bed, rounds);
}

fn jobs(bench: &mut Bench, bed: &Bed, rounds: usize) {
    for (prefix, load) in [("checkpoint.training", AT_THE_LIMIT), ("checkpoint.training_steady", STEADY)] {
        let of = |(name, unit)| Of::field(name, &format!("{prefix}_{name}"), unit);
        let mut comparison = Comparison::of(FIGURES.map(of).into());
        for number in 1..=rounds {
            // The disks of two hosts are not measured.
            let round = || {
                let folder = stop::leftover_free("mainstay-bench-training")?;
                Ok(vec![in_folder(bed, folder.path(), load)?])
            };
            if !bench.take(&mut comparison, None, &format!("round {number} of {rounds}"), round) {
                return;
            }
        }
    }
}

fn in_folder(bed: &Bed, folder: &Path, load: Load) -> Result<Value> {
    let kinds = [Copies::Nowhere, Copies::Replicated, Copies::Bare];
    let jobs: Result<Vec<Job>> =
        kinds.into_iter().map(|copies| Job::start(bed, folder, load, copies)).collect();
    let mut jobs: [Job; 3] = jobs?.try_into().unwrap_or_else(|_| unreachable!("there are as many as kinds"));
    let mut counted_before = 0.0;
    for turn in 0..load.turns {
        if turn == load.warm {
            counted_before = jobs[1].counted_s()?;
        }
        // Each is first, second and last equally often: a constant slowdown is no cost.
        for place in 0..jobs.len() {
            let at = if turn % 2 == 0 { place } else { jobs.len() - 1 - place };
            jobs[at].take_turn(turn)?;
            thread::sleep(SETTLES);
        }
    }
    let [alone, with_peer, bare] = &jobs;
    let counted_s = with_peer.counted_s()? - counted_before;
    let took: fn(&Cycle) -> f64 = |cycle| cycle.took;
    let trained_s: f64 = with_peer.turns()[load.warm..].iter().copied().flatten().map(took).sum();
    let (slowed, error) = percent_more(with_peer, alone, took);
    Ok(json!({
        "slowed": slowed,
        "slowed_error": error,
        "slowed_cpu": percent_more(with_peer, alone, |cycle| cycle.cpu).0,
        "slowed_bare": percent_more(bare, alone, took).0,
        "slowed_counted": 100.0 * counted_s / (trained_s - counted_s),
        "replicated_first": with_peer.replicated(0..load.warm)?,
        "replicated": with_peer.replicated(load.warm..load.turns)?,
        "new_memory": mean(jobs.iter().map(|job| job.new_memory)).0,
    }))
}

/// Percent that a product took longer in the turns of one job than in the neighbouring turns of another, and the
/// standard error.
fn percent_more(job: &Job, other: &Job, of: fn(&Cycle) -> f64) -> (f64, f64) {
    let (turns, others) = (job.turns(), other.turns());
    let all = turns.iter().zip(&others).skip(job.load.warm);
    // The mean: rare costs count too.
    mean(all.map(|(with, alone)| 100.0 * (a_product(with, of) / a_product(alone, of) - 1.0)))
}

/// The seconds of a product in a turn. The first cycle does not count: no replica of an earlier save is being
/// sent in it.
fn a_product(turn: &[Cycle], of: fn(&Cycle) -> f64) -> f64 {
    mean(turn.iter().skip(1).map(|cycle| of(cycle) / cycle.steps / cycle.count)).0
}

/// The mean, and its standard error.
fn mean(all: impl Iterator<Item = f64>) -> (f64, f64) {
    let all: Vec<f64> = all.collect();
    let count = all.len() as f64;
    let mean = all.iter().sum::<f64>() / count;
    let squares: f64 = all.iter().map(|one| (one - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0) / count).sqrt())
}
