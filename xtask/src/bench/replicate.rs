//! Checkpoints on peers: a shard to another agent and back over loopback, compared with plain TCP with the same
//! bytes in the same run, and NVRx's replication over gloo. The restore goes to a host that was on standby and has
//! memory ready, and (`fresh`) to one that has just started and has not.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::Value;

use super::figure::{Figure, Report};
use super::peers::{self, NVRX_NAME};
use super::process::Running;
use super::replicate_nvrx;
use crate::paths;
use crate::progress::Progress;

/// The name of plain sockets in the figures.
const PLAIN: &str = "plain TCP";

/// The suffix of figures measured with TLS.
const TLS: &str = "_tls";

/// The prefix of the folders of runs; the process id follows.
const SCRATCH: &str = "mainstay-bench-";

/// Sizes in GiB, how often each is measured, and how long that may take.
const SIZES: [(usize, usize, Duration); 2] =
    [(1, 5, Duration::from_secs(240)), (4, 2, Duration::from_secs(480))];

/// The time of the only size with `--quick`.
const QUICK: Duration = Duration::from_secs(90);

/// The size of the figures without a size in their name.
const SPOKEN_OF: usize = 1;

/// Measures shards of these sizes, each `rounds` times at most.
pub fn measure(progress: &Progress, rounds: usize, quick: bool, with_peers: bool, report: &mut Report) {
    let nvrx = if with_peers && !quick { nvrx(progress, rounds.min(3)) } else { Vec::new() };
    let sizes = if quick { &SIZES[..1] } else { &SIZES[..] };
    for &(gibibytes, most, within) in sizes {
        if !report.wants_some_of("checkpoint.replicate") {
            continue;
        }
        let within = if quick { within.min(QUICK) } else { within };
        let name = format!("checkpoint.replicate ({gibibytes} GiB)");
        let measured = progress.step(&name, || shard(gibibytes, rounds.min(most), within, &nvrx));
        report.part(&name, measured);
    }
}

/// The rate of NVRx in each round; empty, with the reason on standard error, if it cannot be measured.
fn nvrx(progress: &Progress, rounds: usize) -> Vec<f64> {
    let Some(peers) = peers::ensure(progress) else { return Vec::new() };
    let measured =
        progress.step("checkpoint.replicate: NVRx (256 MiB)", || replicate_nvrx::rates(&peers, rounds));
    measured.unwrap_or_else(|error| {
        eprintln!("checkpoint.replicate: NVRx is left out: {error:#}");
        Vec::new()
    })
}

fn shard(gibibytes: usize, rounds: usize, within: Duration, nvrx: &[f64]) -> Result<Vec<Figure>> {
    // The shard, its replica and the restored shard are in memory.
    let memory = Path::new("/dev/shm");
    remove_what_cut_runs_left(memory);
    let scratch = memory.join(format!("{SCRATCH}{}", std::process::id()));
    let (needed, free) = (3 * gibibytes + 1, free_gibibytes(memory));
    if free < needed {
        bail!("it needs {needed} GiB in {}, of which {free} are free", memory.display());
    }
    let measured = timed(gibibytes, rounds, within, &scratch);
    let measured = measured.map(|reported| figures(gibibytes, &reported, nvrx));
    // A stopped benchmark could not clean up.
    let _ = fs::remove_dir_all(&scratch);
    measured
}

fn timed(gibibytes: usize, rounds: usize, within: Duration, scratch: &Path) -> Result<Value> {
    let program = paths::target().join("release/examples/replicate_cost");
    let mut run = Command::new(program);
    run.arg((gibibytes << 10).to_string()).arg(rounds.to_string()).arg(scratch);
    let log = paths::target().join("bench/replicate.log");
    fs::create_dir_all(paths::target().join("bench"))?;
    // It ends with this process, and is stopped when its time is over; the log shows its progress.
    let mut running = Running::start(run, &log)?;
    running.wait_for("figures", within, || {
        let printed = fs::read_to_string(&log).ok()?;
        printed
            .lines()
            .rev()
            .find_map(|line| serde_json::from_str::<Value>(line).ok().filter(Value::is_object))
    })
}

