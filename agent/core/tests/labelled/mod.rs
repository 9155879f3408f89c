//! Labelled failures for the tests of attribution, and the catalogue that they are judged by.

#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::PathBuf;

use mainstay_core::attribute::catalog::Catalog;
use mainstay_core::attribute::class::{Class, Restart};
use mainstay_core::attribute::score::{Case, Label};
use mainstay_core::verdict::FaultDomain;

/// The catalogue that is compiled in, or the one in the directory that CATALOG names: for trying out signatures.
pub fn catalog() -> &'static Catalog {
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

/// The labelled cases beside the project, or in the file or folder that MAINSTAY_LABELLED_CASES names.
pub fn labelled() -> Option<Vec<Case>> {
    let named = std::env::var_os("MAINSTAY_LABELLED_CASES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/attribution"),
        PathBuf::from,
    );
    let file = if named.is_dir() { named.join("dev.jsonl") } else { named };
    let Ok(text) = std::fs::read_to_string(&file) else {
        eprintln!("skipped: no labelled cases at {}", file.display());
        return None;
    };
    let cases = text.lines().filter(|line| !line.is_empty());
    Some((1..).zip(cases).map(|(number, line)| Case::read(number, line)).collect())
}

/// The batches of failures from public threads in `tests/cases`, by name; those that BATCH names alone, where it is set.
pub fn batches() -> Vec<(String, Vec<Case>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let only = std::env::var("BATCH").ok();
    let mut names: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("the cases").map(|entry| entry.expect("an entry").path()).collect();
    names.sort();
    let texts = names.iter().filter(|path| path.extension().is_some_and(|ext| ext == "txt"));
    texts
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            (name, cases(&std::fs::read_to_string(path).expect("a readable file")))
        })
        .filter(|(name, _)| only.as_ref().is_none_or(|only| only == name))
        .collect()
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
    FaultDomain::named(name).expect("a domain")
}
