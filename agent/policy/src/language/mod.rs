//! The language of policies: Starlark's statements, expressions and types, as far as a decision needs them. What it has not,
//! it refuses with a word on what to do instead; what it has means the same as in any other Starlark.
//!
//! Each step and each byte is counted before it is taken, and nothing is as deep as the stack: a policy that does not end,
//! or wants too much, ends with an error at its line.

mod builtins;
mod eval;
mod lexer;
mod parser;
mod tree;
mod value;

pub(crate) use builtins::Arguments;
pub(crate) use eval::Run;
pub(crate) use tree::Module;
pub(crate) use value::{Heap, Made, Value};

/// A longer file is none that a person wrote.
const LONGEST: usize = 256 * 1024;

/// A place in a file; both count from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: u32,
    /// The column, in bytes.
    pub column: u32,
}

/// What is wrong with a policy, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub place: Place,
    /// What, and what would be right.
    pub what: String,
}

impl Fault {
    pub(crate) fn at(place: Place, what: impl Into<String>) -> Fault {
        Fault { place, what: what.into() }
    }
}

/// A condition of an `if` that was met or not on the way to a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Where it stands.
    pub line: u32,
    /// Whether it was met.
    pub met: bool,
}

/// What one decision may use up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Steps: each part of an expression is one.
    pub steps: u64,
    /// Memory in bytes, counted when it is taken and not given back.
    pub bytes: u64,
}

/// Functions that a policy finds beside those of the language.
pub(crate) trait Host {
    /// Their names.
    fn names(&self) -> &'static [&'static str];
    /// Calls one; none if it is not of these.
    fn call(&self, name: &str, given: &Arguments, place: Place, heap: &mut Heap<'_>) -> Option<Made<Value>>;
}

/// Reads a file.
pub(crate) fn parse(text: &str) -> Result<Module, Fault> {
    if text.len() > LONGEST {
        let kib = LONGEST / 1024;
        return Err(Fault::at(Place { line: 1, column: 1 }, format!("a policy is at most {kib} KiB long")));
    }
    parser::parse(text)
}
