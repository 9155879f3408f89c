//! What launcher and agent say to each other in the journal's own form: entries, verdicts, host evidence, slowdown hints.
//!
//! The other end may be of another version, or not ours at all: what is not understood is said to be so, by its part.

use serde::de::DeserializeOwned;

use crate::model::entry::Entry;
use crate::model::health::Component;
use crate::model::host_context::FailedBefore;
use crate::model::repeats::SeenBefore;
use crate::model::slowdown_hints::SlowdownHints;
use crate::model::verdict::Verdict;

/// A part that is not in the journal's form, or of a version that is not understood.
#[derive(Debug, thiserror::Error)]
#[error("{what} cannot be read: {source}")]
pub struct FormError {
    /// Which part.
    pub what: &'static str,
    /// What is wrong.
    pub source: serde_json::Error,
}

fn read<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T, FormError> {
    serde_json::from_str(text).map_err(|source| FormError { what, source })
}

/// An entry of a launcher's journal.
///
/// # Errors
/// It is not an entry of this version.
pub fn entry(line: &str) -> Result<Entry, FormError> {
    read("an entry", line)
}

/// How a launcher judges a failure.
///
/// # Errors
/// It is not of this version.
pub fn verdict(text: &str) -> Result<Verdict, FormError> {
    read("a verdict", text)
}

/// A component of the host that is not well.
///
/// # Errors
/// It is not of this version.
pub fn component(text: &str) -> Result<Component, FormError> {
    read("a component", text)
}

/// What is known of a device's earlier faults.
///
/// # Errors
/// It is not of this version.
pub fn record(text: &str) -> Result<FailedBefore, FormError> {
    read("a device's record", text)
}

/// Earlier failures with the fingerprint of a failure.
///
/// # Errors
/// It is not of this version.
pub fn seen_before(text: &str) -> Result<SeenBefore, FormError> {
    read("earlier failures", text)
}

/// What surrounds a job's ranks.
///
/// # Errors
/// It is not of this version.
pub fn rank_context(text: &str) -> Result<SlowdownHints, FormError> {
    read("what surrounds the ranks", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_said_by_its_part() {
        let check = |error: FormError, part: &str| {
            assert!(error.to_string().starts_with(&format!("{part} cannot be read: ")), "{error}");
        };
        check(entry("{}").unwrap_err(), "an entry");
        check(verdict("{}").unwrap_err(), "a verdict");
        check(component("").unwrap_err(), "a component");
        check(record("null").unwrap_err(), "a device's record");
        check(rank_context("[1]").unwrap_err(), "what surrounds the ranks");
    }
}
