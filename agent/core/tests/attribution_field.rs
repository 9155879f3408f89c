//! Failures of real jobs as they were told in public issue threads, one decisive piece of each log, labelled by what the thread
//! found. `agent/catalog/cases/README.md` tells where they come from and how many were right before the catalogue had met them.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "the test reads files; the core does not")]

mod labelled;

use labelled::{batches, catalog};
use mainstay_core::attribute::class::{Class, Restart};
use mainstay_core::attribute::lessons;
use mainstay_core::attribute::score::{self, Case};
use mainstay_core::verdict::FaultDomain;

/// Right domains, in percent, below which something broke.
const FLOOR: u32 = 86;

#[test]
fn failures_from_issue_threads_are_judged_well() {
    let catalog = catalog();
    let all: Vec<Case> = batches();
    let answers: Vec<score::Answer> = all.iter().map(|case| score::answer(catalog, case)).collect();
    let summary = score::summary(&all, &answers);
    for (case, answer) in all.iter().zip(&answers) {
        let label = case.label.as_ref().expect("a label");
        let root = label
            .root_lines
            .as_ref()
            .is_none_or(|root| answer.root_lines.first().is_some_and(|of| root.contains(of)));
        let rank = label.culprit_rank.is_none_or(|rank| answer.root_rank == Some(rank));
        let right = [
            (label.fault_domain == answer.fault_domain, "DOMAIN"),
            (label.class == Some(answer.class), "class"),
            (label.restart == Some(answer.restart), "restart"),
            (root, "root"),
            (rank, "rank"),
        ];
        let wrong: Vec<&str> = right.iter().filter(|(right, _)| !right).map(|(_, what)| *what).collect();
        if !wrong.is_empty() {
            println!(
                "{} [{}]: want {} {} {:?} {:?}; got {} {} {} {:.2} {:?} {:?}\n    {}",
                case.id,
                wrong.join(" "),
                label.class.map_or("?", Class::name),
                label.restart.map_or("?", Restart::name),
                label.root_lines,
                label.culprit_rank,
                answer.class.name(),
                answer.fault_domain.name(),
                answer.restart.name(),
                answer.confidence,
                answer.root_lines,
                answer.root_rank,
                answer.reasons.join("; ")
            );
        }
    }
    println!("{}", serde_json::to_string(&summary.all).expect("plain"));
    println!("{}", serde_json::to_string(&summary.calibration).expect("plain"));
    assert!(summary.all.cases > 0, "no case was read");
    assert!(
        summary.all.domain * 100 >= summary.all.cases * FLOOR,
        "{} of {} domains are right",
        summary.all.domain,
        summary.all.cases
    );
    assert_eq!(summary.false_hardware, 0, "a user's failure was called the hardware's");
    for class in Class::ALL.into_iter().filter(|_| std::env::var_os("BATCH").is_none()) {
        let right = summary.per_class.get(class.name()).map_or(0, |share| share.class);
        assert!(right > 0, "{} is never the answer where it is right", class.name());
    }
}

/// Right domains, in percent, of failures that are judged without memory of their batch.
const BLIND_FLOOR: u32 = 84;

#[test]
fn failures_are_judged_well_without_memory_of_their_batch() {
    let all: Vec<Case> = batches();
    let answers = score::without_memory(catalog(), &all, &lessons::cases(), lessons::LINES);
    let summary = score::summary(&all, &answers);
    let wrong = all.iter().zip(&answers).filter(|(_, answer)| answer.right == Some(false));
    for (case, answer) in wrong {
        println!(
            "{} of {}: {} {:.2}: {}",
            case.id,
            case.group.as_deref().unwrap_or_default(),
            answer.class.name(),
            answer.confidence,
            answer.reasons.join("; ")
        );
    }
    for (case, answer) in
        all.iter().zip(&answers).filter(|(_, answer)| answer.restart == Restart::DoNotRestart)
    {
        let right = case.label.as_ref().and_then(|label| label.restart);
        if right.is_some_and(|right| right != Restart::DoNotRestart) {
            let reasons = answer.reasons.join("; ");
            println!("stopped {}: {} {:.2}: {reasons}", case.id, answer.class.name(), answer.confidence);
        }
    }
    println!("{}", serde_json::to_string(&summary.all).expect("plain"));
    println!("{}", serde_json::to_string(&summary.calibration).expect("plain"));
    println!("false hardware {}, {:?}", summary.false_hardware, summary.false_do_not_restart);
    assert!(
        summary.all.domain * 100 >= summary.all.cases * BLIND_FLOOR,
        "{} of {} domains are right",
        summary.all.domain,
        summary.all.cases
    );
}

#[test]
fn who_is_not_sure_does_not_stop_the_job() {
    let answers = batches().into_iter().map(|case| score::answer(catalog(), &case));
    let unsure = answers.filter(|of| of.confidence < 0.6 && of.restart == Restart::DoNotRestart);
    // Only an exit code that is an agreement may say so.
    let told: Vec<String> =
        unsure.filter(|of| !of.reasons.iter().any(|of| of.contains("(exit)"))).map(|of| of.id).collect();
    assert!(told.is_empty(), "{told:?}");
}

#[test]
fn a_case_may_lack_everything_but_its_name() {
    let catalog = catalog();
    let case = Case::read(1, r#"{"id": "bare", "source_url": null, "label": null}"#);
    let answer = score::answer(catalog, &case);
    assert_eq!((answer.fault_domain, answer.right), (FaultDomain::Unknown, None));
    let noisy = r#"{"id": "noisy", "log": "a\r\n\u001b[31m[rank3]: torch.OutOfMemoryError: CUDA out of memory.\u001b[0m\r\nb"}"#;
    let answer = score::answer(catalog, &Case::read(1, noisy));
    assert_eq!((answer.class, answer.root_lines, answer.root_rank), (Class::UserConfig, vec![2], Some(3)));
}
