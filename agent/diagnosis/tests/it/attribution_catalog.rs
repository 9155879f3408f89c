//! Each entry of the catalog must match its own example.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "the test reads files; the core does not")]

use crate::labelled;

use labelled::catalog;
use mainstay_diagnosis::attribution::catalog::{Catalog, Role};

#[test]
fn an_example_of_a_kill_has_the_phrase_that_needs_an_oom_kill() {
    let catalog = Catalog::built_in().unwrap();
    let mut count = 0;
    for signature in catalog.signatures() {
        let Some(phrase) = &signature.needs_oom_kill else { continue };
        assert!(signature.example.to_ascii_lowercase().contains(phrase), "{}", signature.id);
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn every_example_is_matched_best_by_its_own_signature() {
    let catalog = catalog();
    let mut wrong = Vec::new();
    for signature in catalog.signatures() {
        let found = catalog.matches(&signature.example);
        if !found.iter().any(|other| other.id == signature.id) {
            wrong.push(format!("{}: does not match its example", signature.id));
        } else if found[0].id != signature.id {
            wrong.push(format!("{}: {} matches its example better", signature.id, found[0].id));
        }
        for line in &signature.silent {
            if catalog.matches(line).iter().any(|other| other.id == signature.id) {
                wrong.push(format!("{}: matches {line:?}", signature.id));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_entry_has_a_meaning_a_source_a_family_and_a_weight() {
    for signature in catalog().signatures() {
        assert!(!signature.meaning.is_empty() && !signature.source.is_empty(), "{}", signature.id);
        assert!(!signature.family.is_empty() && signature.weight > 0.0, "{}", signature.id);
        assert!(signature.role != Role::Benign || signature.weight <= 0.1, "{}", signature.id);
    }
}

#[test]
fn every_pattern_compiles() {
    Catalog::read(Catalog::files()).expect("a valid catalog with all of its patterns");
}
