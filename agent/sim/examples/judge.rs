//! Measures the judges on simulated jobs and prints one JSON object per line. `cargo xtask bench judge` runs it and
//! collects the figures.

use std::io::Write;

use mainstay_progress::straggler::{Judge, Limits};
use mainstay_sim::hang::{self, Case, Loss};
use mainstay_sim::mesh::Mesh;
use mainstay_sim::random::Random;
use mainstay_sim::slow::{Job, Noise, SlowFault, run};
use nix::time::{ClockId, clock_gettime};

/// Ranks of the largest job.
const MOST: usize = 131_072;

/// The step at which the trouble starts, so that normal steps precede it.
const BEGINS: u64 = 30;

/// A slow rank must be reported within this number of steps.
const WITHIN: u64 = 10;

fn main() {
    let trials: u64 = std::env::args().nth(1).and_then(|trials| trials.parse().ok()).unwrap_or(300);
    if std::env::args().nth(2).as_deref() == Some("hangs") {
        return hangs(trials);
    }
    if std::env::args().nth(2).as_deref() == Some("healthy") {
        return healthy();
    }
    tick();
    stragglers(trials);
    healthy();
    hang_tick();
    hangs(trials);
}

fn figure(id: &str, unit: &str, value: f64, n: u64, min: f64, max: f64) {
    println!(
        r#"{{"id": "{id}", "value": {value:.4}, "unit": "{unit}", "n": {n}, "min": {min:.4}, "max": {max:.4}}}"#
    );
    // A closed pipe does not affect the measurement.
    let _ = std::io::stdout().flush();
}

/// One tick of the leader over all ranks, in processor time of one core, which other processes may use too: the
/// median of 100 after the windows are full.
fn tick() {
    let mesh = Mesh::usual(MOST);
    let mut job = Job::new(mesh, Noise::USUAL, SlowFault::Rank(70_000, 0.05), 80, 1);
    let mut judge = Judge::new(mesh.peers(), Limits::default());
    let (mut took, mut changes) = (Vec::new(), Vec::new());
    for step in 0..170 {
        let row = job.advance();
        let began = processor_ms();
        judge.step(row, &mut changes);
        if step >= 70 {
            took.push(processor_ms() - began);
        }
    }
    took.sort_unstable_by(f64::total_cmp);
    let n = took.len();
    figure("judge.tick_131072", "ms", took[n / 2], n as u64, took[0], took[n - 1]);
    let mebibytes = judge.bytes() as f64 / 1_048_576.0;
    figure("judge.memory_131072", "MiB", mebibytes, 1, mebibytes, mebibytes);
}

/// Milliseconds of processor time that this thread has used; 0 if the kernel does not report it.
fn processor_ms() -> f64 {
    let used = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    used.map_or(0.0, |used| used.tv_sec() as f64 * 1e3 + used.tv_nsec() as f64 / 1e6)
}

/// A rank that is 5 % slow in jobs of four sizes, and the distinction of every kind of trouble.
fn stragglers(trials: u64) {
    let mut random = Random::new(2);
    let (mut wanted, mut reported, mut right, mut false_reports) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut steps: Vec<f64> = Vec::new();
    let sizes = [(64, trials), (1024, trials), (16_384, (trials / 30).max(1)), (MOST, (trials / 150).max(1))];
    for (ranks, trials) in sizes {
        let mesh = Mesh::usual(ranks);
        for trial in 0..trials {
            let slow = random.below(ranks);
            let seed = trial * 1000 + ranks as u64;
            let score = run(mesh, Noise::USUAL, SlowFault::Rank(slow, 0.05), BEGINS, BEGINS + 30, seed);
            wanted += 1;
            reported += u64::from(score.steps.is_some());
            right += u64::from(score.steps.is_some_and(|steps| steps <= WITHIN));
            steps.extend(score.steps.map(|steps| steps as f64));
            false_reports += score.false_reports.len() as u64;
        }
    }
    let percent = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
    let recall = percent(right, wanted);
    let precision = percent(reported, reported + false_reports);
    figure("judge.straggler_recall", "%", recall, wanted, recall, recall);
    figure("judge.straggler_precision", "%", precision, reported + false_reports, precision, precision);
    steps.sort_unstable_by(f64::total_cmp);
    if let (Some(first), Some(last)) = (steps.first(), steps.last()) {
        figure("judge.straggler_steps", "steps", steps[steps.len() / 2], steps.len() as u64, *first, *last);
    }
    let mut named = 0;
    let classes = (trials / 10).max(1);
    let mesh = Mesh { tensor: 8, pipeline: 4, data: 16 };
    for trial in 0..classes {
        for (trouble, starts) in [
            (SlowFault::Rank(random.below(mesh.ranks()), 0.10), BEGINS),
            (SlowFault::Host(random.below(mesh.ranks() / 8), 0.10), BEGINS),
            (SlowFault::Stage(random.below(4), 0.25), 1),
            (SlowFault::Sequences(0.11), 1),
        ] {
            let score = run(mesh, Noise::USUAL, trouble, starts, 100, trial);
            named += u64::from(score.steps.is_some() && score.false_reports.is_empty());
        }
    }
    let share = percent(named, classes * 4);
    figure("judge.straggler_class", "%", share, classes * 4, share, share);
}

