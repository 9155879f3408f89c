//! One piece of evidence and the classes that it supports.

use super::catalog::{Determinism, Role};
use super::class::{Class, Restart};
use super::scan::RelevantLine;
use mainstay_model::verdict::FaultDomain;

/// One piece of evidence.
#[derive(Clone, Debug)]
pub struct Vote {
    /// Evidence of one family counts once.
    pub family: String,
    /// The id of the signature or of another kind of evidence.
    pub id: String,
    /// What it means, in words.
    pub meaning: String,
    /// Cause or consequence.
    pub role: Role,
    /// The class that it supports most.
    pub class: Class,
    /// Log-odds for that class.
    pub weight: f64,
    /// Other classes with their log-odds.
    pub also: Vec<(Class, f64)>,
    /// Whether the failure repeats.
    pub determinism: Determinism,
    /// What to do, if the evidence determines it.
    pub restart: Option<Restart>,
    /// Whose fault, if different from the default of the class.
    pub domain: Option<FaultDomain>,
    /// The rank that prints it reports the fault of another.
    pub reporter: bool,
    /// It only repeats that a signal ended a process, without the reason.
    pub signal: bool,
    /// Only a hint from a line that no signature explains.
    pub hint: bool,
    /// Where it was seen: the index of the source in the evidence, and the lines.
    pub spots: Vec<(usize, RelevantLine)>,
    /// The number of sightings.
    pub count: u64,
}

impl Vote {
    /// A cause without lines of a log, with the defaults of its class.
    pub fn new(family: &str, id: &str, meaning: impl Into<String>, (class, weight): (Class, f64)) -> Vote {
        Vote {
            family: family.to_owned(),
            id: id.to_owned(),
            meaning: meaning.into(),
            role: Role::Primary,
            class,
            weight,
            also: Vec::new(),
            determinism: Determinism::Either,
            restart: None,
            domain: None,
            reporter: false,
            signal: false,
            hint: false,
            spots: Vec::new(),
            count: 1,
        }
    }

    /// The source and the line of each sighting.
    pub fn lines(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.spots.iter().map(|(source, spot)| (*source, spot.line))
    }

    /// All classes that it supports.
    pub fn classes(&self) -> impl Iterator<Item = (Class, f64)> + '_ {
        std::iter::once((self.class, self.weight)).chain(self.also.iter().copied())
    }
}
