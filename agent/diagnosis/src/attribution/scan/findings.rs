//! The result of scanning a source: signatures, exceptions and progress lines, each with its position.

use std::collections::BTreeSet;

use super::super::traceback::Frame;
use mainstay_model::entry::LineTime;

/// A line that is followed by this many healthy steps is no cause of the failure.
pub const MIN_HEALTHY_STEPS: u64 = 2;

/// The kind of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Output of ranks or their launcher.
    #[default]
    Log,
    /// Kernel log lines.
    Kernel,
    /// Exit information in words.
    Exit,
}

/// A signature in a source.
#[derive(Clone, Debug)]
pub struct SignatureMatch {
    /// Its index in `Catalog::signatures`.
    pub signature: usize,
    /// Where it was seen: only the first and last sightings.
    pub spots: Vec<RelevantLine>,
    /// The total number of sightings.
    pub count: u64,
    /// Ranks that reported it.
    pub ranks: BTreeSet<u32>,
}

/// A relevant line.
#[derive(Clone, Debug, PartialEq)]
pub struct RelevantLine {
    /// Its number in its source, from 1.
    pub line: u64,
    /// The rank that wrote the line or that it is about.
    pub rank: Option<u32>,
    /// The same without a launcher's label of the line and without numbers of tasks.
    pub rank_without_label: Option<u32>,
    /// Time of day in seconds, if the line has one.
    pub time: Option<f64>,
    /// It is in a warning or a note.
    pub mild: bool,
    /// When the launcher first saw the line, if it read it from a running rank.
    pub line_time: Option<LineTime>,
    /// Steps that certainly started and completed after the line. `None` if no progress is known.
    pub steps_after: Option<u64>,
    /// The rank that wrote the line completed a step after it.
    pub stepped: bool,
    /// It is in a traceback that a logger wrote below a message: the exception was caught.
    pub logged: bool,
    /// The line itself, cleaned and shortened.
    pub text: String,
}

impl RelevantLine {
    /// Whether training continued normally after the line.
    pub fn is_past(&self) -> bool {
        // For an exception that was caught and logged, one step of that rank is enough.
        self.logged && self.stepped || self.steps_after.is_some_and(|steps| steps >= MIN_HEALTHY_STEPS)
    }
}

/// A line that reports a completed step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Its number in its source, from 1.
    pub line: u64,
    /// The rank in the line's prefix.
    pub rank: Option<u32>,
    /// Time of day in seconds, if the line has one.
    pub time: Option<f64>,
    /// The number of the step, if the line has one.
    pub step: Option<u64>,
}

/// An exception in a source.
#[derive(Clone, Debug)]
pub struct Exception {
    /// Its type with modules.
    pub name: String,
    /// Where it is.
    pub spot: RelevantLine,
    /// The innermost frame of its traceback.
    pub frame: Option<Frame>,
    /// The line has other text before it.
    pub embedded: bool,
    /// A signature explains the line better.
    pub known: bool,
}

/// What was found in one source.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// The source's name: a file.
    pub source: String,
    /// The rank whose output it is, if known.
    pub rank: Option<u32>,
    /// What kind of text it is.
    pub kind: Kind,
    /// The text is the rank's own exit note: it is what ended the rank, not an unrelated line nearby.
    pub ended: bool,
    /// Signatures, in the order of their first sighting.
    pub sightings: Vec<SignatureMatch>,
    /// Exceptions, in order.
    pub exceptions: Vec<Exception>,
    /// The last line that reports a problem and that nothing explains.
    pub unexplained: Option<RelevantLine>,
    /// The ranks in the launcher's table of failures.
    pub in_table: BTreeSet<u32>,
    /// Lines that report completed steps, in order.
    pub progress: Vec<Progress>,
    /// Lines read.
    pub lines: u64,
    /// Bytes read.
    pub bytes: u64,
}
