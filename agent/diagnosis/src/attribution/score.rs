//! Evaluates attribution on labelled cases: one JSON object per line, with the schema in `docs/reference/attribution.md`. Pure: takes
//! parsed cases and returns numbers.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

pub use super::case::{Case, Label, LogFile};

use super::catalog::Catalog;
use super::class::{Class, Restart};
use super::scan::{Kind, Scan};
use super::{Attribution, Evidence, attribute};
use super::{exit, scan};
use mainstay_model::verdict::FaultDomain;

/// Bins of the reliability table.
const BINS: usize = 5;
/// Minimum confidences in the table of thresholds.
const THRESHOLDS: [f64; 7] = [0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];

/// The answer to one case.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// Which case.
    pub id: String,
    /// What went wrong.
    pub class: Class,
    /// Whose fault it was. Unknown is an abstention.
    pub fault_domain: FaultDomain,
    /// What to do.
    pub restart: Restart,
    /// The confidence in the domain, from 0 to 1.
    pub confidence: f64,
    /// Lines of the log, from 1, best first.
    pub root_lines: Vec<u64>,
    /// The rank where the failure started.
    pub root_rank: Option<u32>,
    /// The evidence that it is based on, heaviest first.
    pub reasons: Vec<String>,
    /// Whether the domain is right; absent without a label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub right: Option<bool>,
    /// What could not be parsed in the case.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The evidence of a case.
pub fn evidence(catalog: &Catalog, case: &Case) -> Evidence {
    let log = case.log_joined.as_deref().unwrap_or(&case.log);
    let mut findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
    findings.extend(
        case.files
            .iter()
            .map(|file| Scan::of_text(catalog, &file.name, file.rank, Kind::Log, file.text.as_bytes())),
    );
    if let Some(kernel) = case.kernel_log.as_deref().filter(|text| !text.is_empty()) {
        findings.push(Scan::of_text(catalog, "kernel", None, Kind::Kernel, kernel.as_bytes()));
    }
    let exit_info = case.exit_info.as_deref().unwrap_or_default();
    findings.push(Scan::of_text(catalog, "exit", None, Kind::Exit, exit_info.as_bytes()));
    scan::relate(&mut findings);
    Evidence { findings, exits: exit::from_text(exit_info), ..Evidence::default() }
}

/// Attributes a case.
pub fn answer(catalog: &Catalog, case: &Case) -> Answer {
    answer_from(catalog, case, &evidence(catalog, case))
}

/// Signatures that matched the log of a failure in `agent/catalog/failures` when it was collected. The build script lists them.
const BORNE_OUT: &str = include_str!(concat!(env!("OUT_DIR"), "/borne_out.txt"));

/// The collected lines.
const LINES: &str = include_str!("../../../catalog/signatures/lines.tsv");

/// Judges each case as if its source had never been seen: a signature counts only if a case of another source, a failure in the
/// catalog or a collected line matches it too. Signatures are written by hand; one that only this source matches may have been
/// written after it.
pub fn without_memory(catalog: &Catalog, cases: &[Case]) -> Vec<Answer> {
    let known = sources_of_signatures(catalog, cases);
    let judged = cases.iter().map(|case| {
        let mut evidence = evidence(catalog, case);
        forget(catalog, &mut evidence, &known, &source(case));
        answer_from(catalog, case, &evidence)
    });
    judged.collect()
}

fn source(case: &Case) -> String {
    case.group.clone().unwrap_or_else(|| case.id.clone())
}

/// For each signature the sources that it matches in. A match in a known failure or in the collected lines has an empty name.
fn sources_of_signatures(catalog: &Catalog, cases: &[Case]) -> BTreeMap<usize, BTreeSet<String>> {
    let mut known: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    for case in cases {
        for signature in matched(&evidence(catalog, case)) {
            known.entry(signature).or_default().insert(source(case));
        }
    }
    let names: BTreeSet<&str> = BORNE_OUT.lines().collect();
    let of_failures =
        (0..).zip(catalog.signatures()).filter(|(_, signature)| names.contains(signature.id.as_str()));
    let lines = Scan::of_text(catalog, "lines", None, Kind::Log, LINES.as_bytes()).sightings;
    let elsewhere = of_failures.map(|(at, _)| at).chain(lines.into_iter().map(|line| line.signature));
    for signature in elsewhere {
        known.entry(signature).or_default().insert(String::new());
    }
    known
}

/// Removes evidence that only its own source confirms.
fn forget(catalog: &Catalog, evidence: &mut Evidence, known: &BTreeMap<usize, BTreeSet<String>>, own: &str) {
    let is_memory = |signature: usize| {
        known.get(&signature).is_some_and(|sources| sources.iter().all(|source| source == own))
    };
    for findings in &mut evidence.findings {
        findings.sightings.retain(|sighting| !is_memory(sighting.signature));
        for exception in &mut findings.exceptions {
            let line = exception.spot.line;
            exception.known = findings.sightings.iter().any(|sighting| {
                catalog.explains(sighting.signature) && sighting.spots.iter().any(|spot| spot.line == line)
            });
        }
    }
}