/// Gigabytes stay in memory until they are removed, and a killed run could not remove them.
fn remove_what_cut_runs_left(memory: &Path) {
    for entry in fs::read_dir(memory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.strip_prefix(SCRATCH)) else { continue };
        if !Path::new("/proc").join(pid).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn free_gibibytes(at: &Path) -> usize {
    let free =
        nix::sys::statvfs::statvfs(at).map_or(0, |found| found.blocks_available() * found.fragment_size());
    usize::try_from(free >> 30).unwrap_or(0)
}

fn figures(gibibytes: usize, reported: &Value, nvrx: &[f64]) -> Vec<Figure> {
    let samples = |name: &str| -> Vec<f64> {
        reported.get(name).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    let gigabytes = |name: &str| -> Vec<f64> { samples(name).into_iter().map(|bytes| bytes / 1e9).collect() };
    // Each transfer is compared with the plain one just before it; those with TLS have their own.
    let plain = |suffix: &str| gigabytes(&format!("plain_tcp_bytes_per_s{suffix}"));
    let share = |name: &str, key: &str, suffix: &str, unit: &str| {
        let (ours, plain) = (gigabytes(&format!("{key}{suffix}")), plain(suffix));
        let shares: Vec<f64> = ours.iter().zip(&plain).map(|(ours, plain)| ours / plain).collect();
        (gibibytes == SPOKEN_OF)
            .then(|| Figure::median(&format!("checkpoint.{name}{suffix}"), unit, &shares))?
    };
    let id = |name: &str| format!("checkpoint.{name}_{gibibytes}gib");
    let rate = |name: &str, key: &str| {
        let suffix = if key.ends_with(TLS) { TLS } else { "" };
        Figure::median(&id(name), "GB/s", &gigabytes(key)).map(|figure| figure.beside(PLAIN, &plain(suffix)))
    };
    // Its rounds differ from those of plain TCP.
    let link = Figure::quantile_of(&plain(""), 0.5).unwrap_or(f64::NAN);
    let nvrx: Vec<f64> = nvrx.iter().map(|rate| rate / 1e9 / link).collect();
    let beside_nvrx = |figure: Figure| if nvrx.is_empty() { figure } else { figure.beside(NVRX_NAME, &nvrx) };
    let cpu = |name: &str, key: &str| Figure::median(&id(name), "s/GB", &samples(key));
    [
        share("replicate", "replicate_bytes_per_s", "", "x loopback TCP").map(beside_nvrx),
        share("restore_peer", "restore_bytes_per_s", "", "x link"),
        share("replicate", "replicate_bytes_per_s", TLS, "x loopback TCP"),
        share("restore_peer", "restore_bytes_per_s", TLS, "x link"),
        rate("replicate", "replicate_bytes_per_s"),
        rate("replicate_first", "replicate_first_bytes_per_s"),
        cpu("replicate_cpu", "replicate_cpu_s_per_gb"),
        rate("restore_peer", "restore_bytes_per_s"),
        cpu("restore_peer_cpu", "restore_cpu_s_per_gb"),
        rate("restore_peer_fresh", "restore_fresh_bytes_per_s"),
        cpu("restore_peer_fresh_cpu", "restore_fresh_cpu_s_per_gb"),
        rate("replicate_tls", "replicate_bytes_per_s_tls"),
        cpu("replicate_cpu_tls", "replicate_cpu_s_per_gb_tls"),
        rate("restore_peer_tls", "restore_bytes_per_s_tls"),
        cpu("restore_peer_cpu_tls", "restore_cpu_s_per_gb_tls"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_compared_with_that_of_plain_tcp() {
        let reported =
            serde_json::json!({"plain_tcp_bytes_per_s": [2e9, 2e9], "replicate_bytes_per_s": [1.8e9, 2.2e9]});
        let figures_of = |nvrx: &[f64]| super::figures(1, &reported, nvrx);
        let figures = figures_of(&[]);
        let reported: Vec<(&str, f64, Option<f64>)> =
            figures.iter().map(|figure| (figure.id.as_str(), figure.value, figure.ratio)).collect();
        assert_eq!(
            reported,
            [("checkpoint.replicate", 1.0, None), ("checkpoint.replicate_1gib", 2.0, Some(1.0))]
        );
        // A tenth of the rate of plain TCP.
        let beside = &figures_of(&[2e8, 2e8])[0];
        assert_eq!((beside.peer.as_deref(), beside.ratio), (Some(NVRX_NAME), Some(10.0)));
    }
}
