//! What training pays while its steps go to a peer: the time of steps between saves, with a peer and without, in turn.
//!
//! Both agents are on this machine, and so the peer's work is counted too; training itself has one core.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use super::launchers::{Bed, script_path};
use super::process::Running;
use crate::demo::activate;
use crate::paths;
use crate::progress::Progress;

/// One job.
const LIMIT: Duration = Duration::from_secs(400);

/// A state of so many MiB is saved after so many steps of 50 ms: 1 GiB a second, which is the limit that agents have by default.
const STATE_MIB: usize = 512;
const STEPS: usize = 10;
const SAVES: usize = 100;

/// The first cycles of a job pay for new pages, and the agent does not know yet what they pay for replicas; then it spends what it had saved up.
const WARM: usize = 25;

/// Between two looks at what came to the peer, looks at whether the job has ended, which are 2 ms apart.
const LOOKS: usize = 50;

/// A cycle of a job, from one save to the next.
#[derive(Deserialize)]
struct Cycle {
    steps: f64,
    took: f64,
    cpu: f64,
    /// Products of matrices that make a step.
    count: f64,
}

/// What a job was like.
struct Job {
    /// Seconds that a product took, of each cycle.
    products: Vec<f64>,
    /// The same in CPU time of the training thread: what contention for memory adds.
    cpu: Vec<f64>,
    /// Percent of the saves that came to the peer; the others were passed over for newer ones.
    replicated: f64,
}

/// Measures so many pairs of jobs.
pub fn measure(story: &Progress, bed: &Bed, pairs: usize, report: &mut Report) {
    if !report.wants(&[
        "checkpoint.training_slowed",
        "checkpoint.training_slowed_cpu",
        "checkpoint.training_replicated",
    ]) {
        return;
    }
    let (mut slowed, mut contended, mut replicated) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 1..=pairs {
        let name = format!("checkpoint.training_slowed: pair {pair} of {pairs}");
        let measured = story.step(&name, || Ok((job(bed, false)?, job(bed, true)?)));
        match measured {
            Ok((alone, with_peer)) => {
                slowed.push(percent_more(&with_peer.products, &alone.products));
                contended.push(percent_more(&with_peer.cpu, &alone.cpu));
                replicated.push(with_peer.replicated);
            }
            Err(error) => return report.part("checkpoint.training_slowed", Err(error)),
        }
        let figures = [
            Figure::median("checkpoint.training_slowed", "% of a step", &slowed),
            Figure::median("checkpoint.training_slowed_cpu", "% of a step's CPU time", &contended),
            Figure::median("checkpoint.training_replicated", "% of saves", &replicated),
        ];
        report.add(figures.into_iter().flatten());
    }
}

fn percent_more(with: &[f64], without: &[f64]) -> f64 {
    // The mean: what is paid seldom is paid all the same.
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    100.0 * (mean(with) / mean(without) - 1.0)
}

fn job(bed: &Bed, with_peer: bool) -> Result<Job> {
    // What the disks of two hosts do is not what is measured.
    let folder = Path::new("/dev/shm").join(format!("mainstay-bench-training-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let measured = in_folder(bed, with_peer, &folder);
    let _ = fs::remove_dir_all(&folder);
    measured
}

fn in_folder(bed: &Bed, with_peer: bool, folder: &Path) -> Result<Job> {
    let token = folder.join("token");
    write_private(&token, "a token for a benchmark, and nothing else")?;
    let addresses = if with_peer { vec![free_address()?, free_address()?] } else { Vec::new() };
    let own = agent(folder, "own", addresses.first(), &addresses, &token)?;
    let peer = addresses.get(1).map(|at| agent(folder, "peer", Some(at), &addresses, &token)).transpose()?;

    let out = folder.join("cycles.jsonl");
    let mut command = Command::new(paths::release_mainstay());
    command.args(["run", "--max-restarts", "0", "--no-warm", "--checkpoint-bandwidth", "50M"]);
    command.args(["--checkpoint-slots", "3", "--checkpoint-memory", "2G", "--checkpoint-dir"]);
    command.arg(folder.join("steps")).arg("--log-dir").arg(folder.join("logs"));
    command.arg(script_path("training_rank.py"));
    command.env("MAINSTAY_SOCKET", own.1).env("BENCH_OUT", &out).env("BENCH_MIB", STATE_MIB.to_string());
    command.env("BENCH_STEPS", STEPS.to_string()).env("BENCH_SAVES", SAVES.to_string());
    activate(&mut command, &bed.venv);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    let replicas = folder.join("peer/store/replicas");
    let (mut arrived, mut looks) = (BTreeSet::new(), 0);
    let cycles = running.wait_for("the end of its saves", LIMIT, || {
        // Each replica stays longer than so many looks take, and looking at them takes the processor as well.
        if looks % LOOKS == 0 {
            find_manifests(&replicas, &mut arrived);
        }
        looks += 1;
        let cycles = read(&out);
        (cycles.len() == SAVES).then_some(cycles)
    })?;
    let each = |of: fn(&Cycle) -> f64| -> Vec<f64> {
        cycles.iter().skip(WARM).map(|cycle| of(cycle) / cycle.steps / cycle.count).collect()
    };
    drop(peer);
    if with_peer && arrived.is_empty() {
        bail!("no step came to the peer\n{}", running.said());
    }
    let replicated = 100.0 * arrived.len() as f64 / SAVES as f64;
    Ok(Job { products: each(|cycle| cycle.took), cpu: each(|cycle| cycle.cpu), replicated })
}

/// An agent, and its socket.
fn agent(
    folder: &Path,
    name: &str,
    listen: Option<&String>,
    peers: &[String],
    token: &Path,
) -> Result<(Running, PathBuf)> {
    let home = folder.join(name);
    fs::create_dir_all(&home).with_context(|| format!("creating {}", home.display()))?;
    let socket = home.join("agent.sock");
    let mut command = Command::new(paths::release_mainstay());
    command.arg("agent").arg("--socket").arg(&socket).arg("--state-dir").arg(home.join("state"));
    if let Some(listen) = listen {
        command.env("MAINSTAY_AGENT_CHECKPOINT_LISTEN", listen);
        command.env("MAINSTAY_AGENT_CHECKPOINT_PEERS", peers.join(","));
        command.env("MAINSTAY_AGENT_CHECKPOINT_TOKEN_FILE", token);
        command.env("MAINSTAY_AGENT_CHECKPOINT_STORE", home.join("store"));
    }
    let mut agent = Running::start(command, &home.join("log"))?;
    agent.wait_for("socket", Duration::from_secs(20), || socket.exists().then_some(()))?;
    Ok((agent, socket))
}

fn write_private(path: &Path, content: &str) -> Result<()> {
    use std::io::Write;
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content.as_bytes()).with_context(|| format!("writing {}", path.display()))
}

fn free_address() -> Result<String> {
    // Nobody else takes ports at random on a machine that measures.
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

fn read(path: &Path) -> Vec<Cycle> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The manifests below a store's directory, each of which has its step in its path.
fn find_manifests(directory: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.ends_with("manifest.json") {
            found.insert(path);
        } else if path.is_dir() {
            find_manifests(&path, found);
        }
    }
}
