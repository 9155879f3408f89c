//! Attribution of labelled failures of real jobs, if the labelled cases are available.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "the test reads files; the core does not")]

use crate::labelled;

use labelled::{catalog, labelled};
use mainstay_diagnosis::attribution::class::{Class, Restart};
use mainstay_diagnosis::attribution::score::{self, Case};
use mainstay_model::verdict::FaultDomain;

/// Minimum share of correct fault domains, in percent.
const FLOOR: u32 = 82;

#[test]
fn most_labelled_cases_get_the_right_fault_domain() {
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
    println!("{}", serde_json::to_string_pretty(&summary.all).expect("serializable"));
    assert!(
        summary.all.domain * 100 >= summary.all.cases * FLOOR,
        "{} of {} domains are right",
        summary.all.domain,
        summary.all.cases
    );
}

/// The same without signatures that only the source of the case confirms.
const BLIND_FLOOR: u32 = 80;

#[test]
fn most_labelled_cases_get_the_right_fault_domain_without_memory_of_their_source() {
    let Some(cases) = labelled() else { return };
    let answers = score::without_memory(catalog(), &cases);
    let summary = score::summary(&cases, &answers);
    for answer in answers.iter().filter(|answer| answer.right == Some(false)) {
        let reasons = answer.reasons.join("; ");
        println!("{}: {} {:.2}: {reasons}", answer.id, answer.class.name(), answer.confidence);
    }
    println!("{}", serde_json::to_string(&summary.all).expect("serializable"));
    assert!(
        summary.all.domain * 100 >= summary.all.cases * BLIND_FLOOR,
        "{} of {} domains are right",
        summary.all.domain,
        summary.all.cases
    );
    assert_eq!(summary.false_hardware, 0, "a user's failure was attributed to hardware");
}

#[test]
fn a_case_needs_only_its_id() {
    let catalog = catalog();
    let case = Case::read(1, r#"{"id": "bare", "source_url": null, "label": null}"#);
    let answer = score::answer(catalog, &case);
    assert_eq!((answer.fault_domain, answer.right), (FaultDomain::Unknown, None));
    let noisy = r#"{"id": "noisy", "log": "a\r\n\u001b[31m[rank3]: torch.OutOfMemoryError: CUDA out of memory.\u001b[0m\r\nb"}"#;
    let answer = score::answer(catalog, &Case::read(1, noisy));
    assert_eq!((answer.class, answer.root_lines, answer.root_rank), (Class::UserConfig, vec![2], Some(3)));
}