fn matched(evidence: &Evidence) -> impl Iterator<Item = usize> + '_ {
    evidence.findings.iter().flat_map(|findings| findings.sightings.iter().map(|sighting| sighting.signature))
}

fn answer_from(catalog: &Catalog, case: &Case, evidence: &Evidence) -> Answer {
    let judged = attribute(catalog, evidence);
    let root_lines = root_lines(case, &judged);
    Answer {
        id: case.id.clone(),
        class: judged.class,
        fault_domain: judged.domain,
        restart: judged.restart,
        confidence: judged.confidence,
        root_lines,
        root_rank: judged.root.rank,
        reasons: reasons(&judged),
        right: case.label.as_ref().map(|label| label.fault_domain == judged.domain),
        notes: case.notes.clone(),
    }
}

fn reasons(judged: &Attribution) -> Vec<String> {
    let summarized = |sign: &'static str| {
        move |vote: &super::vote::Vote| {
            format!("{sign} {} {:.1} ({})", vote.class.name(), vote.weight, vote.id)
        }
    };
    judged
        .evidence
        .iter()
        .map(summarized("for"))
        .chain(judged.against.iter().map(summarized("against")))
        .chain(judged.consequences.iter().map(summarized("followed")))
        .collect()
}

/// Root lines as line numbers of the original log.
fn root_lines(case: &Case, judged: &Attribution) -> Vec<u64> {
    // The log is the first source. The line numbers of further files continue its own.
    let lines = judged.root.lines.iter().filter_map(|(source, spot)| match source.checked_sub(1) {
        None => Some(spot.line),
        Some(file) if file < case.files.len() => Some(case.lines_before(file) + spot.line),
        Some(_) => None,
    });
    let Some(joined) = &case.log_joined else { return lines.collect() };
    let covered = covered_lines(&case.log, joined);
    let mut originals: Vec<u64> = Vec::new();
    for line in lines {
        let at = usize::try_from(line).unwrap_or(usize::MAX).saturating_sub(1);
        for original in covered.get(at).into_iter().flat_map(|(from, to)| *from..=*to) {
            if !originals.contains(&original) {
                originals.push(original);
            }
        }
    }
    originals
}

/// For each line of the joined text, the range of original lines that it consists of. Both texts have the same letters and differ only
/// in white space.
fn covered_lines(log: &str, joined: &str) -> Vec<(u64, u64)> {
    let mut line_of_letter = Vec::new();
    for (number, line) in (1u64..).zip(log.split('\n')) {
        line_of_letter.extend(line.chars().filter(|c| !c.is_whitespace()).map(|_| number));
    }
    let last = line_of_letter.last().copied().unwrap_or(1);
    let mut at = 0;
    let mut covered = Vec::new();
    for line in joined.split('\n') {
        let letters = line.chars().filter(|c| !c.is_whitespace()).count();
        let from = line_of_letter.get(at).copied().unwrap_or(last);
        let to = line_of_letter.get((at + letters).saturating_sub(1)).copied().unwrap_or(last);
        covered.push((from, to.max(from)));
        at += letters;
    }
    covered
}

/// The accuracy of the answers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// All cases with a label.
    pub all: Share,
    /// Verbatim logs with labels of at least medium confidence, without one-liners.
    pub headline: Share,
    /// One-liners alone.
    pub one_liners: Share,
    /// Results per class, by name.
    pub per_class: BTreeMap<&'static str, Share>,
    /// The confusion matrix: for each true class the number of answers per class.
    pub confusion: BTreeMap<&'static str, BTreeMap<&'static str, u32>>,
    /// The calibration of the confidence.
    pub calibration: Calibration,
    /// Cases of the user's fault that were classified as hardware.
    pub false_hardware: u32,
    /// Cases with the advice not to restart although a restart was right.
    pub false_do_not_restart: u32,
    /// Cases that were judged but have no label that can be scored.
    pub unscored: u32,
    /// Cases that could not be parsed completely; their answers list what.
    pub odd: u32,
}

/// Counts over a set of cases.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Share {
    /// Cases.
    pub cases: u32,
    /// Cases with the right domain. An abstention is right if the label is unknown.
    pub domain: u32,
    /// Cases in which a domain was named.
    pub committed: u32,
    /// Of those, cases with the right domain.
    pub committed_right: u32,
    /// Cases with the right class.
    pub class: u32,
    /// Cases with the right advice.
    pub restart: u32,
    /// Cases whose label has root lines.
    pub with_root: u32,
    /// Of those, cases whose first root line is right.
    pub root_first: u32,
    /// Of those, cases with any right root line.
    pub root_any: u32,
    /// Cases whose label has a rank.
    pub with_rank: u32,
    /// Of those, cases with the right rank.
    pub rank: u32,
    /// Cases whose label has root lines or a rank.
    pub with_place: u32,
    /// Of those, cases whose first root line or rank is right.
    pub place: u32,
}

