//! The straggler judge on public traces of real jobs. They are not part of this repository: `MAINSTAY_TRACES` names a
//! directory with the available ones, as CSV with the columns of the publication. Missing traces are skipped.
//!
//! - `AR.csv`, `SE.csv`, `ST.csv`: ByteDance-Seed/StragglerAnalysis, `data/trace-*.parquet` written as CSV
//! - `job_1_norm.csv` to `job_4_norm.csv`: alibaba/clusterdata, `cluster-trace-gpu-v2020/mini-batch-time/data`

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::path::PathBuf;

use mainstay_model::finding::{Finding, FindingKind};
use mainstay_progress::straggler::{Columns, Limits, Report, Trace};

fn judged(name: &str) -> Option<Report> {
    let path = PathBuf::from(std::env::var_os("MAINSTAY_TRACES")?).join(name);
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    let ours = |name| match name {
        "optype" => "section",
        "start_ts" => "start",
        "worker" | "Worker" => "rank",
        "time" => "step",
        "batch_time_norm" => "duration",
        other => other,
    };
    let columns = Columns::from_header(lines.next()?.split(',').map(|name| ours(name.trim_matches('"'))))
        .expect("the columns are known");
    let mut trace = Trace::default();
    for line in lines {
        let fields: Vec<&str> = line.split(',').map(|field| field.trim_matches('"')).collect();
        columns.spans(&fields).expect("spans").into_iter().for_each(|span| trace.push(span));
    }
    let report = trace.judge(Limits::default(), &[]);
    println!("{name}: {} ranks, {} steps, {}", report.ranks, report.steps, report.self_time);
    for finding in &report.findings {
        println!("  told at {}: {}\n    {}", finding.step, finding.headline, finding.evidence.join("\n    "));
    }
    Some(report)
}

fn kinds(report: &Report) -> Vec<FindingKind> {
    let started = report.findings.iter().filter(|finding| !finding.over);
    started.map(|finding| finding.what).collect()
}

fn slow_ranks(report: &Report) -> Vec<&Finding> {
    report.findings.iter().filter(|finding| finding.what == FindingKind::SlowRank && !finding.over).collect()
}

#[test]
fn one_slow_device_is_named() {
    let Some(report) = judged("AR.csv") else { return };
    assert_eq!(kinds(&report), [FindingKind::SlowRank]);
    assert_eq!(report.findings[0].ranks[0].0, 0);
    let cost = report.findings[0].cost_percent.expect("the steps' length is known");
    assert!((40.0..60.0).contains(&cost), "the published analysis says 49 %, we {cost} %");
}

#[test]
fn uneven_sequences_are_not_a_slow_device() {
    let Some(report) = judged("SE.csv") else { return };
    assert_eq!(kinds(&report), [FindingKind::DataImbalance]);
}

#[test]
fn a_stage_with_more_layers_is_not_a_slow_device() {
    let Some(report) = judged("ST.csv") else { return };
    assert_eq!(kinds(&report), [FindingKind::StageImbalance]);
    assert_eq!(report.findings[0].stage, Some(3));
    let cost = report.findings[0].cost_percent.expect("the steps' length is known");
    assert!((12.0..25.0).contains(&cost), "the published analysis says 18 %, we {cost} %");
}

#[test]
fn only_the_worker_that_becomes_slow_is_named_with_its_onset() {
    let Some(report) = judged("job_1_norm.csv") else { return };
    assert_eq!(kinds(&report), [FindingKind::SlowRank]);
    let found = &report.findings[0];
    assert_eq!(found.ranks[0].0, 6);
    // Sample 181, which is mini-batch 1811.
    assert!((1801..=1831).contains(&found.since_step), "{}", found.since_step);
    assert!(report.findings.iter().any(|finding| finding.over), "it is over before the trace ends");
}

#[test]
fn workers_with_a_constant_difference_are_not_slow() {
    let Some(report) = judged("job_2_norm.csv") else { return };
    assert!(slow_ranks(&report).is_empty());
}

#[test]
fn workers_that_become_slow_late_are_reported_with_their_cost() {
    for name in ["job_3_norm.csv", "job_4_norm.csv"] {
        let Some(report) = judged(name) else { return };
        for found in slow_ranks(&report) {
            assert!(found.cost_percent.is_some() && found.confidence > 0.5);
        }
    }
}
