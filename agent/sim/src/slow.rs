//! Jobs with and without a cause of slowness.

use mainstay_progress::straggler::{Change, Judge, Limits, Row, Slow, Straggler};

use crate::mesh::{Mesh, PER_HOST};
use crate::random::Random;

/// Seconds of own work in a step.
const WORK: f32 = 1.0;

/// The noise of step times.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// Standard deviation of ln(self time) from step to step.
    pub step: f32,
    /// Standard deviation of the constant difference between ranks.
    pub rank: f32,
    /// Probability that a step of a rank takes 1.2 to 3 times as long: the heavy tail.
    pub outliers: f32,
    /// Share of reports that are lost.
    pub lost: f32,
    /// Share of hosts that report nothing.
    pub silent_hosts: f32,
}

impl Noise {
    /// 1 % from step to step with a heavy tail, small differences between ranks, 5 % of reports lost, 1 % of hosts
    /// silent.
    pub const USUAL: Noise =
        Noise { step: 0.01, rank: 0.002, outliers: 0.002, lost: 0.05, silent_hosts: 0.01 };
}

/// The fault of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SlowFault {
    /// Nothing.
    None,
    /// A rank is slower by this share.
    Rank(usize, f32),
    /// All ranks of a host are slower by this share.
    Host(usize, f32),
    /// A stage has this share more work.
    Stage(usize, f32),
    /// Sequences of different lengths, with this standard deviation.
    Sequences(f32),
}

/// A running job.
#[derive(Debug)]
pub struct Job {
    mesh: Mesh,
    noise: Noise,
    trouble: SlowFault,
    starts: u64,
    random: Random,
    offsets: Vec<f32>,
    silent: Vec<bool>,
    self_times: Vec<f32>,
    step: u64,
}

impl Job {
    /// A job whose trouble starts at step `starts`.
    pub fn new(mesh: Mesh, noise: Noise, trouble: SlowFault, starts: u64, seed: u64) -> Job {
        let mut random = Random::new(seed);
        let offsets = (0..mesh.ranks()).map(|_| random.normals().0 * noise.rank).collect();
        // A host that never reports cannot be named as slow. Other code reports that it is silent.
        let spared = match trouble {
            SlowFault::Rank(rank, _) => Some(mesh.host(rank)),
            SlowFault::Host(host, _) => Some(host),
            SlowFault::None | SlowFault::Stage(..) | SlowFault::Sequences(_) => None,
        };
        let silent = (0..mesh.ranks().div_ceil(PER_HOST))
            .map(|host| random.happens(noise.silent_hosts) && spared != Some(host))
            .collect();
        Job {
            mesh,
            noise,
            trouble,
            starts,
            random,
            offsets,
            silent,
            self_times: vec![0.0; mesh.ranks()],
            step: 0,
        }
    }

    /// Computes the next step.
    pub fn advance(&mut self) -> Row<'_> {
        self.step += 1;
        let mut slowest = 0.0_f32;
        for rank in 0..self.self_times.len() {
            let (one, _) = self.random.normals();
            let mut excess = self.offsets[rank] + one * self.noise.step;
            if self.random.happens(self.noise.outliers) {
                excess += 0.2 + 0.9 * self.random.unit();
            }
            excess += self.trouble_of(rank);
            let own = WORK * excess.exp();
            slowest = slowest.max(own);
            let lost = self.silent[self.mesh.host(rank)] || self.random.happens(self.noise.lost);
            self.self_times[rank] = if lost { f32::NAN } else { own };
        }
        Row { step: self.step, self_times: &self.self_times, waits: &[], took: slowest * 1.1 }
    }

    fn trouble_of(&mut self, rank: usize) -> f32 {
        if self.step < self.starts {
            return 0.0;
        }
        match self.trouble {
            SlowFault::Rank(slow, by) if slow == rank => by.ln_1p(),
            SlowFault::Host(host, by) if host == self.mesh.host(rank) => by.ln_1p(),
            SlowFault::Stage(stage, by) if stage == self.mesh.stage(rank) => by.ln_1p(),
            SlowFault::Sequences(sigma) => self.random.normals().0 * sigma,
            SlowFault::None | SlowFault::Rank(..) | SlowFault::Host(..) | SlowFault::Stage(..) => 0.0,
        }
    }
}

/// The result of a judge on one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Steps from the start of the trouble to its report; none if it was not reported.
    pub steps: Option<u64>,
    /// False reports.
    pub false_reports: Vec<Straggler>,
}

/// Runs a job of `steps` steps.
pub fn run(mesh: Mesh, noise: Noise, trouble: SlowFault, starts: u64, steps: u64, seed: u64) -> Score {
    let mut job = Job::new(mesh, noise, trouble, starts, seed);
    let mut judge = Judge::new(mesh.peers(), Limits::default());
    let (mut score, mut changes) = (Score::default(), Vec::new());
    for _ in 0..steps {
        changes.clear();
        judge.step(job.advance(), &mut changes);
        for change in changes.drain(..) {
            let Change::Found(found) = change else { continue };
            if found.reported >= starts && is_right(trouble, found.slow, mesh) {
                score.steps.get_or_insert(found.reported - starts + 1);
            } else {
                score.false_reports.push(found);
            }
        }
    }
    score
}

fn is_right(trouble: SlowFault, slow: Slow, mesh: Mesh) -> bool {
    match (trouble, slow) {
        (SlowFault::Rank(rank, _), Slow::Rank(reported)) => rank == reported as usize,
        (SlowFault::Host(host, _), Slow::Host(reported)) => host == reported as usize,
        // Single ranks of the host are reported until enough of them are slow.
        (SlowFault::Host(host, _), Slow::Rank(reported)) => host == mesh.host(reported as usize),
        (SlowFault::Stage(stage, _), Slow::Stage(reported)) => stage == reported as usize,
        (SlowFault::Sequences(_), Slow::Rotating) => true,
        _ => false,
    }
}
