//! Failures of real jobs as they were told in public issue threads, one decisive piece of each log, labelled by what the thread
//! found. `cases/README.md` tells where they come from and how many were right before the catalogue had met them.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "the test reads files; the core does not")]

use std::path::PathBuf;

use mainstay_core::attribute::catalog::Catalog;
use mainstay_core::attribute::class::{Class, Restart};
use mainstay_core::attribute::score::{self, Case, Label};
use mainstay_core::verdict::FaultDomain;

/// Right domains, in percent, below which something broke.
const FLOOR: u32 = 84;

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

/// Reads cases: a header `=== id | class | key=value | …`, then the log; `--- kernel` begins the kernel's lines.
fn cases(text: &str) -> Vec<Case> {
    text.split("\n=== ").skip(1).map(case).collect()
}

fn case(block: &str) -> Case {
    let (header, body) = block.split_once('\n').expect("a header and a log");
    let mut parts = header.split('|').map(str::trim);
    let id = parts.next().expect("an id").to_owned();
    let class = Class::named(parts.next().expect("a class")).expect("a class of the schema");
    let mut label = Label {
        class: Some(class),
        fault_domain: class.domain(),
        restart: Some(usual(class)),
        root_lines: None,
        culprit_rank: None,
    };
    let mut exit_info = None;
    for (key, value) in parts.filter_map(|part| part.split_once('=')) {
        match key {
            "restart" => label.restart = Some(restart(value)),
            "domain" => label.fault_domain = domain(value),
            "exit" => exit_info = Some(value.to_owned()),
            "root" => {
                label.root_lines = Some(value.split(',').map(|of| of.parse().expect("a line")).collect())
            }
            "rank" => label.culprit_rank = Some(value.parse().expect("a rank")),
            _ => {}
        }
    }
    let (log, kernel) = match body.split_once("--- kernel\n") {
        Some((log, kernel)) => (log, Some(kernel.to_owned())),
        None => (body, None),
    };
    let tags = if log.trim().lines().count() == 1 { vec!["one_line".to_owned()] } else { Vec::new() };
    Case {
        id,
        log: log.trim_end().to_owned(),
        exit_info,
        kernel_log: kernel,
        label: Some(label),
        tags,
        ..Case::default()
    }
}

/// What is right for most failures of a class; a case that differs says so.
fn usual(class: Class) -> Restart {
    match class {
        Class::HardwareGpu | Class::HardwareHost => Restart::RestartExcludeNode,
        Class::Preemption => Restart::RestartAfterWait,
        Class::Unknown => Restart::RestartSameNodes,
        _ => Restart::DoNotRestart,
    }
}

fn restart(name: &str) -> Restart {
    Restart::ALL.into_iter().find(|of| of.name() == name || of.name().ends_with(name)).expect("an advice")
}

fn domain(name: &str) -> FaultDomain {
    let all = [
        FaultDomain::User,
        FaultDomain::Hardware,
        FaultDomain::Infrastructure,
        FaultDomain::Platform,
        FaultDomain::Unknown,
    ];
    all.into_iter().find(|of| of.name() == name).expect("a domain")
}

#[test]
fn failures_from_issue_threads_are_judged_well() {
    let catalog = catalog();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let only = std::env::var("BATCH").ok();
    let mut all: Vec<Case> = Vec::new();
    let mut names: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("the cases").map(|entry| entry.expect("an entry").path()).collect();
    names.sort();
    for path in names.iter().filter(|path| path.extension().is_some_and(|ext| ext == "txt")) {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if only.as_ref().is_none_or(|only| *only == name) {
            all.extend(cases(&std::fs::read_to_string(path).expect("a readable file")));
        }
    }
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
    for class in Class::ALL.into_iter().filter(|_| only.is_none()) {
        let right = summary.per_class.get(class.name()).map_or(0, |share| share.class);
        assert!(right > 0, "{} is never the answer where it is right", class.name());
    }
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
