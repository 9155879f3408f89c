//! The judgement against labelled failures of real jobs, where those lie beside the project.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "the test reads files; the core does not")]

use std::path::PathBuf;

use mainstay_core::attribute::catalog::Catalog;
use mainstay_core::attribute::class::{Class, Restart};
use mainstay_core::attribute::score::{self, Case};

/// Right domains, in percent, below which something broke.
const FLOOR: u32 = 82;

/// The catalogue that is compiled in, or the one in the directory that CATALOG names: for trying out signatures.
fn catalog() -> &'static Catalog {
    let Some(dir) = std::env::var_os("CATALOG") else {
        return Catalog::built_in().expect("a sound catalogue");
    };
    let files: Vec<(String, String)> = std::fs::read_dir(dir)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "toml"))
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("a readable file");
            (path.display().to_string(), text)
        })
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    Box::leak(Box::new(Catalog::read(&files).expect("a sound catalogue")))
}

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
    Some((1..).zip(cases).map(|(number, line)| Case::read(number, line)).collect())
}

#[test]
fn labelled_cases_are_judged_well() {
    let Some(cases) = labelled() else { return };
    let catalog = catalog();
    let answers: Vec<score::Answer> = cases.iter().map(|case| score::answer(catalog, case)).collect();
    let summary = score::summary(&cases, &answers);
    for (case, answer) in cases.iter().zip(&answers) {
        let label = case.label.as_ref().expect("a label");
        if std::env::var_os("SHOW").is_some() {
            println!(
                "{}",
                serde_json::json!({"id": case.id, "want": [label.class.map(Class::name), label.fault_domain.name(), label.restart.map(Restart::name)], "root": label.root_lines, "got": answer})
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
