//! The cost for training while its steps are sent to a peer: the time of steps between saves, with a peer and
//! without.
//!
//! Both agents are on this machine, so the peer's work is counted too; training itself has one core. On a shared
//! machine a step takes up to a tenth more in one minute than in the next. So the job with a peer and the one
//! without take turns of a few seconds, and each turn is compared with the one next to it. A third job's bytes go
//! through a bare TCP connection: no replica costs less.

mod job;

use std::thread;

use self::job::Copies;
use self::job::Cycle;
use self::job::Job;
use self::job::Load;
use super::prelude::*;
use super::stop;

/// 1 GiB a second, which is the limit that agents have by default.
const AT_THE_LIMIT: Load = Load { state_mib: 512, steps: 10, turns: 45, warm: 20 };

/// 128 MiB a second: more than the hosts of a large job save, and an eighth of the limit.
const STEADY: Load = Load { state_mib: 256, steps: 40, turns: 20, warm: 5 };

/// After a turn the replica of its last save is sent, which must not take time from the other job's turn.
const SETTLES: Duration = Duration::from_millis(700);

/// The results of the jobs of a load.
struct Measured {
    /// Percent that a step took longer with a peer, and the standard error of that.
    slowed: f64,
    error: f64,
    /// The same in CPU time of the training thread: what contention for memory adds.
    contended: f64,
    /// Percent that a step took longer while its bytes went through a bare connection.
    bare: f64,
    /// Percent that a step took longer with a peer, as measured by the agent, which delays replicas by that.
    counted: f64,
    /// Percent of the saves that reached the peer, in the first turns and later; the others were skipped for newer
    /// ones.
    replicated_first: f64,
    replicated: f64,
    /// Seconds until the launchers had a GiB of memory for saves: the cost of new memory on this machine, and so
    /// for the peer with its first replicas.
    new_memory: f64,
}

/// The same beside other benches. A pair of jobs takes some four minutes: `training --quick` is a separate bench.
pub fn measure_beside(bench: &mut Bench, bed: &Bed) {
    if !bench.args.quick {
        measure(bench, bed);
    }
}

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let rounds = bench.samples(3, 1);
    for (prefix, load) in [("checkpoint.training", AT_THE_LIMIT), ("checkpoint.training_steady", STEADY)] {
        let of =
            |name: &str, unit, of: fn(&Measured) -> f64| Of::median(format!("{prefix}_{name}"), unit, of);
        let mut comparison = Comparison::of(vec![
            of("slowed", "% of a step", |measured| measured.slowed),
            of("slowed_error", "% of a step", |measured| measured.error),
            of("slowed_cpu", "% of a step's CPU time", |measured| measured.contended),
            of("slowed_bare", "% of a step", |measured| measured.bare),
            of("slowed_counted", "% of a step", |measured| measured.counted),
            of("replicated", "% of saves", |measured| measured.replicated),
            of("replicated_first", "% of saves", |measured| measured.replicated_first),
            of("new_memory", "s/GiB", |measured| measured.new_memory),
        ]);
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

fn in_folder(bed: &Bed, folder: &Path, load: Load) -> Result<Measured> {
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
    Ok(Measured {
        slowed,
        error,
        contended: percent_more(with_peer, alone, |cycle| cycle.cpu).0,
        bare: percent_more(bare, alone, took).0,
        counted: 100.0 * counted_s / (trained_s - counted_s),
        replicated_first: with_peer.replicated(0..load.warm)?,
        replicated: with_peer.replicated(load.warm..load.turns)?,
        new_memory: mean(jobs.iter().map(|job| job.new_memory)).0,
    })
}

/// Percent that a product took longer in the turns of one job than in the neighbouring turns of another, and the
/// standard error.
fn percent_more(job: &Job, other: &Job, of: fn(&Cycle) -> f64) -> (f64, f64) {
    let (turns, others) = (job.turns(), other.turns());
    let all = turns.iter().zip(&others).skip(job.load.warm);
    // The mean: rare costs count too.
    mean(all.map(|(with, alone)| 100.0 * (a_product(with, of) / a_product(alone, of) - 1.0)))
}

/// The seconds of a product in a turn. The first cycle does not count: no replica of an earlier save is being sent
/// in it.
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
