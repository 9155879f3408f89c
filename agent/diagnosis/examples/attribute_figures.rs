//! Measures attribution and prints one JSON object per figure:
//! `cargo run --release -p mainstay-diagnosis --example attribute_figures [CASES.jsonl]`.
//!
//! The figures: the speed at which a core reads logs (bytes per second of CPU time), the time from the logs of 8 ranks
//! (100 MiB in total) to a verdict and a report, the growth of memory, and the share of labelled cases with the right
//! domain, also when each source is judged as if it had never been seen.

#![allow(clippy::disallowed_methods, reason = "an example measures and reads; the core does neither")]

use std::time::Instant;

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::score::{self, Case};
use mainstay_diagnosis::attribution::{Evidence, attribute, explain};

/// The total size of the generated logs in bytes.
const BYTES: usize = 104_857_600;
/// The number of ranks with an equal part of it.
const RANKS: u32 = 8;
/// The bytes passed to a scan at once, as on the command line.
const PIECE: usize = 1 << 20;
/// The number of repetitions of a measurement.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if std::env::args().any(|argument| argument == "--write-logs") {
        let dir = std::env::args().next_back().ok_or("a directory")?;
        return write_logs(std::path::Path::new(&dir));
    }
    let catalog = Catalog::built_in()?;
    let logs: Vec<Vec<u8>> = (0..RANKS).map(|rank| log(rank, BYTES / RANKS as usize)).collect();
    let megabytes = logs.iter().map(Vec::len).sum::<usize>() as f64 / 1e6;
    let before = resident();
    let (mut speeds, mut seconds, mut class) = (Vec::new(), Vec::new(), "");
    for _ in 0..ROUNDS {
        let (started, worked) = (Instant::now(), cpu_seconds());
        let mut evidence = Evidence::default();
        for (rank, log) in (0..).zip(&logs) {
            let mut scan = Scan::new(catalog, "rank.log", Some(rank), Kind::Log);
            log.chunks(PIECE).for_each(|piece| scan.feed(piece));
            evidence.findings.push(scan.finish());
        }
        speeds.push(megabytes / (cpu_seconds() - worked));
        let judged = attribute(catalog, &evidence);
        let report = explain::report(&evidence, &judged);
        seconds.push(started.elapsed().as_secs_f64());
        class = report.class.name();
    }
    if class != "user_config" {
        return Err(format!("the made-up failure was judged as {class}").into());
    }
    figure("attribute.mb_per_s", "MB/s", &speeds);
    figure("attribute.verdict_8x100mb", "s", &seconds);
    figure("attribute.memory_growth", "MiB", &[(resident() - before) / 1024.0]);
    if let Some(file) = std::env::args().nth(1) {
        cross_validated(catalog, &file)?;
    }
    Ok(())
}

/// Leave-one-source-out cross-validation: a signature counts for a source only if it also matches another source, a
/// collected line or a failure in the catalog.
fn cross_validated(catalog: &Catalog, file: &str) -> Result<(), Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(file)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let cases: Vec<Case> = (1..).zip(lines).map(|(number, line)| Case::read(number, line)).collect();
    let share = |answers: &[score::Answer]| {
        let all = score::summary(&cases, answers).all;
        100.0 * f64::from(all.domain) / f64::from(all.cases.max(1))
    };
    let unknown = score::without_memory(catalog, &cases);
    figure("attribute.dev_domain_cv", "%", &[share(&unknown)]);
    figure("attribute.calibration_ece", "", &[score::summary(&cases, &unknown).calibration.expected_error]);
    let seen: Vec<score::Answer> = cases.iter().map(|case| score::answer(catalog, case)).collect();
    figure("attribute.dev_domain_seen", "%", &[share(&seen)]);
    Ok(())
}

fn figure(id: &str, unit: &str, samples: &[f64]) {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (value, min, max) = (sorted[sorted.len() / 2], sorted[0], sorted[sorted.len() - 1]);
    println!(
        "{}",
        serde_json::json!({"id": id, "value": value, "unit": unit, "n": sorted.len(), "min": min, "max": max})
    );
}

/// The CPU time of this process in seconds. It does not depend on other processes on the machine.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    stat.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// Resident memory of this process in KiB; 0 if unknown.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    line.and_then(|line| line.split_whitespace().nth(1)).and_then(|kib| kib.parse().ok()).unwrap_or(0.0)
}

/// The output of a rank in a long run, with the usual harmless noise. At its end rank 3 fails, and the others as a
/// consequence.
fn log(rank: u32, bytes: usize) -> Vec<u8> {
    let mut text = String::with_capacity(bytes + 1024);
    let mut step = 0u64;
    while text.len() < bytes {
        step += 1;
        text.push_str(&format!(
            " iteration {step:8}/ 500000 | consumed samples: {:12} | elapsed time per iteration (ms): 5321.{} | learning rate: 1.000E-04 | global batch size: 1024 | lm loss: 2.{:06} | grad norm: 1.{:03} | number of skipped iterations: 0 |\n",
            step * 1024, step % 10, step % 999_983, step % 997
        ));
        if step.is_multiple_of(20) {
            text.push_str(&format!("[rank{rank}]:[W ProcessGroupNCCL.cpp:1538] Warning: using best-guess GPU for the barrier (function operator())\nnode-{rank}:1234:5678 [{rank}] NCCL INFO Channel 0{rank}/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"));
        }
    }
    if rank == 3 {
        text.push_str("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n");
    } else {
        text.push_str(&format!(
            "[rank{rank}]: RuntimeError: NCCL communicator: Connection closed by remote peer\n"
        ));
    }
    text.into_bytes()
}

/// Writes the same logs to files, for other programs to read.
fn write_logs(dir: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
    for rank in 0..RANKS {
        std::fs::write(dir.join(format!("rank{rank}.log")), log(rank, BYTES / RANKS as usize))?;
    }
    Ok(())
}
