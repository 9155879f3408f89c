//! What one pass over a source finds: signatures, exceptions and progress lines, each with its place.

use std::collections::BTreeSet;

use super::super::class::Class;
use super::super::traceback::Frame;
use super::super::words::Word;
use crate::model::entry::LineTime;

/// A line after which so many healthy steps were done is no cause of the failure.
pub const HEALTHY_STEPS: u64 = 2;

/// Where a text comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// What ranks or their launcher printed.
    #[default]
    Log,
    /// What the kernel said.
    Kernel,
    /// What is known about exits, in words.
    Exit,
}

/// A signature in a source.
#[derive(Clone, Debug)]
pub struct Sighting {
    /// Its place in `Catalog::signatures`.
    pub signature: usize,
    /// Where it was seen, at most the first few.
    pub spots: Vec<Spot>,
    /// How often it was seen in all.
    pub count: u64,
    /// Ranks that told it.
    pub ranks: BTreeSet<u32>,
}

/// A line that matters.
#[derive(Clone, Debug, PartialEq)]
pub struct Spot {
    /// Its number in its source, from 1.
    pub line: u64,
    /// The rank that wrote it or of which it speaks.
    pub rank: Option<u32>,
    /// Time of day, seconds, where the line has one.
    pub time: Option<f64>,
    /// It stands in a warning or a note.
    pub mild: bool,
    /// When the launcher first saw the line, where it read it from a living rank.
    pub seen: Option<LineTime>,
    /// Steps that were surely begun and completed after the line; none where no progress is known.
    pub steps_after: Option<u64>,
    /// It stands in a traceback that a logger wrote below a message: the exception was caught.
    pub logged: bool,
    /// The line itself, cleaned and shortened.
    pub text: String,
}

impl Spot {
    /// Whether training went on in good order after the line.
    pub fn is_past(&self) -> bool {
        // An exception that was caught and logged needs no second step to be over.
        let least = if self.logged { 1 } else { HEALTHY_STEPS };
        self.steps_after.is_some_and(|steps| steps >= least)
    }
}

/// A line that reports a completed step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Its number in its source, from 1.
    pub line: u64,
    /// Time of day, seconds, where the line has one.
    pub time: Option<f64>,
    /// The number of the step, where the line names it.
    pub step: Option<u64>,
}

/// An exception in a source.
#[derive(Clone, Debug)]
pub struct Exception {
    /// Its type with modules.
    pub name: String,
    /// Where it stands.
    pub spot: Spot,
    /// The innermost frame of its traceback.
    pub frame: Option<Frame>,
    /// The line tells more before it.
    pub embedded: bool,
    /// A signature knows the line better.
    pub known: bool,
}

/// How likely each class is, in the order of [`Class::ALL`].
pub type Opinion = [f64; Class::ALL.len()];

/// What was found in one source.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// The source's name: a file.
    pub source: String,
    /// The rank whose output it is, where that is known.
    pub rank: Option<u32>,
    /// What kind of text it is.
    pub kind: Kind,
    /// It is what ended the rank, by the rank's own exit note: no text around it can be meant.
    pub ended: bool,
    /// Signatures, in the order of their first sighting.
    pub sightings: Vec<Sighting>,
    /// Exceptions, in order.
    pub exceptions: Vec<Exception>,
    /// The last line that complains and that nothing explains.
    pub unexplained: Option<Spot>,
    /// Of the lines that nothing explains the one whose words say most, with what they speak for.
    pub words: Option<(Spot, Opinion)>,
    /// All words that say something: of a small text those of all lines, of a large one those of the lines that matter.
    pub vocabulary: BTreeSet<Word>,
    /// Lines that report completed steps, in order.
    pub progress: Vec<Progress>,
    /// Lines read.
    pub lines: u64,
    /// Bytes read.
    pub bytes: u64,
}
