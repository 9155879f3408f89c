//! Events that ranks of the restart benchmarks record, and the faults injected into them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::journal;

/// How a rank ends.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// An exception.
    Raise,
}

/// Milliseconds since the fault.
pub struct Restart {
    /// To the first Python line of the last rank.
    pub to_python: f64,
    /// To the first step of the last rank.
    pub to_step: f64,
    /// The launcher's resident memory after it, MiB.
    pub resident_mib: Option<f64>,
}

/// Injects the fault, and returns when.
pub fn strike(fault: Fault, events: &Path, victim: u64, pid: Option<i32>) -> Result<u64> {
    let at = journal::now();
    match fault {
        Fault::Kill => {
            let pid = pid.context("the victim has told its process")?;
            kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing {pid}"))?;
        }
        Fault::Raise => {
            let trigger = format!("{}.raise.{victim}", events.display());
            fs::write(&trigger, "").with_context(|| format!("writing {trigger}"))?;
        }
    }
    Ok(at)
}

/// A line of the ranks' own record.
#[derive(Clone, Deserialize)]
pub struct Event {
    at: u64,
    event: String,
    rank: u64,
    /// Its process.
    pub pid: i32,
}

/// The ranks' record, read as it grows.
pub struct Events {
    /// Where they write it.
    pub path: PathBuf,
    world: usize,
    read_to: usize,
    /// What was read so far.
    pub all: Vec<Event>,
}

impl Events {
    /// The record of this many ranks, which may not exist yet.
    pub fn of(path: PathBuf, world: usize) -> Events {
        Events { path, world, read_to: 0, all: Vec::new() }
    }

    /// Reads new entries.
    pub fn poll(&mut self) {
        let Ok(text) = fs::read_to_string(&self.path) else { return };
        let new = text.get(self.read_to..).unwrap_or_default();
        let whole = new.rfind('\n').map_or(0, |last| last + 1);
        self.all.extend(new[..whole].lines().filter_map(|line| serde_json::from_str(line).ok()));
        self.read_to += whole;
    }

    /// The process of each rank, once all have run their first line.
    pub fn started(&mut self) -> Option<BTreeMap<u64, i32>> {
        self.poll();
        let lines = self.all.iter().filter(|event| event.event == "python");
        let pids: BTreeMap<u64, i32> = lines.map(|event| (event.rank, event.pid)).collect();
        (pids.len() == self.world).then_some(pids)
    }

    /// The process of each rank, once all of them have made this many steps since a position in the record and in
    /// processes that are not old.
    pub fn stepping(
        &mut self,
        since: usize,
        old: &BTreeSet<i32>,
        steps: usize,
    ) -> Option<BTreeMap<u64, i32>> {
        self.poll();
        let mut made: BTreeMap<u64, (i32, usize)> = BTreeMap::new();
        for event in self.all.get(since..)?.iter().filter(|e| e.event == "step" && !old.contains(&e.pid)) {
            let entry = made.entry(event.rank).or_insert((event.pid, 0));
            *entry = if entry.0 == event.pid { (entry.0, entry.1 + 1) } else { (event.pid, 1) };
        }
        let all = made.len() == self.world && made.values().all(|(_, count)| *count >= steps);
        all.then(|| made.into_iter().map(|(rank, (pid, _))| (rank, pid)).collect())
    }

    /// When the last of the ranks made its first step since a position in the record, in a process that is not old.
    pub fn last_first_step(&self, since: usize, old: &BTreeSet<i32>) -> Option<u64> {
        self.last_first("step", since, old)
    }

    /// When the last of the ranks first had this event since a position in the record, in a process that is not
    /// old.
    pub fn last_first(&self, event: &str, since: usize, old: &BTreeSet<i32>) -> Option<u64> {
        self.first(event, since, old).into_values().max()
    }

    /// How long a rank needed at most from one event to another, in nanoseconds, in processes that are not old.
    pub fn longest(&self, from: &str, to: &str, since: usize, old: &BTreeSet<i32>) -> Option<u64> {
        let (began, ended) = (self.first(from, since, old), self.first(to, since, old));
        let took = |(rank, at): (&u64, &u64)| Some(at.saturating_sub(*began.get(rank)?));
        ended.iter().filter_map(took).max()
    }

    /// When each rank first had this event.
    fn first(&self, event: &str, since: usize, old: &BTreeSet<i32>) -> BTreeMap<u64, u64> {
        let mut first: BTreeMap<u64, u64> = BTreeMap::new();
        for seen in self.all.iter().skip(since).filter(|e| e.event == event && !old.contains(&e.pid)) {
            first.entry(seen.rank).or_insert(seen.at);
        }
        first
    }

    /// From the fault to the last of the ranks, for the processes that made the first steps.
    pub fn restart_since(
        &self,
        since: usize,
        old: &BTreeSet<i32>,
        fault: Fault,
        asked_at: u64,
    ) -> Result<Restart> {
        let new = &self.all[since..];
        let begin = match fault {
            Fault::Kill => asked_at,
            Fault::Raise => new.iter().find(|e| e.event == "raise").context("the victim did not raise")?.at,
        };
        let mut python: BTreeMap<i32, u64> = BTreeMap::new();
        let mut step: BTreeMap<u64, (i32, u64)> = BTreeMap::new();
        for event in new.iter().filter(|event| !old.contains(&event.pid)) {
            match event.event.as_str() {
                "python" => drop(python.insert(event.pid, event.at)),
                "step" => drop(step.entry(event.rank).or_insert((event.pid, event.at))),
                _ => {}
            }
        }
        let last_step = step.values().map(|(_, at)| *at).max().context("no steps")?;
        let first_lines = step.values().filter_map(|(pid, _)| python.get(pid));
        let last_python = *first_lines.max().context("no first lines")?;
        let ms = |at: u64| at.saturating_sub(begin) as f64 / 1e6;
        Ok(Restart { to_python: ms(last_python), to_step: ms(last_step), resident_mib: None })
    }
}
