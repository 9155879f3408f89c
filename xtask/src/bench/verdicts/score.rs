//! Compares verdicts and decisions with the truth.

use std::collections::BTreeMap;

use serde_json::json;

use super::cell::Seen;
use super::table::Cell;
use crate::bench::figure::Figure;

/// From this confidence on a verdict counts as certain.
const SURE: f64 = 0.9;
/// Bins of confidence.
const BINS: usize = 5;

/// How a cell went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Score {
    named: bool,
    right: bool,
    /// A domain was named for a failure whose domain cannot be known.
    false_domain: bool,
    /// No domain was named although the cause shows.
    abstained: bool,
    decided: bool,
    decision_right: bool,
    false_stop: bool,
    rank_right: bool,
}

fn score(cell: &Cell, seen: &Seen) -> Score {
    let Some(verdict) = &seen.verdict else { return Score::default() };
    let named = verdict.domain != "unknown";
    let right = named && cell.fault.domains.contains(&verdict.domain);
    let decision = seen.decision.as_ref().map(|(action, _)| kind(action));
    let decision_right = decision.is_some_and(|kind| cell.fault.decisions.iter().any(|right| right == kind));
    Score {
        named,
        right,
        false_domain: named && cell.fault.domains.is_empty(),
        abstained: !named && cell.fault.shows,
        decided: decision.is_some(),
        decision_right,
        false_stop: decision == Some("stop") && !decision_right,
        rank_right: cell.fault.any_rank || verdict.culprit == Some(cell.rank()),
    }
}

/// The effect of an action on the job.
fn kind(action: &str) -> &'static str {
    match action {
        "stop" => "stop",
        "hand_back" | "replace_host" => "hand_back",
        _ => "restart",
    }
}

/// A cell as a line of JSON.
pub fn line(cell: &Cell, seen: &Seen) -> String {
    let verdict = seen.verdict.clone().unwrap_or_default();
    json!({
        "cell": cell.name(), "fault": cell.fault.name, "program": cell.program.name, "after": cell.after,
        "domain": verdict.domain, "class": verdict.class, "confidence": verdict.confidence,
        "culprit": verdict.culprit, "headline": verdict.headline, "evidence": verdict.evidence,
        "decision": seen.decision, "problem": seen.problem, "wrong": wrong(cell, seen),
    })
    .to_string()
}

/// What is wrong with a cell, with the verdict's text; none if all is right.
pub fn wrong(cell: &Cell, seen: &Seen) -> Option<String> {
    if seen.survived {
        return None;
    }
    let name = cell.name();
    let Some(verdict) = &seen.verdict else {
        return Some(format!("{name}: no verdict: {}", seen.problem.as_deref().unwrap_or("none was made")));
    };
    let score = score(cell, seen);
    let mut faults = Vec::new();
    if score.named && !score.right {
        faults.push(format!("domain {} where {:?} is right", verdict.domain, cell.fault.domains));
    }
    if score.abstained {
        faults.push(format!("no domain where {:?} is right", cell.fault.domains));
    }
    if !score.decision_right {
        let action = seen.decision.as_ref().map_or("nothing", |(action, _)| action);
        faults.push(format!("decision {action} where {:?} is right", cell.fault.decisions));
    }
    if !score.rank_right {
        faults.push(format!("rank {:?} where {} is right", verdict.culprit, cell.rank()));
    }
    let why = seen.decision.as_ref().map_or("", |(_, why)| why);
    let sure = verdict.confidence * 100.0;
    (!faults.is_empty()).then(|| {
        format!(
            "{name}: {}: \"{}\" ({}, {sure:.0} %); {why}; {}",
            faults.join(", "),
            verdict.headline,
            verdict.class,
            verdict.evidence.join(" | ")
        )
    })
}

/// A table per fault and one per program.
pub fn print(seen: &[(Cell, Seen)]) {
    for (title, key) in [
        ("fault", (|cell: &Cell| cell.fault.name.clone()) as fn(&Cell) -> String),
        ("program", |cell: &Cell| {
            let way = if cell.program.shell { " behind sh" } else { "" };
            let client = if cell.program.client { "" } else { " without client" };
            format!("{}{way}{client}", cell.program.name)
        }),
    ] {
        let mut rows: BTreeMap<String, Vec<Score>> = BTreeMap::new();
        for (cell, seen) in seen {
            rows.entry(key(cell)).or_default().push(score(cell, seen));
        }
        println!(
            "\n{title:<40} {:>5} {:>5} {:>5} {:>6} {:>9} {:>8} {:>6} {:>5}",
            "cells", "named", "right", "false", "abstained", "decision", "false", "rank"
        );
        for (name, scores) in rows {
            let count = |of: fn(&Score) -> bool| scores.iter().filter(|score| of(score)).count();
            println!(
                "{name:<40} {:>5} {:>5} {:>5} {:>6} {:>9} {:>8} {:>6} {:>5}",
                scores.len(),
                count(|of| of.named),
                count(|of| of.right),
                count(|of| of.false_domain),
                count(|of| of.abstained),
                count(|of| of.decision_right),
                count(|of| of.false_stop),
                count(|of| of.rank_right),
            );
        }
    }
}

