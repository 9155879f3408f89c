//! Which run is explained when none is named.

use std::path::{Path, PathBuf};

use anyhow::Context;
use mainstay_core::entry::{Body, Entry, Fact};
use mainstay_core::time::Wall;

use super::{Chosen, read};
use crate::store::journal::JournalReader;

/// A run directory, with what the first entry of its journal has of the start.
struct Run {
    dir: PathBuf,
    started: Wall,
    started_in: PathBuf,
}

/// What became of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Failed,
    Running,
    /// It ended and nothing failed.
    Well,
}

/// The newest run that failed or is running: of those that were started in this directory if there are any, else of all.
pub(super) fn to_explain(runs: &Path) -> anyhow::Result<Chosen> {
    let here = std::env::current_dir().unwrap_or_default();
    choose(runs, &here)?.with_context(|| format!("there is no run in {}; name one", runs.display()))
}

/// The run that was started last.
pub(super) fn newest(runs: &Path) -> Option<PathBuf> {
    newest_first(runs).into_iter().next().map(|run| run.dir)
}

fn choose(runs: &Path, here: &Path) -> anyhow::Result<Option<Chosen>> {
    let all = newest_first(runs);
    let of_here: Vec<&Run> = all.iter().filter(|run| run.started_in == here).collect();
    let candidates = if of_here.is_empty() { all.iter().collect() } else { of_here };
    let mut notes = Vec::new();
    for (place, run) in candidates.iter().enumerate() {
        let state = state(&read(&run.dir)?);
        if state == State::Well {
            if place == 0 {
                notes.push(format!("{}: it ended and has no failure", run.told()));
            }
            continue;
        }
        let which = match (state, place) {
            (State::Running, _) => "the newest run, which has not ended",
            (_, 0) => "the newest run",
            _ => "the newest run with a failure",
        };
        notes.push(format!("explaining {which}: {}", run.told()));
        return Ok(Some(Chosen { run_dir: run.dir.clone(), notes }));
    }
    // None failed: the newest says so.
    Ok(candidates.first().map(|run| Chosen { run_dir: run.dir.clone(), notes: Vec::new() }))
}

impl Run {
    fn told(&self) -> String {
        let name = self.dir.file_name().unwrap_or(self.dir.as_os_str()).to_string_lossy();
        let place = match self.started_in.as_os_str().is_empty() {
            true => String::new(),
            false => format!(" in {}", self.started_in.display()),
        };
        format!("{name}, started {}{place}", self.started)
    }
}

/// The runs by when they were started: the time of a directory says when something in it was last made, and not that.
fn newest_first(runs: &Path) -> Vec<Run> {
    let entries = std::fs::read_dir(runs).into_iter().flatten().flatten();
    let mut all: Vec<Run> = entries.filter_map(|entry| begun(entry.path())).collect();
    all.sort_by_key(|run| std::cmp::Reverse(run.started));
    all
}

fn begun(dir: PathBuf) -> Option<Run> {
    let journal = dir.join("journal");
    let first = JournalReader::new(&journal).entries_after(0, 1).ok()?.entries.into_iter().next()?;
    let started_in = match first.body {
        Body::Fact(Fact::JobStarted(spec)) => spec.started_in.into(),
        _ => PathBuf::new(),
    };
    Some(Run { dir, started: first.at.wall, started_in })
}

fn state(entries: &[Entry]) -> State {
    let has = |what: fn(&Body) -> bool| entries.iter().any(|entry| what(&entry.body));
    if has(|body| matches!(body, Body::Verdict(_) | Body::Finding(_))) {
        State::Failed
    } else if has(|body| matches!(body, Body::Fact(Fact::JobEnded { .. } | Fact::LauncherLost { .. }))) {
        State::Well
    } else {
        State::Running
    }
}
