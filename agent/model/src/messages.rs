//! Messages between launcher and agent in the journal's form: entries, verdicts, host evidence, slowdown hints.
//!
//! The sender may have another version, or may not be ours at all: an invalid part is reported by its name.

use serde::de::DeserializeOwned;

use crate::entry::Entry;
use crate::health::Component;
use crate::host_context::FailedBefore;
use crate::repeats::SeenBefore;
use crate::slowdown_hints::SlowdownHints;
use crate::verdict::Verdict;

/// A part that is not in the journal's form, or of an unsupported version.
#[derive(Debug, thiserror::Error)]
#[error("{what} cannot be read: {source}")]
pub struct FormError {
    /// The part.
    pub what: &'static str,
    /// The parse error.
    pub source: serde_json::Error,
}

fn read<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T, FormError> {
    serde_json::from_str(text).map_err(|source| FormError { what, source })
}

/// Parses an entry of a launcher's journal.
///
/// # Errors
/// It is not an entry of this version.
pub fn entry(line: &str) -> Result<Entry, FormError> {
    read("an entry", line)
}

/// Parses a launcher's verdict on a failure.
///
/// # Errors
/// It is not of this version.
pub fn verdict(text: &str) -> Result<Verdict, FormError> {
    read("a verdict", text)
}

/// Parses an unhealthy component of the host.
///
/// # Errors
/// It is not of this version.
pub fn component(text: &str) -> Result<Component, FormError> {
    read("a component", text)
}

/// Parses the record of a device's earlier faults.
///
/// # Errors
/// It is not of this version.
pub fn record(text: &str) -> Result<FailedBefore, FormError> {
    read("a device's record", text)
}

/// Parses earlier failures with the fingerprint of a failure.
///
/// # Errors
/// It is not of this version.
pub fn seen_before(text: &str) -> Result<SeenBefore, FormError> {
    read("earlier failures", text)
}

/// Parses the slowdown hints of a job's ranks.
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
    fn an_invalid_part_is_reported_by_its_name() {
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
