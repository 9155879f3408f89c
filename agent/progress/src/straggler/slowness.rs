//! The findings of the judge of stragglers.

/// What is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slow {
    /// A rank and its device, by the rank's index.
    Rank(u32),
    /// All ranks of a host.
    Host(u32),
    /// A pipeline stage has more work than the others.
    Stage(u32),
    /// Another rank in each step: the work is uneven, and differently each time.
    Rotating,
}

/// Something that makes the job slower.
#[derive(Clone, Debug, PartialEq)]
pub struct Straggler {
    /// What is slow.
    pub slow: Slow,
    /// Time relative to the peers: 1.3 is 30 % slower. For [`Slow::Rotating`], that of the slowest rank in a typical
    /// step.
    pub ratio: f32,
    /// The first slow step, as far as remembered.
    pub since: u64,
    /// Whether it started after the job did: the rank became slow.
    pub onset_seen: bool,
    /// The step at which it was reported.
    pub reported: u64,
    /// The number of steps that this is based on.
    pub steps: u32,
    /// How much shorter a step would be without it, from 0 to 1. `None` if the length of a step is unknown.
    pub cost: Option<f32>,
    /// The excess over the peers in standard deviations.
    pub z: f32,
    /// The noise of a score.
    pub noise: f32,
    /// The share of steps in which it waited least. `None` if waiting is unknown.
    pub waited_least: Option<f32>,
    /// The number of ranks that it was compared with.
    pub peers: u32,
    /// Median self times of the stages in seconds, if they were compared.
    pub stages: Vec<(u32, f32)>,
    /// The confidence, from 0 to 1.
    pub confidence: f32,
    /// The usual score, from which the excess is counted.
    pub usual: f32,
}

/// A change in what is slow.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Something is slow.
    Found(Straggler),
    /// It is no longer slow, since this step.
    Over {
        /// What was slow.
        slow: Slow,
        /// The step since which it is over.
        since: u64,
        /// The step at which that was reported.
        reported: u64,
    },
}
