//! What the judge of stragglers tells.

/// Who or what is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slow {
    /// A rank and its device, by the rank's index.
    Rank(u32),
    /// All ranks of a host.
    Host(u32),
    /// A pipeline stage has more work than the others.
    Stage(u32),
    /// Another rank in each step: the work is spread unevenly, and differently each time.
    Rotating,
}

/// Something that makes the job slower.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Who or what.
    pub slow: Slow,
    /// Time relative to the peers: 1.3 is 30 % slower. For [`Slow::Rotating`], of the slowest rank of a step, typically.
    pub ratio: f32,
    /// The first step at which it was so, as far as it is remembered.
    pub since: u64,
    /// Whether it began after the job did: the rank became slow.
    pub onset_seen: bool,
    /// The step at which it was told.
    pub reported: u64,
    /// How many steps that rests on.
    pub steps: u32,
    /// How much shorter a step would be without it, from 0 to 1; none if the length of a step is not known.
    pub cost: Option<f32>,
    /// By how many times its own uncertainty it exceeds the peers.
    pub z: f32,
    /// The noise of a score.
    pub noise: f32,
    /// In which share of steps it waited least of all; none if waiting is not known.
    pub waited_least: Option<f32>,
    /// With how many ranks it was compared.
    pub peers: u32,
    /// Median self times of the stages in seconds, where that was looked at.
    pub stages: Vec<(u32, f32)>,
    /// From 0 to 1.
    pub confidence: f32,
    /// The score that counts as usual: what the excess is counted from.
    pub usual: f32,
}

/// A change of what is known to be slow.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Something is slow.
    Found(Found),
    /// It is no longer slow, since this step.
    Over {
        /// What was found before.
        slow: Slow,
        /// Since when.
        since: u64,
        /// When that was told.
        reported: u64,
    },
}
