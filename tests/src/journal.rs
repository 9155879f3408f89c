//! A journal as a list of entries, and queries on it.

use std::fs;
use std::path::{Path, PathBuf};

use mainstay_model::entry::{Body, Entry, ExitStatus, Fact};
use mainstay_model::id::Rank;
use mainstay_model::observation::Observation;
use mainstay_model::verdict::{Decision, Outcome, Verdict};

/// All entries of the journal in a directory, in order; an incomplete line is not an entry yet.
pub fn read(directory: &Path) -> Vec<Entry> {
    let Ok(files) = fs::read_dir(directory) else { return Vec::new() };
    let mut segments: Vec<PathBuf> = files.flatten().map(|file| file.path()).collect();
    segments.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    segments.sort();
    let mut entries = Vec::new();
    for segment in segments {
        let text = fs::read_to_string(&segment).unwrap_or_default();
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let entry = serde_json::from_str(line);
            entries.push(entry.unwrap_or_else(|error| panic!("{}: {error}: {line}", segment.display())));
        }
    }
    entries
}

/// The facts, in order.
pub fn facts(journal: &[Entry]) -> impl Iterator<Item = &Fact> {
    journal.iter().filter_map(|entry| match &entry.body {
        Body::Fact(fact) => Some(fact),
        _ => None,
    })
}

/// The observed events with this identifier, in order.
pub fn observed<'a>(journal: &'a [Entry], event: &'a str) -> impl Iterator<Item = &'a Observation> {
    facts(journal).filter_map(move |fact| match fact {
        Fact::Observed(seen) if seen.event == event => Some(seen),
        _ => None,
    })
}

/// The verdicts, in order.
pub fn verdicts(journal: &[Entry]) -> Vec<&Verdict> {
    journal
        .iter()
        .filter_map(|entry| if let Body::Verdict(verdict) = &entry.body { Some(verdict) } else { None })
        .collect()
}

/// The decisions, in order.
pub fn decisions(journal: &[Entry]) -> Vec<&Decision> {
    journal
        .iter()
        .filter_map(|entry| if let Body::Decision(decision) = &entry.body { Some(decision) } else { None })
        .collect()
}

/// How many restarts were decided.
pub fn restarts(journal: &[Entry]) -> usize {
    let restart = |decision: &&&Decision| decision.action.attempt().is_some();
    decisions(journal).iter().filter(restart).count()
}

/// The outcomes, in order.
pub fn outcomes(journal: &[Entry]) -> Vec<&Outcome> {
    journal
        .iter()
        .filter_map(|entry| if let Body::Outcome(outcome) = &entry.body { Some(outcome) } else { None })
        .collect()
}

/// How a rank's process ended, by attempt.
pub fn exits(journal: &[Entry], of: u32) -> Vec<ExitStatus> {
    facts(journal)
        .filter_map(|fact| match fact {
            Fact::RankExited { rank, status, .. } if *rank == Rank(of) => Some(*status),
            _ => None,
        })
        .collect()
}

/// A story for a person: one line per entry.
pub fn reported(journal: &[Entry]) -> String {
    let line = |entry: &Entry| match &entry.body {
        Body::Health(_) => None,
        body => Some(format!("{:>6} {body:?}", entry.seq)),
    };
    journal.iter().filter_map(line).collect::<Vec<String>>().join("\n")
}
