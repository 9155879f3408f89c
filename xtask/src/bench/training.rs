//! What training pays while its steps go to a peer: the time of steps between saves, with a peer and without.
//!
//! Both agents are on this machine, and so the peer's work is counted too; training itself has one core. On a machine that is shared with
//! others a step takes up to a tenth more in one minute than in the next. So the job with a peer and the one without take turns of a few
//! seconds, and each turn is compared with the one beside it.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::figure::{Figure, Report};
use super::launchers::{Bed, script_path};
use super::process::Running;
use crate::demo::activate;
use crate::paths;
use crate::progress::Progress;

/// One turn, and the start of a job.
const LIMIT: Duration = Duration::from_secs(120);

/// A state of so many MiB is saved after so many steps of 50 ms: 1 GiB a second, which is the limit that agents have by default.
const STATE_MIB: usize = 512;
const STEPS: usize = 10;

/// Saves in a turn, and turns of each job.
const TURN: usize = 5;
const TURNS: usize = 30;

/// The first turns of a job pay for new pages (under some hypervisors seconds a GiB), and the agent does not know yet what they pay for
/// replicas; then it spends what it had saved up. The steps of these turns are not counted, and their replicas are a figure of its own.
const WARM: usize = 5;

/// After a turn the replica of its last save is sent, which must not take from the other job's turn.
const SETTLES: Duration = Duration::from_millis(700);

/// Between two looks at what a job has done: looking takes the processor as well, and each replica stays for longer.
const LOOK: Duration = Duration::from_millis(50);

/// A cycle of a job, from one save to the next.
#[derive(Deserialize)]
struct Cycle {
    steps: f64,
    took: f64,
    cpu: f64,
    /// Products of matrices that make a step.
    count: f64,
}

/// What a pair of jobs was like.
struct Pair {
    /// Percent that a step took longer with a peer.
    slowed: f64,
    /// The same in CPU time of the training thread: what contention for memory adds.
    contended: f64,
    /// Percent of the saves that came to the peer, in the first turns and later; the others were passed over for newer ones.
    replicated_first: f64,
    replicated: f64,
}

/// Measures so many pairs of jobs.
pub fn measure(story: &Progress, bed: &Bed, pairs: usize, report: &mut Report) {
    if !report.wants(&[
        "checkpoint.training_slowed",
        "checkpoint.training_slowed_cpu",
        "checkpoint.training_replicated",
        "checkpoint.training_replicated_first",
    ]) {
        return;
    }
    let mut measured = Vec::new();
    for number in 1..=pairs {
        let name = format!("checkpoint.training_slowed: pair {number} of {pairs}");
        match story.step(&name, || pair(bed)) {
            Ok(pair) => measured.push(pair),
            Err(error) => return report.part("checkpoint.training_slowed", Err(error)),
        }
        let each = |of: fn(&Pair) -> f64| measured.iter().map(of).collect::<Vec<f64>>();
        let figures = [
            Figure::median("checkpoint.training_slowed", "% of a step", &each(|pair| pair.slowed)),
            Figure::median(
                "checkpoint.training_slowed_cpu",
                "% of a step's CPU time",
                &each(|pair| pair.contended),
            ),
            Figure::median("checkpoint.training_replicated", "% of saves", &each(|pair| pair.replicated)),
            Figure::median(
                "checkpoint.training_replicated_first",
                "% of saves",
                &each(|pair| pair.replicated_first),
            ),
        ];
        report.add(figures.into_iter().flatten());
    }
}

