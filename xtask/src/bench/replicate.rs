//! Checkpoints on peers: a shard to another agent and back over loopback, compared with plain TCP with the same
//! bytes in the same run, and NVRx's replication over gloo. The restore goes to a host that was on standby and
//! has memory ready, and (`fresh`) to one that has just started and has not.

use serde_json::Value;

use super::prelude::*;

/// The name of plain sockets in the figures.
const PLAIN: &str = "plain TCP";

/// Sizes in GiB, how often each is measured, and how long that may take.
const SIZES: [(usize, usize, Duration); 2] =
    [(1, 5, Duration::from_secs(240)), (4, 2, Duration::from_secs(480))];

/// The time of the only size with `--quick`.
const QUICK: Duration = Duration::from_secs(90);

/// The size of the figures without a size in their name.
const SPOKEN_OF: usize = 1;

/// The size of the state of a rank of NVRx: it has its own copy and one of the other's, twice on this machine.
/// The rate does not depend on it.
const NVRX_MIB: usize = 256;

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let (rounds, quick) = (bench.samples(7, 1), bench.args.quick);
    let families = ["checkpoint.replicate", "checkpoint.restore_peer"];
    let mut theirs = Vec::new();
    if bed.peers.is_some() {
        let what = format!("checkpoint.replicate: {NVRX_NAME} ({NVRX_MIB} MiB)");
        match bench.progress.step(&what, || nvrx(bed, rounds.min(3))) {
            Ok(rates) => theirs = rates,
            Err(error) => eprintln!("{what}: left out: {error:#}"),
        }
    }
    for (gib, most, within) in SIZES.into_iter().filter(|(gib, ..)| !quick || *gib == SPOKEN_OF) {
        let within = if quick { within.min(QUICK) } else { within };
        bench.part(&families, &format!("checkpoint.replicate ({gib} GiB)"), || {
            shard(gib, rounds.min(most), within).map(|reported| figures(gib, &reported, &theirs))
        });
    }
}

/// NVRx's clique replication of two ranks that send each other their states: bytes of one rank's state per
/// second.
fn nvrx(bed: &Bed, rounds: usize) -> Result<Vec<f64>> {
    let folder = paths::fresh(paths::target().join("bench/replicate"))?;
    let out = folder.join("nvrx.json");
    let mut command = Command::new(bed.peers_tool("python"));
    command.arg(script_path("replicate_nvrx.py"));
    command.args([NVRX_MIB, rounds].map(|number| number.to_string())).arg(&out);
    let mut running = Running::start(command, &folder.join("nvrx.log"))?;
    running.wait_for("NVRx's figures", || serde_json::from_slice(&fs::read(&out).ok()?).ok())
}

/// One size, in memory: the shard, its replica and the restored shard.
fn shard(gib: usize, rounds: usize, within: Duration) -> Result<Value> {
    let scratch = leftover_free("mainstay-bench-replicate")?;
    let free = nix::sys::statvfs::statvfs(scratch.path()).context("looking at free memory")?;
    let free = (free.blocks_available() * free.fragment_size()) >> 30;
    let needed = 3 * gib + 1;
    let place = scratch.path().display();
    ensure!(free >= needed as u64, "it needs {needed} GiB at {place}, of which {free} are free");
    let mut run = Command::new(paths::target().join("release/examples/replicate_cost"));
    run.args([gib << 10, rounds].map(|number| number.to_string())).arg(scratch.path());
    // It ends with this process, and is stopped when its time is over; the log shows its progress.
    let log = paths::target().join("bench/replicate.log");
    let mut running = Running::start(run, &log)?;
    running.wait_within(within, "figures", || {
        let printed = fs::read_to_string(&log).ok()?;
        let objects = printed.lines().rev().filter_map(|line| serde_json::from_str(line).ok());
        objects.into_iter().find(Value::is_object)
    })
}

fn figures(gib: usize, reported: &Value, nvrx: &[f64]) -> Vec<Figure> {
    let samples = |key: String| -> Vec<f64> {
        reported[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    let gigabytes = |key: String| -> Vec<f64> { samples(key).into_iter().map(|bytes| bytes / 1e9).collect() };
    let median = |samples: &[f64]| Figure::median("", "", samples).map(|figure| figure.value);
    let mut all = Vec::new();
    // Each transfer is compared with the plain one just before it; those with TLS have their own.
    for tls in ["", "_tls"] {
        let plain = gigabytes(format!("plain_tcp_bytes_per_s{tls}"));
        for (name, key, unit) in
            [("replicate", "replicate", "x loopback TCP"), ("restore_peer", "restore", "x link")]
        {
            let ours = gigabytes(format!("{key}_bytes_per_s{tls}"));
            let shares: Vec<f64> = ours.iter().zip(&plain).map(|(ours, plain)| ours / plain).collect();
            let share = Figure::median(&format!("checkpoint.{name}{tls}"), unit, &shares);
            // Its rounds differ from those of plain TCP.
            let theirs = median(nvrx).zip(median(&plain)).filter(|_| tls.is_empty() && name == "replicate");
            all.extend(share.filter(|_| gib == SPOKEN_OF).map(|share| match theirs {
                Some((rate, link)) => share.beside(NVRX_NAME, Some(rate / 1e9 / link)),
                None => share,
            }));
        }
        for (name, key) in [
            ("replicate", "replicate"),
            ("replicate_first", "replicate_first"),
            ("restore_peer", "restore"),
            ("restore_peer_fresh", "restore_fresh"),
        ] {
            let id = format!("checkpoint.{name}{tls}_{gib}gib");
            let rate = Figure::median(&id, "GB/s", &gigabytes(format!("{key}_bytes_per_s{tls}")));
            all.extend(rate.map(|rate| rate.beside(PLAIN, median(&plain))));
            let id = format!("checkpoint.{name}_cpu{tls}_{gib}gib");
            all.extend(Figure::median(&id, "s/GB", &samples(format!("{key}_cpu_s_per_gb{tls}"))));
        }
    }
    all
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
