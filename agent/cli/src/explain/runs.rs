//! Which run is explained if none is named.

use std::path::{Path, PathBuf};

use anyhow::Context;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::time::Wall;

use super::{Chosen, read};
use mainstay_journal::store::journal::JournalReader;

/// A run directory, with the start data in the first entry of its journal.
struct Run {
    dir: PathBuf,
    started: Wall,
    started_in: PathBuf,
    /// The run that its checkpoints belong to.
    checkpoints: String,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Failed,
    Running,
    /// It ended without a failure.
    Well,
}

/// The newest run that failed or is running: among those started in this directory if there are any, else among
/// all.
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
                notes.push(format!("{}: it ended and has no failure", run.describe()));
            }
            continue;
        }
        let which = match (state, place) {
            (State::Running, _) => "the newest run, which has not ended",
            (_, 0) => "the newest run",
            _ => "the newest run with a failure",
        };
        notes.push(format!("explaining {which}: {}", run.describe()));
        return Ok(Some(Chosen { run_dir: run.dir.clone(), notes }));
    }
    // None failed: the newest run reports that.
    Ok(candidates.first().map(|run| Chosen { run_dir: run.dir.clone(), notes: Vec::new() }))
}

impl Run {
    fn describe(&self) -> String {
        let name = self.dir.file_name().unwrap_or(self.dir.as_os_str()).to_string_lossy();
        let place = match self.started_in.as_os_str().is_empty() {
            true => String::new(),
            false => format!(" in {}", self.started_in.display()),
        };
        let run = match self.checkpoints.is_empty() {
            true => String::new(),
            false => format!(", run id {}", self.checkpoints),
        };
        format!("{name}, started {}{place}{run}", self.started)
    }
}

/// The runs by start time: the time of a directory changes whenever something in it is created.
fn newest_first(runs: &Path) -> Vec<Run> {
    let entries = std::fs::read_dir(runs).into_iter().flatten().flatten();
    let mut all: Vec<Run> = entries.filter_map(|entry| run_in(entry.path())).collect();
    all.sort_by_key(|run| std::cmp::Reverse(run.started));
    all
}

fn run_in(dir: PathBuf) -> Option<Run> {
    let journal = dir.join("journal");
    let first = JournalReader::new(&journal).entries_after(0, 1).ok()?.entries.into_iter().next()?;
    let (started_in, checkpoints) = match first.body {
        Body::Fact(Fact::JobStarted(spec)) => (spec.started_in.into(), spec.run),
        _ => (PathBuf::new(), String::new()),
    };
    Some(Run { dir, started: first.at.wall, started_in, checkpoints })
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

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_diagnosis::root_rank::start_failed;
    use mainstay_journal::store::journal::{Journal, Limits};
    use mainstay_model::entry::JobSpec;
    use mainstay_model::id::{BootId, Incident};
    use mainstay_model::time::{Mono, Stamp};

    const HERE: &str = "/home/me/here";
    const ELSEWHERE: &str = "/home/me/elsewhere";

    /// A run whose journal has a start at `second` in `place`, and then these entries.
    fn run(runs: &Path, name: &str, second: i64, place: &str, then: Vec<Body>) {
        let mut journal =
            Journal::open(&runs.join(name).join("journal"), Limits::default(), BootId::default()).unwrap();
        let spec = JobSpec { started_in: place.to_owned(), ..JobSpec::default() };
        let at = Stamp { mono: Mono(1), wall: Wall(second * 1_000_000_000) };
        for body in std::iter::once(Body::Fact(Fact::JobStarted(spec))).chain(then) {
            journal.append(at, None, None, body).unwrap();
        }
    }

    fn failed() -> Vec<Body> {
        let verdict = start_failed(Incident(1), Default::default(), "no such file", Mono(2));
        vec![Body::Verdict(verdict), ended(1).remove(0)]
    }

    fn ended(exit: i32) -> Vec<Body> {
        vec![Body::Fact(Fact::JobEnded { exit, reason: "over".to_owned() })]
    }

    fn chosen(runs: &Path) -> (String, Vec<String>) {
        let chosen = choose(runs, Path::new(HERE)).unwrap().expect("a run");
        (chosen.run_dir.file_name().unwrap().to_string_lossy().into_owned(), chosen.notes)
    }

    #[test]
    fn the_newest_run_is_the_one_that_was_started_last_whatever_was_written_last() {
        let dir = testing::tempdir().unwrap();
        run(dir.path(), "new", 2000, ELSEWHERE, failed());
        run(dir.path(), "old", 1000, ELSEWHERE, failed());
        let (name, notes) = chosen(dir.path());
        assert_eq!(name, "new");
        testing::snapshot!("explain", "the newest run", notes.join("\n"));
        assert_eq!(newest(dir.path()), Some(dir.path().join("new")));
    }

    #[test]
    fn runs_of_this_directory_come_before_newer_ones_of_others() {
        let dir = testing::tempdir().unwrap();
        run(dir.path(), "mine", 1000, HERE, failed());
        run(dir.path(), "other", 2000, ELSEWHERE, failed());
        assert_eq!(chosen(dir.path()).0, "mine");
    }

    #[test]
    fn an_older_run_is_never_explained_silently_in_place_of_one_that_ended_well() {
        let dir = testing::tempdir().unwrap();
        run(dir.path(), "broken", 1000, HERE, failed());
        run(dir.path(), "well", 2000, HERE, ended(0));
        let (name, notes) = chosen(dir.path());
        assert_eq!(name, "broken");
        testing::snapshot!("explain", "the newest run ended well", notes.join("\n"));
    }

    #[test]
    fn a_running_run_is_chosen_and_without_failures_the_newest_one() {
        let dir = testing::tempdir().unwrap();
        assert!(choose(dir.path(), Path::new(HERE)).unwrap().is_none());
        run(dir.path(), "well", 1000, HERE, ended(0));
        assert_eq!(chosen(dir.path()), ("well".to_owned(), Vec::new()));
        run(dir.path(), "running", 2000, HERE, Vec::new());
        let (name, notes) = chosen(dir.path());
        assert_eq!(name, "running");
        testing::snapshot!("explain", "the newest run has not ended", notes.join("\n"));
    }
}
