//! Labelled log lines as training software prints them. They were written from knowledge of these programs to widen
//! the catalog. They also prevent regressions: a change that loses many of them is no improvement.
//!
//! The catalog was written with these lines in view, so the share of right answers here does not apply to other lines.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    reason = "in a test, a panic is the report; the test reads files"
)]

use crate::labelled;

use labelled::catalog;
use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::class::{Class, Restart};
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::{Attribution, Evidence, attribute};

/// Minimum share of correct fault domains of the lines, in percent.
const FLOOR: usize = 92;

fn judged(catalog: &Catalog, text: &str) -> Attribution {
    let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, text.as_bytes())];
    attribute(catalog, &Evidence { findings, ..Evidence::default() })
}

#[test]
fn hints_alone_stop_no_job() {
    let catalog = catalog();
    let texts = include_str!("../../../catalog/signatures/lines.tsv").lines();
    let all = texts.filter_map(|line| line.split_once('\t')).map(|(_, text)| judged(catalog, text));
    let of_hints = |judged: &Attribution| {
        judged.class != Class::Unknown
            && !judged.evidence.is_empty()
            && judged.evidence.iter().all(|vote| vote.hint)
    };
    let by_hints: Vec<Attribution> = all.filter(of_hints).collect();
    assert!(!by_hints.is_empty(), "no line is judged by hints alone");
    for judged in by_hints {
        assert_ne!(judged.restart, Restart::DoNotRestart, "{:?}", judged.evidence);
    }
    let known = judged(catalog, "ModuleNotFoundError: No module named 'frobnicate'");
    assert_eq!(known.restart, Restart::DoNotRestart, "a signature may stop a job");
}

#[test]
fn a_confidence_below_60_percent_stops_the_job_only_with_an_agreed_exit_code() {
    let catalog = catalog();
    let texts = include_str!("../../../catalog/signatures/lines.tsv").lines();
    let all = texts.filter_map(|line| line.split_once('\t')).map(|(_, text)| judged(catalog, text));
    let unsure: Vec<Attribution> = all.filter(|judged| judged.confidence < 0.6).collect();
    assert!(!unsure.is_empty(), "no confidence is below 0.6");
    for judged in unsure {
        // Only an exit code with an agreed meaning may stop the job.
        let agreed = judged.evidence.iter().any(|vote| vote.family == "exit");
        assert!(agreed || judged.restart != Restart::DoNotRestart, "{:?}", judged.evidence);
    }
}

#[test]
fn most_lines_get_the_right_fault_domain() {
    let catalog = catalog();
    let (mut all, mut wrong) = (0, Vec::new());
    let lines = match std::env::var_os("LINES_FILE") {
        Some(file) => std::fs::read_to_string(file).expect("a readable file"),
        None => include_str!("../../../catalog/signatures/lines.tsv").to_owned(),
    };
    for line in lines.lines().filter(|line| !line.is_empty()) {
        let (class, text) = line.split_once('\t').expect("a class, a tab and a text");
        let class = Class::named(class).expect("a class");
        let text = text.replace("\\n", "\n").replace("\\t", "\t");
        let judged = judged(catalog, &text);
        all += 1;
        // Compares the domains of the classes: a full disk has the class storage and is the user's fault.
        if judged.class.domain() != class.domain() {
            wrong.push(format!(
                "{} {:.2} instead of {}: {text}",
                judged.class.name(),
                judged.confidence,
                class.name()
            ));
        }
    }
    assert!(
        (all - wrong.len()) * 100 >= all * FLOOR,
        "{} of {all} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
