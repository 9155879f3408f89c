//! Texts of known class from which words are learned: lines as the field's programs print them, and failures as they were told in
//! public issue threads (`agent/catalog/cases`, whose README tells the form). The failures are labelled cases as well.

use super::class::{Class, Restart};
use super::score::{Case, Label};
use crate::verdict::FaultDomain;

/// Lines: a class, a tab and the text.
pub const LINES: &str = include_str!("../../../catalog/signatures/lines.tsv");

/// Failures, by batch.
const BATCHES: [(&str, &str); 30] = [
    ("batch1", include_str!("../../../catalog/cases/batch1.txt")),
    ("batch2", include_str!("../../../catalog/cases/batch2.txt")),
    ("batch3", include_str!("../../../catalog/cases/batch3.txt")),
    ("batch4", include_str!("../../../catalog/cases/batch4.txt")),
    ("batch5", include_str!("../../../catalog/cases/batch5.txt")),
    ("batch6", include_str!("../../../catalog/cases/batch6.txt")),
    ("batch7", include_str!("../../../catalog/cases/batch7.txt")),
    ("batch8", include_str!("../../../catalog/cases/batch8.txt")),
    ("batch9", include_str!("../../../catalog/cases/batch9.txt")),
    ("batch10", include_str!("../../../catalog/cases/batch10.txt")),
    ("batch11", include_str!("../../../catalog/cases/batch11.txt")),
    ("batch12", include_str!("../../../catalog/cases/batch12.txt")),
    ("batch13", include_str!("../../../catalog/cases/batch13.txt")),
    ("batch14", include_str!("../../../catalog/cases/batch14.txt")),
    ("batch15", include_str!("../../../catalog/cases/batch15.txt")),
    ("batch16", include_str!("../../../catalog/cases/batch16.txt")),
    ("batch17", include_str!("../../../catalog/cases/batch17.txt")),
    ("batch18", include_str!("../../../catalog/cases/batch18.txt")),
    ("batch19", include_str!("../../../catalog/cases/batch19.txt")),
    ("batch20", include_str!("../../../catalog/cases/batch20.txt")),
    ("batch21", include_str!("../../../catalog/cases/batch21.txt")),
    ("batch22", include_str!("../../../catalog/cases/batch22.txt")),
    ("batch23", include_str!("../../../catalog/cases/batch23.txt")),
    ("batch24", include_str!("../../../catalog/cases/batch24.txt")),
    ("batch25", include_str!("../../../catalog/cases/batch25.txt")),
    ("batch26", include_str!("../../../catalog/cases/batch26.txt")),
    ("batch27", include_str!("../../../catalog/cases/batch27.txt")),
    ("batch28", include_str!("../../../catalog/cases/batch28.txt")),
    ("batch29", include_str!("../../../catalog/cases/batch29.txt")),
    ("batch30", include_str!("../../../catalog/cases/batch30.txt")),
];

/// What stands before the kernel's lines of a case.
const KERNEL: &str = "--- kernel\n";

/// The lines of the field.
pub fn lines<'t>() -> impl Iterator<Item = (Class, &'t str)> {
    LINES.lines().filter_map(|line| {
        let (class, text) = line.split_once('\t')?;
        Some((Class::named(class)?, text))
    })
}

/// The logs of all failures, each with the kernel's lines.
pub(super) fn texts() -> impl Iterator<Item = (Class, String)> {
    blocks().filter_map(|(_, block)| {
        let (header, text) = block.split_once('\n')?;
        Some((Class::named(header.split('|').nth(1)?.trim())?, text.replace(KERNEL, "")))
    })
}

/// The failures as labelled cases, those of one batch in one group.
pub fn cases() -> Vec<Case> {
    blocks().filter_map(|(batch, block)| case(batch, block)).collect()
}

/// What words are learned from of a case.
pub(super) fn text_of(case: &Case) -> String {
    match &case.kernel_log {
        Some(kernel) => format!("{}\n{kernel}", case.log),
        None => case.log.clone(),
    }
}

fn blocks() -> impl Iterator<Item = (&'static str, &'static str)> {
    BATCHES.into_iter().flat_map(|(name, text)| text.split("\n=== ").skip(1).map(move |block| (name, block)))
}

/// A header `id | class | key=value | …`, then the log, and the kernel's lines after `--- kernel`.
fn case(batch: &str, block: &str) -> Option<Case> {
    let (header, body) = block.split_once('\n')?;
    let mut parts = header.split('|').map(str::trim);
    let id = parts.next()?.to_owned();
    let class = Class::named(parts.next()?)?;
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
            "restart" => {
                let named = |of: &Restart| of.name() == value || of.name().ends_with(value);
                label.restart = Some(Restart::ALL.into_iter().find(named)?);
            }
            "domain" => label.fault_domain = FaultDomain::named(value)?,
            "exit" => exit_info = Some(value.to_owned()),
            "root" => label.root_lines = Some(value.split(',').map_while(|of| of.parse().ok()).collect()),
            "rank" => label.culprit_rank = Some(value.parse().ok()?),
            _ => {}
        }
    }
    let (log, kernel) = match body.split_once(KERNEL) {
        Some((log, kernel)) => (log, Some(kernel.to_owned())),
        None => (body, None),
    };
    let tags = if log.trim().lines().count() == 1 { vec!["one_line".to_owned()] } else { Vec::new() };
    Some(Case {
        id,
        log: log.trim_end().to_owned(),
        exit_info,
        kernel_log: kernel,
        label: Some(label),
        tags,
        group: Some(batch.to_owned()),
        ..Case::default()
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_every_case_is_read() {
        assert_eq!(lines().count(), LINES.lines().filter(|line| !line.is_empty()).count());
        let headers =
            BATCHES.iter().flat_map(|(_, text)| text.lines()).filter(|line| line.starts_with("=== "));
        let headers = headers.count();
        assert_eq!((cases().len(), texts().count()), (headers, headers));
    }
}
