//! Compares verdicts and decisions with the truth.

use std::collections::BTreeMap;

use mainstay_model::verdict::{Action, FaultDomain};
use serde_json::json;

use super::cell::Seen;
use super::table::Cell;
use crate::bench::prelude::*;

/// From this confidence on a verdict counts as certain.
const SURE: f64 = 0.9;
/// Bins of confidence.
const BINS: usize = 5;

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
    let named = verdict.domain != FaultDomain::Unknown;
    let right = named && cell.fault.domains.contains(&verdict.domain);
    let decision = seen.decision.as_ref().map(|decision| kind(decision.action));
    let decision_right = decision.is_some_and(|kind| cell.fault.decisions.iter().any(|right| right == kind));
    Score {
        named,
        right,
        false_domain: named && cell.fault.domains.is_empty(),
        abstained: !named && cell.fault.shows,
        decided: decision.is_some(),
        decision_right,
        false_stop: decision == Some("stop") && !decision_right,
        rank_right: cell.fault.any_rank || verdict.culprit.is_some_and(|rank| rank.0 == cell.rank()),
    }
}

/// The effect of an action on the job.
fn kind(action: Action) -> &'static str {
    match action {
        Action::Stop { .. } => "stop",
        Action::HandBack { .. } | Action::ReplaceHost { .. } => "hand_back",
        _ => "restart",
    }
}

