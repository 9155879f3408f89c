//! Events that ranks of the restart benchmarks record, and the faults injected into them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::prelude::*;

#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    Raise,
}

/// Milliseconds since the fault.
pub struct Restart {
    /// To the first Python line of the last rank.
    pub to_python: f64,
    /// To the first step of the last rank.
    pub to_step: f64,
    /// The launcher's resident memory after it, MiB; not a number if it was not measured.
    pub resident_mib: f64,
}

/// A line of the ranks' own record.
#[derive(Clone, Deserialize)]
pub struct Event {
    pub at: u64,
    pub event: String,
    #[serde(default)]
    pub rank: u64,
    #[serde(default)]
    pub pid: i32,
    #[serde(default)]
    pub step: Option<u64>,
    /// The number of its round in one process.
    #[serde(default)]
    pub round: u64,
}

/// A moment in the record: what was recorded before it, and the processes of that time.
#[derive(Default)]
pub struct Moment {
    since: usize,
    old: BTreeSet<i32>,
}

/// The ranks' record, read as it grows.
pub struct Events {
    lines: Lines<Event>,
    world: usize,
}

impl Events {
    /// The record of this many ranks, which may not exist yet.
    pub fn of(path: PathBuf, world: usize) -> Events {
        Events { lines: Lines::of(path), world }
    }

    pub fn path(&self) -> &Path {
        &self.lines.path
    }

    pub fn all(&mut self) -> &[Event] {
        self.lines.poll();
        &self.lines.all
    }

    pub fn position(&mut self) -> Moment {
        Moment { since: self.all().len(), old: BTreeSet::new() }
    }

    /// Now: the processes so far are old ones.
    pub fn now(&mut self) -> Moment {
        Moment { since: self.all().len(), old: self.lines.all.iter().map(|event| event.pid).collect() }
    }

    /// What was recorded since a moment, by processes that are not old.
    fn since<'a>(&'a self, moment: &'a Moment) -> impl Iterator<Item = &'a Event> {
        self.lines.all.iter().skip(moment.since).filter(|event| !moment.old.contains(&event.pid))
    }

    /// The process of each rank, once all have run their first line.
    pub fn started(&mut self) -> Option<BTreeMap<u64, i32>> {
        let lines = self.all().iter().filter(|event| event.event == "python");
        let pids: BTreeMap<u64, i32> = lines.map(|event| (event.rank, event.pid)).collect();
        (pids.len() == self.world).then_some(pids)
    }

    /// The process of each rank, once all of them have made this many steps since a moment.
    pub fn stepping(&mut self, moment: &Moment, steps: usize) -> Option<BTreeMap<u64, i32>> {
        self.lines.poll();
        let mut made: BTreeMap<u64, (i32, usize)> = BTreeMap::new();
        for event in self.since(moment).filter(|event| event.event == "step") {
            let entry = made.entry(event.rank).or_insert((event.pid, 0));
            *entry = if entry.0 == event.pid { (entry.0, entry.1 + 1) } else { (event.pid, 1) };
        }
        let all = made.len() == self.world && made.values().all(|(_, count)| *count >= steps);
        all.then(|| made.into_iter().map(|(rank, (pid, _))| (rank, pid)).collect())
    }

    /// When each rank first had this event since a moment, and in which process.
    fn first(&self, event: &str, moment: &Moment) -> BTreeMap<u64, (u64, i32)> {
        let mut first = BTreeMap::new();
        for seen in self.since(moment).filter(|seen| seen.event == event) {
            first.entry(seen.rank).or_insert((seen.at, seen.pid));
        }
        first
    }

    /// When the last of the ranks first had this event since a moment.
    pub fn last_first(&self, event: &str, moment: &Moment) -> Result<u64> {
        let last = self.first(event, moment).into_values().map(|(at, _)| at).max();
        last.with_context(|| format!("no rank recorded {event}"))
    }

    /// How long a rank needed at most from one event to another, in nanoseconds.
    pub fn longest(&self, from: &str, to: &str, moment: &Moment) -> Result<u64> {
        let (began, ended) = (self.first(from, moment), self.first(to, moment));
        let took = |(rank, (at, _)): (&u64, &(u64, i32))| Some(at.saturating_sub(began.get(rank)?.0));
        ended.iter().filter_map(took).max().with_context(|| format!("no rank recorded {from} and {to}"))
    }

    /// Injects a fault into a rank, and waits for the first steps after it: milliseconds to the last of the
    /// ranks, for the processes that made the first steps.
    pub fn restart(
        &mut self,
        running: &mut Running,
        fault: Fault,
        (victim, pid): (u64, Option<i32>),
    ) -> Result<Restart> {
        let moment = self.now();
        let mut begin = journal::now();
        match fault {
            Fault::Kill => begin = strike(pid.context("the victim has told its process")?, Signal::SIGKILL)?,
            Fault::Raise => fs::write(format!("{}.raise.{victim}", self.path().display()), "")?,
        }
        running.wait_for("first steps after the fault", || self.stepping(&moment, 1))?;
        if fault == Fault::Raise {
            let raised = self.lines.all[moment.since..].iter().find(|event| event.event == "raise");
            begin = raised.context("the victim did not raise")?.at;
        }
        let stepped = self.first("step", &moment);
        let first_line = |(_, pid): &(u64, i32)| {
            let of_it = self.since(&moment).filter(|event| event.pid == *pid && event.event == "python");
            of_it.map(|event| event.at).last()
        };
        let ms = |at: Option<u64>| Some(at?.saturating_sub(begin) as f64 / 1e6);
        Ok(Restart {
            to_python: ms(stepped.values().filter_map(first_line).max()).context("no first lines")?,
            to_step: ms(stepped.values().map(|(at, _)| *at).max()).context("no steps")?,
            resident_mib: f64::NAN,
        })
    }

    /// Several faults in one job, alternating between the ranks: the first after the ranks have made `settle.0`
    /// steps and `before_first` has returned, the others `settle.1` steps after the one before.
    pub fn restarts(
        &mut self,
        running: &mut Running,
        (fault, faults): (Fault, usize),
        settle: (usize, usize),
        before_first: impl FnOnce(&mut Running) -> Result<()>,
    ) -> Result<Vec<Restart>> {
        let (mut restarts, mut moment) = (Vec::new(), Moment::default());
        let mut before_first = Some(before_first);
        while restarts.len() < faults {
            let steps = if restarts.is_empty() { settle.0 } else { settle.1 };
            let pids = running.wait_for("steps of all ranks", || self.stepping(&moment, steps))?;
            if let Some(before_first) = before_first.take() {
                before_first(running)?;
            }
            let victim = (restarts.len() % self.world) as u64;
            restarts.push(self.restart(running, fault, (victim, pids.get(&victim).copied()))?);
            moment = self.position();
        }
        Ok(restarts)
    }
}
