//! Measures the time to parse a line of a storm in the kernel log: `cargo run --release -p mainstay-health --example
//! kmsg_speed`.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "an example measures and tells")]

use std::time::Instant;

use mainstay_health::parse::log::LogReader;
use mainstay_model::time::Mono;

/// Lines of a storm: corrected errors, and lines without meaning.
const STORM: [&str; 6] = [
    "pcieport 0000:16:00.0: AER: Corrected error received: 0000:17:00.0",
    "nvidia 0000:17:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    "nvidia 0000:17:00.0:   device [10de:2330] error status/mask=00000001/0000a000",
    "mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:803:(pid 33): ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation(0x2), syndrome (0x305684), err(-22)",
    "IN=ens1 OUT= MAC=00:00 SRC=10.0.0.1 DST=10.0.0.2 LEN=60 TOS=0x00 PROTO=TCP SPT=1 DPT=2 WINDOW=64240 SYN",
    "audit: type=1400 audit(1700000000.123:45): apparmor=\"DENIED\" operation=\"open\" comm=\"python\"",
];

/// The form of a line in a kind of log.
type Form = fn(&str) -> String;

fn main() {
    const ROUNDS: u64 = 200_000;
    let forms: [(&str, Form); 3] = [
        ("kmsg", |line| format!("4,1339,5140900123,-;{line}")),
        ("dmesg", |line| format!("[ 4711.123456] {line}")),
        ("syslog", |line| format!("Nov 21 03:04:05 gpu-17 kernel: [ 4711.123456] {line}")),
    ];
    for (name, form) in forms {
        let lines = STORM.map(form);
        let mut reader = LogReader::default();
        let began = Instant::now();
        let mut facts = 0u64;
        for round in 0..ROUNDS {
            for line in &lines {
                facts += u64::from(reader.line(Mono(round * 10_000), line, round).is_some());
            }
        }
        let nanos = began.elapsed().as_nanos() as f64 / (ROUNDS * lines.len() as u64) as f64;
        println!("{name}: {nanos:.0} ns a line, {facts} facts");
    }
}