fn pair(bed: &Bed) -> Result<Pair> {
    // What the disks of two hosts do is not what is measured.
    let folder = Path::new("/dev/shm").join(format!("mainstay-bench-training-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let measured = in_folder(bed, &folder);
    let _ = fs::remove_dir_all(&folder);
    measured
}

fn in_folder(bed: &Bed, folder: &Path) -> Result<Pair> {
    let mut alone = Job::start(bed, &folder.join("alone"), false)?;
    let mut with_peer = Job::start(bed, &folder.join("replicated"), true)?;
    for turn in 0..TURNS {
        // First one, then the other: what gets slower all the time is no price.
        let order = if turn % 2 == 0 { [&mut alone, &mut with_peer] } else { [&mut with_peer, &mut alone] };
        for job in order {
            job.take_turn(turn)?;
            thread::sleep(SETTLES);
        }
    }
    let (one, other) = (alone.turns(), with_peer.turns());
    let percent_more = |of: fn(&Cycle) -> f64| {
        let all = one.iter().zip(&other).skip(WARM);
        // The mean: what is paid seldom is paid all the same.
        mean(all.map(|(alone, with)| 100.0 * (a_product(with, of) / a_product(alone, of) - 1.0)))
    };
    Ok(Pair {
        slowed: percent_more(|cycle| cycle.took),
        contended: percent_more(|cycle| cycle.cpu),
        replicated_first: with_peer.replicated(0..WARM)?,
        replicated: with_peer.replicated(WARM..TURNS)?,
    })
}

/// What a product took in a turn, seconds. The first cycle does not count: no replica of a save before is on its way in it.
fn a_product(turn: &[Cycle], of: fn(&Cycle) -> f64) -> f64 {
    mean(turn.iter().skip(1).map(|cycle| of(cycle) / cycle.steps / cycle.count))
}

fn mean(all: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = all.fold((0.0, 0.0), |(sum, count), one| (sum + one, count + 1.0));
    sum / count
}

/// A job of one rank, which waits for its turns.
struct Job {
    running: Running,
    out: PathBuf,
    /// Where the peer keeps replicas, and what came there.
    replicas: Option<PathBuf>,
    arrived: BTreeSet<PathBuf>,
    _agents: Vec<Running>,
}

impl Job {
    /// Starts it, and waits until it is ready for its first turn.
    fn start(bed: &Bed, folder: &Path, with_peer: bool) -> Result<Job> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let token = folder.join("token");
        write_private(&token, "a token for a benchmark, and nothing else")?;
        let addresses = if with_peer { vec![free_address()?, free_address()?] } else { Vec::new() };
        let (own, socket) = agent(folder, "own", addresses.first(), &addresses, &token)?;
        let peer =
            addresses.get(1).map(|at| agent(folder, "peer", Some(at), &addresses, &token)).transpose()?;

        let out = folder.join("cycles.jsonl");
        let mut command = Command::new(paths::release_mainstay());
        command.args(["run", "--max-restarts", "0", "--no-warm", "--hang", "off"]);
        command.args(["--checkpoint-bandwidth", "50M", "--checkpoint-slots", "3"]);
        command.args(["--checkpoint-memory", "2G", "--checkpoint-dir"]).arg(folder.join("steps"));
        command.arg("--log-dir").arg(folder.join("logs")).arg(script_path("training_rank.py"));
        command.env("MAINSTAY_SOCKET", socket).env("BENCH_OUT", &out);
        for (name, value) in [("MIB", STATE_MIB), ("STEPS", STEPS), ("SAVES", TURN * TURNS), ("TURN", TURN)] {
            command.env(format!("BENCH_{name}"), value.to_string());
        }
        activate(&mut command, &bed.venv);
        let mut running = Running::start(command, &folder.join("launcher.log"))?;
        let ready = beside(&out, "ready");
        running.wait_for("memory for its saves", LIMIT, || ready.exists().then_some(()))?;
        let replicas = peer.is_some().then(|| folder.join("peer/store/replicas"));
        let agents = std::iter::once(own).chain(peer.map(|(peer, _)| peer)).collect();
        Ok(Job { running, out, replicas, arrived: BTreeSet::new(), _agents: agents })
    }

    /// Lets it take a turn, and waits for the end of that.
    fn take_turn(&mut self, turn: usize) -> Result<()> {
        let go = beside(&self.out, &format!("turn-{turn}"));
        fs::write(&go, "").with_context(|| format!("writing {}", go.display()))?;
        let Job { running, out, replicas, arrived, .. } = self;
        running.wait_for("the end of a turn", LIMIT, || {
            thread::sleep(LOOK);
            replicas.iter().for_each(|replicas| find_manifests(replicas, arrived));
            (read(out).len() >= (turn + 1) * TURN).then_some(())
        })
    }

    /// The cycles of each of its turns.
    fn turns(&self) -> Vec<Vec<Cycle>> {
        let mut cycles = read(&self.out).into_iter();
        (0..TURNS).map(|_| cycles.by_ref().take(TURN).collect()).collect()
    }

    /// Percent of the saves of these turns that came to the peer, of those that another one follows in the same turn: after the last there
    /// is time.
    fn replicated(&self, turns: Range<usize>) -> Result<f64> {
        if self.arrived.is_empty() {
            bail!("no step came to the peer\n{}", self.running.said());
        }
        let saves = self.arrived.iter().filter_map(|manifest| save_of(manifest));
        // Saves are counted from 1: the last one of a turn is a multiple of its length.
        let counted = saves.filter(|save| save % TURN != 0 && turns.contains(&(save / TURN))).count();
        Ok(100.0 * counted as f64 / (turns.len() * (TURN - 1)) as f64)
    }
}

/// Which save a replica is of, from 1 on, by its path `…/step-000000000010.0/rank-00000/manifest.json`.
fn save_of(manifest: &Path) -> Option<usize> {
    let step = manifest.parent()?.parent()?.file_name()?.to_str()?.strip_prefix("step-")?;
    let (digits, _) = step.split_once('.')?;
    Some(digits.parse::<usize>().ok()? / STEPS)
}

fn beside(out: &Path, what: &str) -> PathBuf {
    PathBuf::from(format!("{}.{what}", out.display()))
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
