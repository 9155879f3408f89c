//! One piece of evidence and what it speaks for.

use super::catalog::{Determinism, Role};
use super::class::{Class, Restart};
use super::scan::Spot;
use crate::model::verdict::FaultDomain;

/// What votes of learned words are named.
pub(super) const WORDS_ID: &str = "words";

/// One piece of evidence.
#[derive(Clone, Debug)]
pub struct Vote {
    /// Evidence of one family counts once.
    pub family: String,
    /// Name of the signature, or what else it is.
    pub id: String,
    /// What it means, in words.
    pub meaning: String,
    /// Cause or consequence.
    pub role: Role,
    /// The class it speaks for first, its log-odds with it.
    pub class: Class,
    /// Log-odds for that class.
    pub weight: f64,
    /// Other classes, with theirs.
    pub also: Vec<(Class, f64)>,
    /// Whether it comes again.
    pub determinism: Determinism,
    /// What to do, where the evidence says so itself.
    pub restart: Option<Restart>,
    /// Whose fault, where it is not what the class says.
    pub domain: Option<FaultDomain>,
    /// The rank that prints it tells of another's fault.
    pub reporter: bool,
    /// It only repeats that a signal ended a process, and not why.
    pub signal: bool,
    /// Only a hint, from the words of a line that no signature explains.
    pub hint: bool,
    /// Where it was seen: the source's place in the evidence, and the lines.
    pub spots: Vec<(usize, Spot)>,
    /// How often.
    pub count: u64,
}

impl Vote {
    /// All classes that it speaks for.
    pub fn classes(&self) -> impl Iterator<Item = (Class, f64)> + '_ {
        std::iter::once((self.class, self.weight)).chain(self.also.iter().copied())
    }

    /// Whether it rests on nothing but what words were learned to speak for.
    pub fn is_of_words(&self) -> bool {
        self.id == WORDS_ID
    }
}
