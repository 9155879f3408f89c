//! Checkpoints on peers: a shard to another agent and back over loopback, beside plain TCP with the same bytes in the same run.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::figure::{Figure, Report};
use crate::command;
use crate::places;
use crate::say::Story;

/// What plain sockets are called in the figures.
const PLAIN: &str = "plain TCP";

/// Measures shards of these sizes.
pub fn measure(story: &Story, rounds: usize, report: &mut Report) {
    for gibibytes in [1, 4] {
        let name = format!("checkpoint.replicate ({gibibytes} GiB)");
        let measured = story.step(&name, || shard(gibibytes, rounds));
        report.part(&name, measured);
    }
}

fn shard(gibibytes: usize, rounds: usize) -> Result<Vec<Figure>> {
    let mut build = Command::new("cargo");
    build.args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "mainstay-tier",
        "--example",
        "replicate_cost",
    ]);
    command::run(build.current_dir(places::root()))?;
    let program = places::target().join("release/examples/replicate_cost");
    let mut run = Command::new(program);
    run.arg((gibibytes << 10).to_string()).arg(rounds.to_string());
    let told = command::output(&mut run)?;
    let told: Value = serde_json::from_str(told.trim()).context("what replicate_cost printed")?;
    Ok(figures(gibibytes, &told))
}

fn figures(gibibytes: usize, told: &Value) -> Vec<Figure> {
    let samples = |name: &str| -> Vec<f64> {
        told.get(name).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    let gigabytes = |name: &str| -> Vec<f64> { samples(name).into_iter().map(|bytes| bytes / 1e9).collect() };
    let plain = gigabytes("plain_tcp_bytes_per_s");
    let id = |name: &str| format!("checkpoint.{name}_{gibibytes}gib");
    let rate = |name: &str, key: &str| {
        Figure::median(&id(name), "GB/s", &gigabytes(key)).map(|figure| figure.beside(PLAIN, &plain))
    };
    let cpu = |name: &str, key: &str| Figure::median(&id(name), "s/GB", &samples(key));
    [
        rate("replicate", "replicate_bytes_per_s"),
        rate("replicate_first", "replicate_first_bytes_per_s"),
        cpu("replicate_cpu", "replicate_cpu_s_per_gb"),
        rate("restore_peer", "restore_bytes_per_s"),
        cpu("restore_peer_cpu", "restore_cpu_s_per_gb"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_stands_beside_that_of_plain_tcp() {
        let told =
            serde_json::json!({"plain_tcp_bytes_per_s": [2e9, 2e9], "replicate_bytes_per_s": [1.8e9, 2.2e9]});
        let figures = figures(1, &told);
        assert_eq!(figures.len(), 1);
        assert_eq!(
            (figures[0].id.as_str(), figures[0].value, figures[0].ratio),
            ("checkpoint.replicate_1gib", 2.0, Some(1.0))
        );
    }
}
