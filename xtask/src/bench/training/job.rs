//! A job that trains and saves in turns, with a peer for its steps or without.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::bench::launchers::{Bed, script_path};
use crate::bench::process::Running;
use crate::paths;
use crate::venv::activate;

/// One turn, and the start of a job.
const LIMIT: Duration = Duration::from_secs(120);

/// Slots of memory for the state in its launcher.
const SLOTS: usize = 3;

/// Saves in a turn.
pub const TURN: usize = 5;

/// The time between two polls of a job's progress: polling takes processor time as well, and each replica stays for
/// longer.
const LOOK: Duration = Duration::from_millis(50);

/// What a job saves, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub state_mib: usize,
    /// Steps of 50 ms from one save to the next.
    pub steps: usize,
    /// Turns of each job.
    pub turns: usize,
    /// The first turns pay for new pages (under some hypervisors seconds per GiB), and in them the agent learns
    /// what replicas cost: at the limit it leaves out one of four for that. Their steps are not counted, and their
    /// replicas are a separate figure.
    pub warm: usize,
}

/// Where the bytes of a save go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    Nowhere,
    /// To a peer.
    Replicated,
    /// Through one TCP connection of this machine from memory to memory, and no more: the cost of any copy.
    Bare,
}

impl Copies {
    fn name(self) -> &'static str {
        match self {
            Copies::Nowhere => "alone",
            Copies::Replicated => "replicated",
            Copies::Bare => "bare",
        }
    }
}

/// A cycle of a job, from one save to the next.
#[derive(Clone, Deserialize)]
pub struct Cycle {
    pub steps: f64,
    pub took: f64,
    pub cpu: f64,
    /// Products of matrices that make a step.
    pub count: f64,
}

/// A job of one rank, which waits for its turns.
pub struct Job {
    pub load: Load,
    running: Running,
    out: PathBuf,
    /// Where the peer stores replicas, and which arrived there.
    replicas: Option<PathBuf>,
    arrived: BTreeSet<PathBuf>,
    /// Where its agent serves metrics.
    http: String,
    /// Seconds until the launcher had a GiB of memory for saves.
    pub new_memory: f64,
    _agents: Vec<Running>,
}

impl Job {
    /// Starts it, and waits until it is ready for its first turn.
    pub fn start(bed: &Bed, folder: &Path, load: Load, copies: Copies) -> Result<Job> {
        let folder = &folder.join(copies.name());
        let with_peer = copies == Copies::Replicated;
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let token = folder.join("token");
        write_private(&token, "a token for a benchmark, and nothing else")?;
        let addresses = if with_peer { vec![free_address()?, free_address()?] } else { Vec::new() };
        let http = free_address()?;
        let (own, socket) = agent(folder, "own", &http, addresses.first(), &addresses, &token)?;
        let peer_http = free_address()?;
        let peer = addresses
            .get(1)
            .map(|at| agent(folder, "peer", &peer_http, Some(at), &addresses, &token))
            .transpose()?;

        let out = folder.join("cycles.jsonl");
        let mut command = Command::new(paths::release_mainstay());
        command.args(["run", "--max-restarts", "0", "--no-warm", "--hang", "off"]);
        command.args(["--checkpoint-bandwidth", "50M", "--checkpoint-slots", &SLOTS.to_string()]);
        command.args(["--checkpoint-memory", "2G", "--checkpoint-dir"]).arg(folder.join("steps"));
        command.arg("--log-dir").arg(folder.join("logs")).arg(script_path("training_rank.py"));
        command.env("MAINSTAY_SOCKET", socket).env("BENCH_OUT", &out);
        let sizes =
            [("MIB", load.state_mib), ("STEPS", load.steps), ("SAVES", TURN * load.turns), ("TURN", TURN)];
        for (name, value) in sizes {
            command.env(format!("BENCH_{name}"), value.to_string());
        }
        if copies == Copies::Bare {
            command.env("BENCH_COPY", script_path("loopback_copy.py"));
        }
        activate(&mut command, &bed.venv);
        let mut running = Running::start(command, &folder.join("launcher.log"))?;
        let ready = beside(&out, "ready");
        running.wait_for("memory for its saves", LIMIT, || ready.exists().then_some(()))?;
        let reserving_s: f64 =
            fs::read_to_string(&ready)?.trim().parse().context("what the rank says of its memory")?;
        let new_memory = reserving_s * 1024.0 / (SLOTS * load.state_mib) as f64;
        let replicas = peer.is_some().then(|| folder.join("peer/store/replicas"));
        let agents = std::iter::once(own).chain(peer.map(|(peer, _)| peer)).collect();
        Ok(Job { load, running, out, replicas, arrived: BTreeSet::new(), http, new_memory, _agents: agents })
    }

    /// Lets it take a turn, and waits for the end of the turn.
    pub fn take_turn(&mut self, turn: usize) -> Result<()> {
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
    pub fn turns(&self) -> Vec<Vec<Cycle>> {
        let mut cycles = read(&self.out).into_iter();
        (0..self.load.turns).map(|_| cycles.by_ref().take(TURN).collect()).collect()
    }

    /// Seconds of training that replicas have cost, as measured by its agent.
    pub fn counted_s(&self) -> Result<f64> {
        Ok(counter(&self.http, "mainstay_checkpoint_replication_cost_seconds_total ")?.unwrap_or(0.0))
    }

    /// Percent of the saves of these turns that reached the peer, of those that another one follows in the same
    /// turn: after the last there is time.
    pub fn replicated(&self, turns: Range<usize>) -> Result<f64> {
        if self.arrived.is_empty() {
            bail!("no step came to the peer\n{}", self.running.printed());
        }
        let saves = self.arrived.iter().filter_map(|manifest| save_of(manifest, self.load.steps));
        // Saves are counted from 1: the last one of a turn is a multiple of its length.
        let counted = saves.filter(|save| save % TURN != 0 && turns.contains(&(save / TURN))).count();
        Ok(100.0 * counted as f64 / (turns.len() * (TURN - 1)) as f64)
    }
}

/// A counter of an agent; none while it has none.
fn counter(http: &str, name: &str) -> Result<Option<f64>> {
    let mut stream = TcpStream::connect(http).with_context(|| format!("connecting to {http}"))?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {http}\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Ok(value)
}

/// The number of the save that a replica belongs to, from 1, by its path
/// `…/step-000000000010.0/rank-00000/manifest.json`.
fn save_of(manifest: &Path, steps: usize) -> Option<usize> {
    let step = manifest.parent()?.parent()?.file_name()?.to_str()?.strip_prefix("step-")?;
    let (digits, _) = step.split_once('.')?;
    Some(digits.parse::<usize>().ok()? / steps)
}

fn beside(out: &Path, what: &str) -> PathBuf {
    PathBuf::from(format!("{}.{what}", out.display()))
}

/// An agent, and its socket.
fn agent(
    folder: &Path,
    name: &str,
    http: &str,
    listen: Option<&String>,
    peers: &[String],
    token: &Path,
) -> Result<(Running, PathBuf)> {
    let home = folder.join(name);
    fs::create_dir_all(&home).with_context(|| format!("creating {}", home.display()))?;
    let socket = home.join("agent.sock");
    let mut command = Command::new(paths::release_mainstay());
    command.arg("agent").arg("--socket").arg(&socket).arg("--state-dir").arg(home.join("state"));
    command.env("MAINSTAY_AGENT_HTTP", http);
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
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content.as_bytes()).with_context(|| format!("writing {}", path.display()))
}

fn free_address() -> Result<String> {
    // On a machine that measures, no other process takes ports at random.
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