/// Jobs without a fault: false reports per 10^7 rank-steps.
fn healthy() {
    let (mut rank_steps, mut reports) = (0.0_f64, 0_u64);
    let kinds = [
        Noise::USUAL,
        Noise { step: 0.03, ..Noise::USUAL },
        Noise { rank: 0.01, ..Noise::USUAL },
        Noise { outliers: 0.01, ..Noise::USUAL },
        Noise { lost: 0.3, silent_hosts: 0.2, ..Noise::USUAL },
    ];
    for (ranks, steps) in [(256, 4000), (4096, 1000), (MOST, 80)] {
        for (seed, noise) in kinds.into_iter().enumerate() {
            let score = run(Mesh::usual(ranks), noise, SlowFault::None, 1, steps, seed as u64);
            rank_steps += ranks as f64 * steps as f64;
            reports += score.false_reports.len() as u64;
            for found in &score.false_reports {
                eprintln!("{ranks} ranks, {noise:?}: {found:?}");
            }
        }
    }
    let rate = reports as f64 / rank_steps * 1e7;
    figure("judge.false_per_1e7", "reports", rate, (rank_steps / 1e6) as u64, rate, rate);
    eprintln!("{reports} false reports in {rank_steps:.0} rank-steps");
}

/// One look of the hang judge over a stopped job, with every report read and the culprit searched again: processor
/// time of one core, the median of 100.
fn hang_tick() {
    let mut case = Case::new(Mesh::usual(MOST), hang::HangFault::Rank(70_001), Loss::USUAL, 1);
    let mut took = Vec::new();
    for look in 0..110 {
        let began = processor_ms();
        case.look();
        if look >= 10 {
            took.push(processor_ms() - began);
        }
    }
    took.sort_unstable_by(f64::total_cmp);
    let n = took.len();
    figure("judge.hang_tick_131072", "ms", took[n / 2], n as u64, took[0], took[n - 1]);
    let mebibytes = case.bytes() as f64 / 1_048_576.0;
    figure("judge.hang_memory_131072", "MiB", mebibytes, 1, mebibytes, mebibytes);
}

/// The share of cases in which the faulty rank, or its host if that is silent, is named, by the size of the job.
fn hangs(trials: u64) {
    let percent = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
    let sizes = [(1024, trials * 4), (16_384, trials / 3), (MOST, trials / 10)];
    let mut random = Random::new(3);
    for (ranks, trials) in sizes {
        let (mesh, trials) = (Mesh::usual(ranks), trials.max(1));
        let (mut rank_right, mut host_right) = (0, 0);
        for seed in 0..trials {
            let culprit = random.below(ranks);
            let score = hang::run(mesh, hang::HangFault::Rank(culprit), Loss::USUAL, seed);
            rank_right += u64::from(score.rank);
            if !score.rank {
                eprintln!("{ranks} ranks, seed {seed}: rank {culprit} at fault, told {:?}", reported(&score));
            }
            let score = hang::run(mesh, hang::HangFault::SilentHost(culprit), Loss::USUAL, seed);
            host_right += u64::from(score.host);
            if !score.host {
                eprintln!(
                    "{ranks} ranks, seed {seed}: silent rank {culprit} at fault, told {:?}",
                    reported(&score)
                );
            }
        }
        let (root, host) = (percent(rank_right, trials), percent(host_right, trials));
        figure(&format!("judge.hang_root_{ranks}"), "%", root, trials, root, root);
        figure(&format!("judge.hang_host_{ranks}"), "%", host, trials, host, host);
    }
}

fn reported(score: &hang::Score) -> Option<(mainstay_hang::HangKind, &[mainstay_model::id::Rank])> {
    score.hang.as_ref().map(|hang| (hang.kind, hang.culprits.as_slice()))
}
