//! Measures the speed at which logs are read: `cargo run --release -p mainstay-diagnosis --example scan_speed [FILE]`.
//! Without a file, it reads a generated training log with a failure at its end.

#![allow(clippy::disallowed_methods, reason = "an example measures and reads; the core does neither")]

use std::time::Instant;

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::scan::{Kind, Scan};
use mainstay_diagnosis::attribution::{Evidence, attribute};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = match std::env::args().nth(1) {
        Some(file) => std::fs::read(file)?,
        None => made_up(),
    };
    let started = Instant::now();
    let catalog = Catalog::built_in()?;
    println!("catalog of {} signatures compiled in {:.1?}", catalog.signatures().len(), started.elapsed());
    for _ in 0..3 {
        let started = Instant::now();
        let findings = Scan::of_text(catalog, "log", None, Kind::Log, &text);
        let lines = findings.lines;
        let judged = attribute(catalog, &Evidence { findings: vec![findings], ..Evidence::default() });
        let seconds = started.elapsed().as_secs_f64();
        let megabytes = text.len() as f64 / 1e6;
        println!(
            "{megabytes:.0} MB, {lines} lines in {seconds:.3} s: {:.0} MB/s; {} ({:.2})",
            megabytes / seconds,
            judged.class.name(),
            judged.confidence
        );
    }
    Ok(())
}

/// 100 MB of output of eight ranks, with the usual harmless noise.
fn made_up() -> Vec<u8> {
    let mut text = String::with_capacity(101_000_000);
    let mut step = 0u64;
    while text.len() < 100_000_000 {
        step += 1;
        let rank = step % 8;
        text.push_str(&format!(
            " iteration {step:8}/ 500000 | consumed samples: {:12} | elapsed time per iteration (ms): 5321.{} | learning rate: 1.000E-04 | global batch size: 1024 | lm loss: 2.{:06} | grad norm: 1.{:03} | number of skipped iterations: 0 |\n",
            step * 1024, step % 10, step % 999_983, step % 997
        ));
        if step.is_multiple_of(20) {
            text.push_str(&format!("[rank{rank}]:[W ProcessGroupNCCL.cpp:1538] Warning: using best-guess GPU for the barrier (function operator())\nnode-{rank}:1234:5678 [{rank}] NCCL INFO Channel 0{rank}/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"));
        }
    }
    text.push_str("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n");
    text.into_bytes()
}
