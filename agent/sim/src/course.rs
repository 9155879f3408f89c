//! Step times as in real jobs: noise that is correlated between steps, heavy tails, phases of the whole job, duties
//! of single ranks, warm-up. In each kind of weather no rank is slow, or one rank becomes slow.

use mainstay_progress::straggler::{Change, Judge, Limits, Peers, Row, Slow, Straggler};

use crate::random::Random;

/// Variation of step times without a slow rank. Each kind is added to noise of 1 % and a hiccup in one of 500 steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weather {
    /// Noise of which this share carries over to the next step (first-order autoregressive process).
    Carried(f32),
    /// Noise with heavy tails: Student's t with three degrees of freedom and a scale of 1 %.
    HeavyTails,
    /// Every 150 steps the time of a step changes to 1.5 to 3 times the base, and the noise to 1 % or 3 %.
    Regimes,
    /// Rank 0 saves every N steps, and such a step takes twice as long.
    Duty(u64),
    /// Sequences of different lengths: 10 % from step to step, with the same mean for all ranks.
    Sequences,
    /// Every 97 steps the last rank pauses for a fifth of a step, and in the next step for a tenth.
    Pauses,
    /// The first 30 steps become gradually faster, at a pace that depends on the rank.
    WarmUp,
    /// The last rank takes a third longer in its first five steps.
    LateStart,
    /// Noise of which half carries over, with heavy tails, and hiccups in 2 % of steps.
    Rough,
}

impl Weather {
    /// All kinds. None of them may cause a report.
    pub const ALL: [Weather; 13] = [
        Weather::Carried(0.0),
        Weather::Carried(0.3),
        Weather::Carried(0.5),
        Weather::Carried(0.8),
        Weather::Carried(0.95),
        Weather::HeavyTails,
        Weather::Regimes,
        Weather::Duty(25),
        Weather::Sequences,
        Weather::Pauses,
        Weather::WarmUp,
        Weather::LateStart,
        Weather::Rough,
    ];
}

/// A rank that becomes slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowRank {
    /// The number of the rank.
    pub rank: usize,
    /// Its first slow step.
    pub starts: u64,
    /// The share by which it is slower.
    pub by: f32,
}

/// A job of ranks with equal work.
#[derive(Debug)]
pub struct Course {
    weather: Weather,
    slow: Option<SlowRank>,
    random: Random,
    moods: Vec<f32>,
    /// The phase of the whole job: its pace and its noise.
    phase: (f32, f32),
    step: u64,
    self_times: Vec<f32>,
}

impl Course {
    /// A job before its first step.
    pub fn new(ranks: usize, weather: Weather, slow: Option<SlowRank>, seed: u64) -> Course {
        let mut random = Random::new(seed);
        let moods = (0..ranks).map(|_| random.normals().0).collect();
        Course { weather, slow, random, moods, phase: (1.0, 1.0), step: 0, self_times: vec![0.0; ranks] }
    }

    /// Computes the next step: the own time of each rank, and the length of the step, which is that of the slowest
    /// rank.
    pub fn advance(&mut self) -> Row<'_> {
        self.step += 1;
        if self.weather == Weather::Regimes && self.step.is_multiple_of(150) {
            let noise = if self.random.happens(0.5) { 3.0 } else { 1.0 };
            self.phase = (1.5 + 1.5 * self.random.unit(), noise);
        }
        let mut longest = 0.0_f32;
        for rank in 0..self.self_times.len() {
            let own = self.phase.0 * self.excess(rank).exp();
            longest = longest.max(own);
            self.self_times[rank] = own;
        }
        Row { step: self.step, self_times: &self.self_times, waits: &[], took: longest }
    }

    fn excess(&mut self, rank: usize) -> f32 {
        let (last, step) = (self.moods.len() - 1, self.step);
        let hiccups = if self.weather == Weather::Rough { 0.02 } else { 0.002 };
        let mut excess = self.noise(rank) * 0.01 * self.phase.1;
        if self.random.happens(hiccups) {
            excess += 0.2 + self.random.unit();
        }
        excess += match self.weather {
            Weather::Duty(every) if rank == 0 && step.is_multiple_of(every) => 0.7,
            Weather::Sequences => self.random.normals().0 * 0.1,
            Weather::Pauses if rank == last && step % 97 == 0 => 0.2,
            Weather::Pauses if rank == last && step % 97 == 1 => 0.1,
            Weather::WarmUp => 0.5 * (-(step as f32) / (4.0 + (rank % 3) as f32)).exp(),
            Weather::LateStart if rank == last && step <= 5 => 0.3,
            _ => 0.0,
        };
        match self.slow {
            Some(slow) if slow.rank == rank && step >= slow.starts => excess + slow.by.ln_1p(),
            _ => excess,
        }
    }

    /// Noise in units of its usual size.
    fn noise(&mut self, rank: usize) -> f32 {
        let carried = match self.weather {
            Weather::Carried(share) => share,
            Weather::Rough => 0.5,
            _ => 0.0,
        };
        let (fresh, other) = self.random.normals();
        let fresh = match self.weather {
            Weather::HeavyTails | Weather::Rough => {
                let (third, fourth) = self.random.normals();
                fresh / ((other * other + third * third + fourth * fourth) / 3.0).sqrt()
            }
            _ => fresh,
        };
        let mood = &mut self.moods[rank];
        *mood = carried * *mood + (1.0 - carried * carried).sqrt() * fresh;
        *mood
    }
}

/// The reports of a judge on a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimulationResult {
    /// Steps from when the rank became slow until it was reported; none if it was not.
    pub after: Option<u64>,
    /// The first correct report.
    pub right: Option<Straggler>,
    /// False reports.
    pub wrong: Vec<Straggler>,
}

/// Runs a job of `steps` steps. For sequences of different lengths, a report of rotating slowness is correct.
pub fn run(
    ranks: usize,
    weather: Weather,
    slow: Option<SlowRank>,
    steps: u64,
    seed: u64,
) -> SimulationResult {
    let mut job = Course::new(ranks, weather, slow, seed);
    let mut judge = Judge::new(Peers::alike(ranks), Limits::default());
    let (mut reported, mut changes) = (SimulationResult::default(), Vec::new());
    for _ in 0..steps {
        judge.step(job.advance(), &mut changes);
        for change in changes.drain(..) {
            let Change::Found(found) = change else { continue };
            let started = slow.filter(|slow| found.reported >= slow.starts);
            if let Some(slow) = started.filter(|slow| found.slow == Slow::Rank(slow.rank as u32)) {
                reported.after.get_or_insert(found.reported - slow.starts + 1);
                reported.right.get_or_insert(found);
            } else if !(weather == Weather::Sequences && found.slow == Slow::Rotating) {
                reported.wrong.push(found);
            }
        }
    }
    reported
}
