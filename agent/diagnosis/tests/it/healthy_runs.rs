//! The complete outputs of runs that ended without a failure (`tests/healthy`): nothing in them is the cause of a
//! failure. If a signal from outside then ends such a run, its cause is unknown.
//!
//! `cargo test -p mainstay-diagnosis --test it healthy_runs -- --nocapture` lists the evidence that was found, with run and
//! line.

#![allow(clippy::disallowed_methods, reason = "the test reads files; the core does not")]
#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::class::Class;
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::vote::Vote;
use mainstay_diagnosis::attribution::{Attribution, Evidence, attribute, exit};
use mainstay_model::verdict::FaultDomain;

/// Evidence of at least this weight can change a verdict.
const WEIGHT: f64 = 0.5;
/// If only a signal was seen, no domain may be more likely than this.
const LIKELY: f64 = 0.5;
/// The minimum number of runs in the corpus, so that an empty folder does not pass.
const RUNS: usize = 200;
/// Signals that end a process from outside, and those with which native code crashes.
const SIGNALS: [&str; 4] =
    ["signal 9 (SIGKILL)", "signal 15 (SIGTERM)", "signal 11 (SIGSEGV)", "signal 6 (SIGABRT)"];

/// All runs by name.
fn runs() -> BTreeMap<String, String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/healthy/runs");
    let entries = std::fs::read_dir(&folder).expect("tests/healthy/runs is part of the repository");
    let paths = entries.map(|entry| entry.expect("an entry of the folder").path());
    let read = |path: PathBuf| {
        let name = path.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let text = std::fs::read(&path).expect("a readable file");
        (name, String::from_utf8_lossy(&text).into_owned())
    };
    let logs = paths.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
    logs.map(read).collect()
}

/// Attributes a log and the description of the exit.
fn judged(log: &str, exit_info: &str) -> Attribution {
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    let mut findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
    if !exit_info.is_empty() {
        findings.push(Scan::of_text(catalog, "exit", None, Kind::Exit, exit_info.as_bytes()));
    }
    attribute(catalog, &Evidence { findings, exits: exit::from_text(exit_info), ..Evidence::default() })
}

/// The evidence of weight for any class, each with its line.
fn speakers(judged: &Attribution) -> Vec<String> {
    let speaks = |vote: &&Vote| {
        let received = vote.classes().any(|(class, weight)| class != Class::Unknown && weight >= WEIGHT);
        received && !vote.spots.is_empty()
    };
    let reported = |vote: &Vote| {
        let line = vote.spots.first().map_or("", |(_, spot)| spot.text.as_str());
        format!("{} ({} {:.1}): {}", vote.id, vote.class.name(), vote.weight, line.trim())
    };
    judged.evidence.iter().chain(&judged.against).filter(speaks).map(reported).collect()
}

/// The most likely domain other than unknown.
fn likeliest(judged: &Attribution) -> (FaultDomain, f64) {
    let probability = |domain: FaultDomain| -> f64 {
        let its = Class::ALL.into_iter().filter(|class| class.domain() == domain);
        its.map(|class| judged.posterior.probability(class)).sum()
    };
    let domains = FaultDomain::ALL.into_iter().filter(|domain| *domain != FaultDomain::Unknown);
    let likeliest = domains.map(|domain| (domain, probability(domain))).max_by(|a, b| a.1.total_cmp(&b.1));
    likeliest.expect("there are domains")
}

/// Fails if the list is not empty, and prints all of it.
fn assert_none(wrong: &[String], checked: usize, what: &str) {
    for line in wrong {
        println!("{line}");
    }
    assert!(wrong.is_empty(), "{} of {checked} {what}; the first: {}", wrong.len(), wrong[0]);
}

#[test]
fn the_corpus_is_complete_and_names_no_machine() {
    let runs = runs();
    assert!(runs.len() >= RUNS, "{} runs", runs.len());
    let bytes: usize = runs.values().map(String::len).sum();
    assert!(bytes <= 4 << 20, "{bytes} bytes are more than 4 MiB");
    for (name, text) in &runs {
        assert!(!text.contains("/root"), "{name} contains a path of the machine that it was recorded on");
    }
}

#[test]
fn a_healthy_run_has_no_evidence_of_weight() {
    let runs = runs();
    let wrong = runs.iter().flat_map(|(name, text)| {
        speakers(&judged(text, "")).into_iter().map(move |speaker| format!("{name}: {speaker}"))
    });
    assert_none(&wrong.collect::<Vec<_>>(), runs.len(), "healthy runs have evidence of a failure");
}

#[test]
fn a_healthy_run_has_no_cause_of_failure() {
    let runs = runs();
    let mut wrong = Vec::new();
    for (name, text) in &runs {
        for exit_info in ["", "exit code 0"] {
            let judged = judged(text, exit_info);
            if judged.class != Class::Unknown || judged.domain != FaultDomain::Unknown {
                let (class, sure) = (judged.class.name(), judged.confidence);
                wrong.push(format!("{name}: {exit_info:?}: {class} {sure:.2}: {:?}", speakers(&judged)));
            }
        }
    }
    assert_none(&wrong, runs.len(), "healthy runs have a cause of failure");
}

#[test]
fn a_signal_that_ends_a_healthy_run_has_an_unknown_cause() {
    let runs = runs();
    let mut wrong = Vec::new();
    for (name, text) in &runs {
        let middle = text.lines().count() / 2;
        let half: String = text.split_inclusive('\n').take(middle).collect();
        for (part, log) in [("whole", text.as_str()), ("first half", half.as_str())] {
            for signal in SIGNALS {
                let judged = judged(log, signal);
                let (domain, likely) = likeliest(&judged);
                if judged.domain != FaultDomain::Unknown || likely > LIKELY {
                    let printed =
                        format!("{} {likely:.2} (likeliest {})", judged.domain.name(), domain.name());
                    wrong.push(format!("{name} ({part}): {signal}: {printed}: {:?}", speakers(&judged)));
                }
            }
        }
    }
    assert_none(&wrong, runs.len(), "healthy runs that a signal ended have a cause of failure");
}
