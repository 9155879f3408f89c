//! Whose fault a failed attempt was: what its ranks said and how they ended, put before the attribution.

use std::collections::BTreeMap;

use crate::attribute::catalog::{Catalog, Determinism};
use crate::attribute::class::Class;
use crate::attribute::exit::{Exit, Status};
use crate::attribute::scan::{Findings, Kind, Scan};
use crate::attribute::{Attribution, Evidence, attribute};
use crate::entry::{ExitStatus, Note};
use crate::id::Rank;
use crate::judge::RankEnd;
use crate::verdict::{FaultDomain, Verdict};

/// Lines of evidence that a verdict quotes.
const QUOTED: usize = 3;

/// Completes the verdict with what the words of the ranks that failed of their own say. A verdict on which they
/// say nothing stays as it is.
pub fn complete(verdict: &mut Verdict, catalog: &Catalog, ends: &BTreeMap<Rank, RankEnd>) {
    let judged = attribute(catalog, &evidence(catalog, ends));
    if judged.class == Class::Unknown || judged.domain == FaultDomain::Unknown {
        return;
    }
    verdict.domain = judged.domain;
    verdict.class = Some(judged.class.name().to_owned());
    verdict.deterministic = judged.determinism == Determinism::Deterministic;
    verdict.confidence = judged.confidence;
    verdict.evidence.extend(grounds(&judged));
}

fn evidence(catalog: &Catalog, ends: &BTreeMap<Rank, RankEnd>) -> Evidence {
    let failed = ends.iter().filter(|(_, end)| end.failed());
    let mut evidence = Evidence::default();
    let mut deaths: Vec<(&Rank, &RankEnd)> = failed.collect();
    deaths.sort_by_key(|(rank, end)| (end.failed_at(), **rank));
    for (order, (rank, end)) in deaths.into_iter().enumerate() {
        evidence.findings.push(words(catalog, *rank, end));
        // A rank that raised was stopped by us on its way out: its status says nothing.
        if let (None, Some((status, _))) = (&end.note, end.exit) {
            let status = match status {
                ExitStatus::Code(code) => Status::Code(code),
                ExitStatus::Signal(signal) => Status::Signal(signal),
            };
            evidence.exits.push(Exit { rank: Some(rank.0), status, order: u32::try_from(order).ok() });
        }
    }
    evidence
}

/// What a rank said last: its exit note, which is whole, or else the end of its standard error.
fn words(catalog: &Catalog, rank: Rank, end: &RankEnd) -> Findings {
    let text = match &end.note {
        Some(note) => text_of(note),
        None => end.stderr_tail.join("\n"),
    };
    Scan::of_text(catalog, "last words", Some(rank.0), Kind::default(), text.as_bytes())
}

/// The traceback as Python prints it: with the exception as its last line.
fn text_of(note: &Note) -> String {
    let exception = note.exception.strip_prefix("builtins.").unwrap_or(&note.exception);
    let last = format!("{exception}: {}", note.message);
    if note.traceback.contains(&last) {
        note.traceback.clone()
    } else {
        format!("{}\n{last}", note.traceback)
    }
}

fn grounds(judged: &Attribution) -> Vec<String> {
    judged
        .evidence
        .iter()
        .take(QUOTED)
        .map(|vote| match vote.spots.first() {
            Some((_, spot)) => format!("{}: {}", vote.meaning, spot.text.trim()),
            None => vote.meaning.clone(),
        })
        .collect()
}
