//! A job that trains and saves in turns, with a peer for its steps or without.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::thread;

use serde::Deserialize;
use walkdir::WalkDir;

use crate::bench::agent;
use crate::bench::prelude::*;

/// Slots of memory for the state in its launcher.
const SLOTS: usize = 3;

/// Saves in a turn.
pub const TURN: usize = 5;

/// The time between two polls of a job's progress: polling takes processor time as well, and each replica stays
/// for longer.
const LOOK: Duration = Duration::from_millis(50);

/// What a job saves, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub state_mib: usize,
    /// Steps of 50 ms from one save to the next.
    pub steps: usize,
    pub turns: usize,
    /// The first turns pay for new pages (under some hypervisors seconds per GiB), and in them the agent learns
    /// what replicas cost: at the limit it leaves out one of four for that. Their steps are not counted, and
    /// their replicas are a separate figure.
    pub warm: usize,
}

/// Where the bytes of a save go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    Nowhere,
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
    cycles: Lines<Cycle>,
    /// Where the peer stores replicas, if there is one, and which arrived there.
    replicas: PathBuf,
    arrived: BTreeSet<PathBuf>,
    http: String,
    /// Seconds until the launcher had a GiB of memory for saves.
    pub new_memory: f64,
    _agents: Vec<Running>,
}

impl Job {
    /// Starts it, and waits until it is ready for its first turn.
    pub fn start(bed: &Bed, folder: &Path, load: Load, copies: Copies) -> Result<Job> {
        let folder = &folder.join(copies.name());
        fs::create_dir_all(folder)?;
        let token = folder.join("token");
        fs::write(&token, "a token for a benchmark, and nothing else")?;
        fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
        let address = || free_port().map(|port| format!("127.0.0.1:{port}"));
        let names: &[&str] = if copies == Copies::Replicated { &["own", "peer"] } else { &["own"] };
        let addresses = names.iter().map(|_| address()).collect::<Result<Vec<String>>>()?;
        let peers = addresses.join(",");
        let (http, mut agents, mut socket) = (address()?, Vec::new(), PathBuf::new());
        for (name, listen) in names.iter().zip(&addresses) {
            let home = folder.join(name);
            fs::create_dir_all(&home)?;
            let (store, own_http) =
                (home.join("store"), if agents.is_empty() { http.clone() } else { address()? });
            let mut environment = vec![("MAINSTAY_AGENT_HTTP", Path::new(&own_http))];
            if names.len() > 1 {
                environment.extend([
                    ("MAINSTAY_AGENT_CHECKPOINT_LISTEN", Path::new(listen)),
                    ("MAINSTAY_AGENT_CHECKPOINT_PEERS", Path::new(&peers)),
                    ("MAINSTAY_AGENT_CHECKPOINT_TOKEN_FILE", &token),
                    ("MAINSTAY_AGENT_CHECKPOINT_STORE", &store),
                ]);
            }
            let (agent, at) = agent::start(&home, &environment)?;
            if agents.is_empty() {
                socket = at;
            }
            agents.push(agent);
        }

        let cycles = Lines::of(folder.join("cycles.jsonl"));
        let options = format!(
            "--max-restarts 0 --no-warm --hang off --checkpoint-bandwidth 50M --checkpoint-slots {SLOTS} \
             --checkpoint-memory 2G"
        );
        let mut command = bed.mainstay(&options, &folder.join("logs"));
        command.arg("--checkpoint-dir").arg(folder.join("steps")).arg(script_path("training_rank.py"));
        command.env("MAINSTAY_SOCKET", socket).env("BENCH_OUT", &cycles.path);
        let sizes =
            [("MIB", load.state_mib), ("STEPS", load.steps), ("SAVES", TURN * load.turns), ("TURN", TURN)];
        command.envs(sizes.map(|(name, value)| (format!("BENCH_{name}"), value.to_string())));
        if copies == Copies::Bare {
            command.env("BENCH_COPY", script_path("loopback_copy.py"));
        }
        let mut running = Running::start(command, &folder.join("launcher.log"))?;
        let ready = beside(&cycles.path, "ready");
        running.wait_for_file(&ready)?;
        let reserving_s: f64 =
            fs::read_to_string(&ready)?.trim().parse().context("what the rank reports of its memory")?;
        let new_memory = reserving_s * 1024.0 / (SLOTS * load.state_mib) as f64;
        let replicas = folder.join("peer/store/replicas");
        let arrived = BTreeSet::new();
        Ok(Job { load, running, cycles, replicas, arrived, http, new_memory, _agents: agents })
    }

    /// Lets it take a turn, and waits for the end of the turn.
    pub fn take_turn(&mut self, turn: usize) -> Result<()> {
        fs::write(beside(&self.cycles.path, &format!("turn-{turn}")), "")?;
        let Job { running, cycles, replicas, arrived, .. } = self;
        running.wait_for("the end of a turn", || {
            thread::sleep(LOOK);
            let stored =
                WalkDir::new(&*replicas).into_iter().filter_map(|entry| Some(entry.ok()?.into_path()));
            // Each has its step in its path.
            arrived.extend(stored.filter(|path| path.ends_with("manifest.json")));
            cycles.poll();
            (cycles.all.len() >= (turn + 1) * TURN).then_some(())
        })
    }

    /// The cycles of each of its turns.
    pub fn turns(&self) -> Vec<&[Cycle]> {
        self.cycles.all.chunks(TURN).take(self.load.turns).collect()
    }

    /// Seconds of training that replicas have cost, as measured by its agent.
    pub fn counted_s(&self) -> Result<f64> {
        Ok(counter(&self.http, "mainstay_checkpoint_replication_cost_seconds_total ")?.unwrap_or(0.0))
    }

    /// Percent of the saves of these turns that reached the peer, of those that another one follows in the same
    /// turn: after the last there is time.
    pub fn replicated(&self, turns: Range<usize>) -> Result<f64> {
        ensure!(!self.arrived.is_empty(), "no step came to the peer\n{}", self.running.printed());
        let saves = self.arrived.iter().filter_map(|manifest| save_of(manifest, self.load.steps));
        // Saves are counted from 1: the last one of a turn is a multiple of its length.
        let counted = saves.filter(|save| save % TURN != 0 && turns.contains(&(save / TURN))).count();
        Ok(100.0 * counted as f64 / (turns.len() * (TURN - 1)) as f64)
    }
}

/// A counter of an agent; none while it has none.
fn counter(http: &str, name: &str) -> Result<Option<f64>> {
    let mut stream = TcpStream::connect(http).with_context(|| format!("connecting to {http}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
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
