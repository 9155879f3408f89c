//! How step times of real jobs run on: moods that are carried from step to step, heavy tails, phases of the whole job, duties of single
//! ranks, beginnings. Each is a kind of weather in which nobody is slow, or in which one rank becomes so.

use mainstay_core::progress::straggler::{Change, Found, Judge, Limits, Peers, Row, Slow};

use crate::random::Random;

/// What scatters step times though nobody is slow. Each on top of noise of 1 % and a hiccup in one of 500 steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weather {
    /// Noise of which this share is carried over to the next step (an autoregressive process of the first order).
    Carried(f32),
    /// Noise with heavy tails: Student's t with three degrees of freedom, 1 % its scale.
    HeavyTails,
    /// Every 150 steps the whole job becomes 1.5 to 3 times as slow or fast, and its noise 1 % or 3 %.
    Regimes,
    /// Rank 0 saves every so many steps, and takes twice as long for it.
    Duty(u64),
    /// Sequences of different lengths: 10 % from step to step, the same on average for all ranks.
    Sequences,
    /// The last rank pauses every 97 steps for a fifth of a step, and the step after for a tenth.
    Pauses,
    /// The first 30 steps become faster by and by, each rank at a pace of its own.
    WarmUp,
    /// One rank takes a third longer in its first five steps.
    LateStart,
    /// Carried noise of a half, with heavy tails and hiccups in 2 % of steps.
    Rough,
}

impl Weather {
    /// All kinds, for which nothing may be told.
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
    /// Which one.
    pub rank: usize,
    /// Its first slow step.
    pub starts: u64,
    /// The share by which it takes longer.
    pub by: f32,
}

/// A job of ranks that do the same.
#[derive(Debug)]
pub struct Course {
    weather: Weather,
    slow: Option<SlowRank>,
    random: Random,
    moods: Vec<f32>,
    /// Phase of the whole job: its pace and how noisy it is.
    phase: (f32, f32),
    step: u64,
    self_times: Vec<f32>,
}

impl Course {
    /// A job that has not begun.
    pub fn new(ranks: usize, weather: Weather, slow: Option<SlowRank>, seed: u64) -> Course {
        let mut random = Random::new(seed);
        let moods = (0..ranks).map(|_| random.normals().0).collect();
        Course { weather, slow, random, moods, phase: (1.0, 1.0), step: 0, self_times: vec![0.0; ranks] }
    }

    /// The next step: each rank's own time, and the step's length, which is that of the slowest.
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

/// What a judge told of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimulationResult {
    /// Steps from when the rank became slow until it was told; none if it was not.
    pub after: Option<u64>,
    /// What was told of it first.
    pub right: Option<Found>,
    /// What was told and is not so.
    pub wrong: Vec<Found>,
}

/// Runs a job of so many steps. Uneven work is told rightly where sequences have different lengths.
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