/// A cell as a line of JSON.
pub fn line(cell: &Cell, seen: &Seen) -> String {
    json!({
        "cell": cell.name(), "fault": cell.fault.name, "program": cell.program.name, "after": cell.after,
        "verdict": seen.verdict, "decision": seen.decision, "problem": seen.problem, "wrong": wrong(cell, seen),
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
    let (domain, action) = (verdict.domain.name(), seen.decision.as_ref().map(|of| of.action.as_str()));
    let faults = [
        (score.named && !score.right)
            .then(|| format!("domain {domain} where {:?} is right", cell.fault.domains)),
        score.abstained.then(|| format!("no domain where {:?} is right", cell.fault.domains)),
        (!score.decision_right)
            .then(|| format!("decision {action:?} where {:?} is right", cell.fault.decisions)),
        (!score.rank_right).then(|| format!("{:?} where {} is right", verdict.culprit, cell.rank())),
    ];
    let faults: Vec<String> = faults.into_iter().flatten().collect();
    let why = seen.decision.as_ref().map_or("", |decision| &decision.why);
    let (class, sure) = (verdict.class.as_deref().unwrap_or_default(), verdict.confidence * 100.0);
    let (faulty, headline, evidence) = (faults.join(", "), &verdict.headline, verdict.evidence.join(" | "));
    (!faults.is_empty())
        .then(|| format!("{name}: {faulty}: \"{headline}\" ({class}, {sure:.0} %); {why}; {evidence}"))
}

type Column = (&'static str, fn(&Score) -> bool);

/// What is counted, with the columns of the tables.
const COLUMNS: [Column; 7] = [
    ("named", |of| of.named),
    ("right", |of| of.right),
    ("false", |of| of.false_domain),
    ("abstained", |of| of.abstained),
    ("decision", |of| of.decision_right),
    ("false stop", |of| of.false_stop),
    ("rank", |of| of.rank_right),
];

/// A table per fault and one per program.
pub fn print(seen: &[(Cell, Seen)]) {
    let fault = |cell: &Cell| cell.fault.name.clone();
    let program = |cell: &Cell| {
        let way = if cell.program.shell { " behind sh" } else { "" };
        let client = if cell.program.client { "" } else { " without client" };
        format!("{}{way}{client}", cell.program.name)
    };
    for (title, key) in [("fault", &fault as &dyn Fn(&Cell) -> String), ("program", &program)] {
        let mut rows: BTreeMap<String, Vec<Score>> = BTreeMap::new();
        for (cell, seen) in seen {
            rows.entry(key(cell)).or_default().push(score(cell, seen));
        }
        let columns = COLUMNS.map(|(name, _)| format!(" {name:>10}")).concat();
        println!("\n{title:<40} {:>6}{columns}", "cells");
        for (name, scores) in rows {
            let count = |of: fn(&Score) -> bool| scores.iter().filter(|score| of(score)).count();
            let columns = COLUMNS.map(|(_, of)| format!(" {:>10}", count(of))).concat();
            println!("{name:<40} {:>6}{columns}", scores.len());
        }
    }
}

/// The figures; a cell without a verdict has neither a domain nor a right decision.
pub fn figures(seen: &[(Cell, Seen)]) -> Vec<Figure> {
    let scores: Vec<Score> = seen.iter().map(|(cell, seen)| score(cell, seen)).collect();
    let count = |of: fn(&Score) -> bool| scores.iter().filter(|score| of(score)).count();
    let (all, showing) = (scores.len(), seen.iter().filter(|(cell, _)| cell.fault.shows).count());
    // Of programs that the calibration was not chosen on, with faults that have one true domain.
    let printed = seen.iter().zip(&scores).filter_map(|((cell, seen), score)| {
        let counts = score.named && cell.program.is_held_out() && cell.fault.domains.len() < 2;
        seen.verdict.as_ref().filter(|_| counts).map(|verdict| (verdict.confidence, score.right))
    });
    let printed: Vec<(f64, bool)> = printed.collect();
    let sure: Vec<bool> =
        printed.iter().filter(|(printed, _)| *printed >= SURE).map(|(_, right)| *right).collect();
    let sure_right = sure.iter().filter(|right| **right).count();
    let share = |id: &str, unit: &str, part: usize, whole: usize| {
        (whole > 0).then(|| Figure::one(id, unit, 100.0 * part as f64 / whole as f64, whole))
    };
    let number = |id: &str, count: usize| (all > 0).then(|| Figure::one(id, "count", count as f64, all));
    let error = calibration_error(&printed);
    [
        share("verdict.live_domain", "% of named", count(|of| of.right), count(|of| of.named)),
        share("verdict.live_abstain", "% of showing", count(|of| of.abstained), showing),
        number("verdict.live_false_domain", count(|of| of.false_domain)),
        number("verdict.live_false_stop", count(|of| of.false_stop)),
        share("verdict.live_decision", "%", count(|of| of.decision_right), count(|of| of.decided)),
        share("verdict.live_rank", "%", count(|of| of.rank_right), all),
        share("verdict.live_sure_right", "% of sure", sure_right, sure.len()),
        error.map(|error| Figure::one("verdict.live_calibration_ece", "", error, printed.len())),
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

#[cfg(test)]
mod tests {
    use mainstay_model::id::Attempt;

    use super::*;
    use crate::bench::verdicts::table::Table;

    fn cell(fault: &str) -> Cell {
        let cells = Table::read().expect("a sound table").sample();
        cells.into_iter().find(|cell| cell.fault.name == fault).expect("a fault of the table")
    }

    fn seen(domain: &str, action: Action, culprit: u32) -> Seen {
        let verdict = json!({
            "incident": 1, "attempt": 0, "headline": "", "cause": {"type": "start_failed"}, "domain": domain,
            "confidence": 1.0, "culprit": culprit, "fault_at": 0, "detected_at": 0, "evidence": [],
        });
        let decision = json!({"incident": 1, "action": action, "why": "", "by": "launcher"});
        let verdict = serde_json::from_value(verdict).expect("a verdict");
        Seen { verdict, decision: serde_json::from_value(decision).expect("a decision"), ..Seen::default() }
    }

    const STOP: Action = Action::Stop { exit: 1 };
    const RESTART: Action = Action::RestartInJob { attempt: Attempt(1) };

    #[test]
    fn a_bare_signal_has_no_domain_and_never_stops_a_job() {
        let cell = cell("sigkill");
        let good = score(&cell, &seen("unknown", RESTART, cell.rank()));
        assert!(!good.named && !good.abstained && good.decision_right && good.rank_right);
        let bad = score(&cell, &seen("user", STOP, cell.rank() + 1));
        assert!(bad.false_domain && bad.false_stop && !bad.right && !bad.rank_right);
        assert_eq!(wrong(&cell, &seen("unknown", RESTART, cell.rank())), None);
        assert!(wrong(&cell, &Seen::default()).is_some_and(|printed| printed.contains("no verdict")));
    }

    #[test]
    fn an_abstention_counts_only_where_the_cause_shows() {
        let shows = cell("key_error");
        assert!(score(&shows, &seen("unknown", STOP, shows.rank())).abstained);
        assert!(score(&shows, &seen("user", STOP, shows.rank())).right);
        let hidden = cell("exit_3");
        assert!(!score(&hidden, &seen("unknown", RESTART, hidden.rank())).abstained);
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
            (cell("sigkill"), seen("unknown", RESTART, 9)),
            (cell("key_error"), seen("user", STOP, 9)),
            (cell("key_error"), seen("hardware", STOP, 9)),
        ];
        let figures = figures(&pairs);
        let value =
            |id: &str| figures.iter().find(|figure| figure.id == id).map(|figure| (figure.value, figure.n));
        assert_eq!(value("verdict.live_domain"), Some((50.0, 2)));
        assert_eq!(value("verdict.live_false_domain"), Some((0.0, 3)));
        assert_eq!(value("verdict.live_decision"), Some((100.0, 3)));
    }
}
