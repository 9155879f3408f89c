//! The language of policies: the statements, expressions and types of Starlark that a decision needs. What is not
//! supported is refused with a hint on the alternative. What is supported has the same meaning as in any other
//! Starlark.
//!
//! Each step and each byte is counted before it is used, and the nesting depth is limited: a policy that does not
//! end, or uses too much, is stopped with an error at its line.

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

/// The longest file, in bytes; no person writes a longer one.
const LONGEST: usize = 256 * 1024;

/// A place in a file; line and column count from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: u32,
    /// The column, in bytes.
    pub column: u32,
}

/// An error in a policy and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The place.
    pub place: Place,
    /// The error, and what would be right.
    pub what: String,
}

impl Fault {
    pub(crate) fn at(place: Place, what: impl Into<String>) -> Fault {
        Fault { place, what: what.into() }
    }
}

/// A condition of an `if` that was evaluated before a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Its line.
    pub line: u32,
    /// Whether it was met.
    pub met: bool,
}

/// The limits of one decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Steps: each part of an expression is one.
    pub steps: u64,
    /// Memory in bytes, counted when it is allocated and never returned.
    pub bytes: u64,
}

/// Functions of a policy in addition to those of the language.
pub(crate) trait Host {
    /// Their names.
    fn names(&self) -> &'static [&'static str];
    /// Calls one; none if there is no function of this name.
    fn call(&self, name: &str, given: &Arguments, place: Place, heap: &mut Heap<'_>) -> Option<Made<Value>>;
}

/// Parses a file.
pub(crate) fn parse(text: &str) -> Result<Module, Fault> {
    if text.len() > LONGEST {
        let kib = LONGEST / 1024;
        return Err(Fault::at(Place { line: 1, column: 1 }, format!("a policy is at most {kib} KiB long")));
    }
    parser::parse(text)
}

/// The names of the fields that a file reads, with their places: those after a dot.
pub(crate) fn fields_read(text: &str) -> Result<Vec<(String, Place)>, Fault> {
    let tokens = lexer::tokens(text)?;
    let after_dot = tokens.windows(2).filter(|pair| pair[0].0 == lexer::Token::Sign("."));
    let named = after_dot.filter_map(|pair| match &pair[1] {
        (lexer::Token::Name(name), place) => Some((name.clone(), *place)),
        _ => None,
    });
    Ok(named.collect())
}
