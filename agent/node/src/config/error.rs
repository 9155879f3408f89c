//! Errors of a configuration.

use std::path::PathBuf;

/// A configuration that is refused, with all its problems.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    /// At least one.
    pub problems: Vec<Problem>,
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where the value is.
    pub origin: Origin,
    /// The key that it is about, if any.
    pub key: Option<String>,
    /// What is wrong and what would be right.
    pub what: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.key {
            Some(key) => write!(f, "{}: {key}: {}", self.origin, self.what),
            None => write!(f, "{}: {}", self.origin, self.what),
        }
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file, and its line if known.
    File {
        /// Its path.
        path: PathBuf,
        /// Counted from 1.
        line: Option<usize>,
    },
    /// An environment variable.
    Environment(String),
    /// The command line.
    CommandLine,
    /// Several values together.
    Together,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::File { path, line: Some(line) } => write!(f, "{}:{line}", path.display()),
            Origin::File { path, line: None } => write!(f, "{}", path.display()),
            Origin::Environment(name) => write!(f, "environment variable {name}"),
            Origin::CommandLine => write!(f, "command line"),
            Origin::Together => write!(f, "configuration"),
        }
    }
}