/// The figures; a cell without a verdict has neither a domain nor a right decision.
pub fn figures(seen: &[(Cell, Seen)]) -> Vec<Figure> {
    let scores: Vec<(bool, Score)> =
        seen.iter().map(|(cell, seen)| (cell.fault.shows, score(cell, seen))).collect();
    let count = |of: fn(&Score) -> bool| scores.iter().filter(|(_, score)| of(score)).count();
    let showing = scores.iter().filter(|(shows, _)| *shows).count();
    // Of programs that the calibration was not chosen on, with faults that have one true domain.
    let printed: Vec<(f64, bool)> = seen
        .iter()
        .zip(&scores)
        .filter(|((cell, _), (_, score))| {
            score.named && cell.program.is_held_out() && cell.fault.domains.len() < 2
        })
        .filter_map(|((_, seen), (_, score))| Some((seen.verdict.as_ref()?.confidence, score.right)))
        .collect();
    let sure: Vec<bool> =
        printed.iter().filter(|(printed, _)| *printed >= SURE).map(|(_, right)| *right).collect();
    [
        share("verdict.live_domain", "% of named", count(|of| of.right), count(|of| of.named)),
        share("verdict.live_abstain", "% of showing", count(|of| of.abstained), showing),
        number("verdict.live_false_domain", count(|of| of.false_domain), scores.len()),
        number("verdict.live_false_stop", count(|of| of.false_stop), scores.len()),
        share("verdict.live_decision", "%", count(|of| of.decision_right), count(|of| of.decided)),
        share("verdict.live_rank", "%", count(|of| of.rank_right), scores.len()),
        share(
            "verdict.live_sure_right",
            "% of sure",
            sure.iter().filter(|right| **right).count(),
            sure.len(),
        ),
        calibration_error(&printed)
            .map(|error| of_all("verdict.live_calibration_ece", "", error, printed.len())),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The difference between confidence and the share of right domains, over the bins of confidence; none without a
/// named domain.
fn calibration_error(printed: &[(f64, bool)]) -> Option<f64> {
    let mut bins = [(0.0, 0.0, 0.0); BINS];
    for (confidence, right) in printed {
        let bin = ((confidence * BINS as f64) as usize).min(BINS - 1);
        bins[bin].0 += 1.0;
        bins[bin].1 += confidence;
        bins[bin].2 += f64::from(u8::from(*right));
    }
    let error = bins.iter().map(|(_, printed, right)| (printed - right).abs()).sum::<f64>();
    (!printed.is_empty()).then(|| error / printed.len() as f64)
}

fn share(id: &str, unit: &str, part: usize, whole: usize) -> Option<Figure> {
    let value = 100.0 * part as f64 / whole as f64;
    (whole > 0).then(|| of_all(id, unit, value, whole))
}

fn number(id: &str, count: usize, whole: usize) -> Option<Figure> {
    (whole > 0).then(|| of_all(id, "count", count as f64, whole))
}

/// One figure of all cells, which has no spread.
fn of_all(id: &str, unit: &str, value: f64, n: usize) -> Figure {
    Figure {
        id: id.into(),
        value,
        unit: unit.into(),
        n,
        min: value,
        max: value,
        peer: None,
        peer_value: None,
        ratio: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::verdicts::table::Table;
    use crate::journal::Verdict;

    fn cell(fault: &str) -> Cell {
        let cells = Table::read().expect("a sound table").sample();
        cells.into_iter().find(|cell| cell.fault.name == fault).expect("a fault of the table")
    }

    fn seen(domain: &str, action: &str, culprit: u64) -> Seen {
        let verdict = Verdict { domain: domain.into(), culprit: Some(culprit), ..Verdict::default() };
        Seen { verdict: Some(verdict), decision: Some((action.into(), String::new())), ..Seen::default() }
    }

    #[test]
    fn a_bare_signal_has_no_domain_and_never_stops_a_job() {
        let cell = cell("sigkill");
        let good = score(&cell, &seen("unknown", "restart_in_job", cell.rank()));
        assert!(!good.named && !good.abstained && good.decision_right && good.rank_right);
        let bad = score(&cell, &seen("user", "stop", cell.rank() + 1));
        assert!(bad.false_domain && bad.false_stop && !bad.right && !bad.rank_right);
        assert_eq!(wrong(&cell, &seen("unknown", "restart_in_job", cell.rank())), None);
        assert!(wrong(&cell, &Seen::default()).is_some_and(|printed| printed.contains("no verdict")));
    }

    #[test]
    fn an_abstention_counts_only_where_the_cause_shows() {
        let shows = cell("key_error");
        assert!(score(&shows, &seen("unknown", "stop", shows.rank())).abstained);
        assert!(score(&shows, &seen("user", "stop", shows.rank())).right);
        let hidden = cell("exit_3");
        assert!(!score(&hidden, &seen("unknown", "restart_in_job", hidden.rank())).abstained);
    }

    #[test]
    fn confidence_is_compared_with_the_share_of_right_domains() {
        assert_eq!(calibration_error(&[]), None);
        let error = calibration_error(&[(0.9, true), (0.9, true), (0.9, false), (0.5, true)]).expect("some");
        assert!((error - (0.7 + 0.5) / 4.0).abs() < 1e-9, "{error}");
    }

    #[test]
    fn shares_are_of_what_was_named_and_counts_of_all() {
        let pairs = vec![
            (cell("sigkill"), seen("unknown", "restart_in_job", 9)),
            (cell("key_error"), seen("user", "stop", 9)),
            (cell("key_error"), seen("hardware", "stop", 9)),
        ];
        let figures = figures(&pairs);
        let value =
            |id: &str| figures.iter().find(|figure| figure.id == id).map(|figure| (figure.value, figure.n));
        assert_eq!(value("verdict.live_domain"), Some((50.0, 2)));
        assert_eq!(value("verdict.live_false_domain"), Some((0.0, 3)));
        assert_eq!(value("verdict.live_decision"), Some((100.0, 3)));
    }
}