/// The calibration of the confidence.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Calibration {
    /// Mean squared difference between the confidence and the correctness of the domain (0 or 1).
    pub brier: f64,
    /// Expected calibration error: mean distance between confidence and the share of right answers, weighted by the size of the bins.
    pub expected_error: f64,
    /// Bins by confidence, lowest first.
    pub bins: Vec<Bin>,
    /// The effect of abstaining below a confidence.
    pub thresholds: Vec<Threshold>,
}

/// The effect of abstaining below a confidence.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Threshold {
    /// The minimum confidence for naming a domain.
    pub at: f64,
    /// Cases with at least this confidence.
    pub named: u32,
    /// Of those, cases with the right domain.
    pub right: u32,
}

/// Answers of similar confidence.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Bin {
    /// Lower bound of the bin.
    pub from: f64,
    /// Number of answers.
    pub cases: u32,
    /// Their mean confidence.
    pub confidence: f64,
    /// The share of them that is right.
    pub right: f64,
}

impl Share {
    fn add(&mut self, answer: &Answer, label: &Label) {
        let right = answer.fault_domain == label.fault_domain;
        let committed = answer.fault_domain != FaultDomain::Unknown;
        self.cases += 1;
        self.domain += u32::from(right);
        self.committed += u32::from(committed);
        self.committed_right += u32::from(committed && right);
        self.class += u32::from(Some(answer.class) == label.class);
        self.restart += u32::from(Some(answer.restart) == label.restart);
        if let Some(root) = &label.root_lines {
            self.with_root += 1;
            self.root_first += u32::from(answer.root_lines.first().is_some_and(|line| root.contains(line)));
            self.root_any += u32::from(answer.root_lines.iter().any(|line| root.contains(line)));
        }
        let line = label
            .root_lines
            .as_ref()
            .map(|root| answer.root_lines.first().is_some_and(|at| root.contains(at)));
        let rank = label.culprit_rank.map(|rank| answer.root_rank == Some(rank));
        self.with_rank += u32::from(rank.is_some());
        self.rank += u32::from(rank == Some(true));
        self.with_place += u32::from(line.is_some() || rank.is_some());
        self.place += u32::from(line == Some(true) || rank == Some(true));
    }
}

/// Compares answers with the labels of their cases.
pub fn summary(cases: &[Case], answers: &[Answer]) -> Summary {
    let mut summary = Summary::default();
    let mut bins = vec![Bin::default(); BINS];
    let mut thresholds: Vec<Threshold> =
        THRESHOLDS.iter().map(|at| Threshold { at: *at, ..Threshold::default() }).collect();
    for (case, answer) in cases.iter().zip(answers) {
        summary.odd += u32::from(!case.notes.is_empty());
        let Some(label) = &case.label else {
            summary.unscored += 1;
            continue;
        };
        summary.all.add(answer, label);
        let one_line = case.tags.iter().any(|tag| tag == "one_line");
        let abridged = case.log_fidelity.as_deref() == Some("author_abridged");
        if one_line {
            summary.one_liners.add(answer, label);
        } else if !abridged && case.confidence.as_deref() != Some("low") {
            summary.headline.add(answer, label);
        }
        let class = label.class.map_or("unknown", Class::name);
        summary.per_class.entry(class).or_default().add(answer, label);
        *summary.confusion.entry(class).or_default().entry(answer.class.name()).or_default() += 1;
        let right = answer.fault_domain == label.fault_domain;
        let hit = f64::from(u8::from(right));
        summary.calibration.brier += (answer.confidence - hit).powi(2);
        let named = answer.fault_domain != FaultDomain::Unknown;
        for threshold in thresholds.iter_mut().filter(|threshold| named && answer.confidence >= threshold.at)
        {
            threshold.named += 1;
            threshold.right += u32::from(right);
        }
        let bin = &mut bins[((answer.confidence * BINS as f64) as usize).min(BINS - 1)];
        bin.cases += 1;
        bin.confidence += answer.confidence;
        bin.right += hit;
        summary.false_hardware += u32::from(
            label.fault_domain == FaultDomain::User && answer.fault_domain == FaultDomain::Hardware,
        );
        summary.false_do_not_restart += u32::from(
            answer.restart == Restart::DoNotRestart
                && label.restart.is_some_and(|right| right != Restart::DoNotRestart),
        );
    }
    for (at, bin) in bins.iter_mut().enumerate() {
        let cases = f64::from(bin.cases.max(1));
        bin.from = at as f64 / BINS as f64;
        bin.confidence /= cases;
        bin.right /= cases;
        let weight = f64::from(bin.cases) / f64::from(summary.all.cases.max(1));
        summary.calibration.expected_error += weight * (bin.confidence - bin.right).abs();
    }
    summary.calibration.brier /= f64::from(summary.all.cases.max(1));
    summary.calibration.bins = bins;
    summary.calibration.thresholds = thresholds;
    summary
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_lines_map_to_their_original_lines() {
        let log = "one\ntwo th\nree\nfour";
        assert_eq!(covered_lines(log, "one\ntwo three\nfour"), [(1, 1), (2, 3), (4, 4)]);
        assert_eq!(covered_lines("", ""), [(1, 1)]);
    }
}
