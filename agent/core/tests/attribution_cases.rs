//! The judgement against labelled failures of real jobs, where those lie beside the project.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "the test reads files; the core does not")]

use std::path::PathBuf;

use mainstay_core::attribute::catalog::Catalog;
use mainstay_core::attribute::score::{self, Case};

/// Right domains, in percent, below which something broke.
const FLOOR: u32 = 82;

fn labelled() -> Option<Vec<Case>> {
    let file = std::env::var_os("MAINSTAY_LABELLED_CASES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/attribution/dev.jsonl"),
        PathBuf::from,
    );
    let Ok(text) = std::fs::read_to_string(&file) else {
        eprintln!("skipped: no labelled cases at {}", file.display());
        return None;
    };
    let cases = text.lines().filter(|line| !line.is_empty());
    Some(cases.map(|line| serde_json::from_str(line).expect("a case of the schema")).collect())
}

#[test]
fn labelled_cases_are_judged_well() {
    let Some(cases) = labelled() else { return };
    let catalog = Catalog::built_in().expect("a sound catalogue");
    let answers: Vec<score::Answer> = cases.iter().map(|case| score::answer(catalog, case)).collect();
    let summary = score::summary(&cases, &answers);
    for (case, answer) in cases.iter().zip(&answers) {
        let label = case.label.as_ref().expect("a label");
        if std::env::var_os("SHOW").is_some() {
            println!(
                "{}",
                serde_json::json!({"id": case.id, "want": [label.class.name(), label.fault_domain.name(), label.restart.name()], "root": label.root_lines, "got": answer})
            );
        }
    }
    println!("{}", serde_json::to_string_pretty(&summary.all).expect("plain"));
    assert!(
        summary.all.domain * 100 >= summary.all.cases * FLOOR,
        "{} of {} domains are right",
        summary.all.domain,
        summary.all.cases
    );
}
