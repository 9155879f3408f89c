//! Reads the journal that `mainstay run` writes (`docs/reference/journal.md`) while it grows, as the types of
//! its entries.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::observation::Observation;
use serde::de::DeserializeOwned;

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of the journal's stamps.
pub fn now() -> u64 {
    let clock = nix::time::ClockId::CLOCK_MONOTONIC;
    // Linux has this clock on every machine; zero would be visible as an absurd time and does not end a run.
    nix::time::clock_gettime(clock).map_or(0, |time| std::time::Duration::from(time).as_nanos() as u64)
}

/// A file of JSON lines that grows.
pub struct Lines<T> {
    /// Where it is; it may not exist yet.
    pub path: PathBuf,
    /// Whole lines only.
    read_to: u64,
    /// Everything read so far. Lines of another form are skipped: a format may grow.
    pub all: Vec<T>,
}

impl<T: DeserializeOwned> Lines<T> {
    pub fn of(path: PathBuf) -> Lines<T> {
        Lines { path, read_to: 0, all: Vec::new() }
    }

    pub fn poll(&mut self) {
        let mut new = Vec::new();
        let read = fs::File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.read_to))?;
            file.read_to_end(&mut new)
        });
        let Ok(_) = read else { return };
        let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        self.read_to += whole as u64;
        let lines = new[..whole].split(|byte| *byte == b'\n');
        self.all.extend(lines.filter_map(|line| serde_json::from_slice(line).ok()));
    }
}

/// The folder of the one run below a log folder.
pub fn run_dir(log_dir: &Path) -> Result<PathBuf> {
    let runs = fs::read_dir(log_dir)?.filter_map(|entry| Some(entry.ok()?.path()));
    runs.filter(|path| path.join("journal").is_dir())
        .max()
        .with_context(|| format!("{} holds no run with a journal", log_dir.display()))
}

/// The journal of the one run below a log folder, which may not exist yet.
pub struct Follower {
    log_dir: PathBuf,
    files: BTreeMap<PathBuf, Lines<Entry>>,
    pub entries: Vec<Entry>,
}

impl Follower {
    pub fn new(log_dir: &Path) -> Self {
        Self { log_dir: log_dir.to_path_buf(), files: BTreeMap::new(), entries: Vec::new() }
    }

    pub fn poll(&mut self) {
        let Ok(files) = run_dir(&self.log_dir).and_then(|run| Ok(fs::read_dir(run.join("journal"))?)) else {
            return;
        };
        let mut files: Vec<PathBuf> = files.filter_map(|file| Some(file.ok()?.path())).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
        files.sort();
        for path in files {
            let lines = self.files.entry(path.clone()).or_insert_with(|| Lines::of(path));
            lines.poll();
            self.entries.append(&mut lines.all);
        }
    }

    /// The first entry since a position in which something is found.
    pub fn find<T>(&mut self, since: usize, wanted: impl Fn(&Entry) -> Option<T>) -> Option<T> {
        self.poll();
        self.entries[since..].iter().find_map(wanted)
    }

    /// When the first such fact since a position happened, on [`now`]'s clock.
    pub fn when(&mut self, since: usize, is: impl Fn(&Fact) -> bool) -> Option<u64> {
        self.find(since, |entry| fact(entry).is_some_and(&is).then_some(entry.at.mono.0))
    }
}

pub fn fact(entry: &Entry) -> Option<&Fact> {
    if let Body::Fact(fact) = &entry.body { Some(fact) } else { None }
}

pub fn observed<'a>(fact: &'a Fact, event: &str) -> Option<&'a Observation> {
    match fact {
        Fact::Observed(observed) if observed.event == event => Some(observed),
        _ => None,
    }
}

/// The processes of an attempt at its start, by rank.
pub fn started(entry: &Entry) -> Option<BTreeMap<u32, i32>> {
    match fact(entry)? {
        Fact::AttemptStarted { ranks, .. } => Some(ranks.iter().map(|of| (of.rank.0, of.pid.0)).collect()),
        _ => None,
    }
}

/// Whether the process failed and is ending, or has ended without being asked to.
pub fn died(fact: &Fact, process: i32) -> bool {
    match fact {
        Fact::RankEnding { pid, .. } | Fact::RankExited { pid, after_stop: false, .. } => pid.0 == process,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&str; 3] = [
        r#"{"seq":1,"at":{"mono":100,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"attempt_started","attempt":0,"master_port":1,"ranks":[{"rank":0,"local_rank":0,"pid":11},{"rank":1,"local_rank":1,"pid":12}]}}"#,
        r#"{"seq":2,"at":{"mono":200,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"of a later version"}}"#,
        r#"{"seq":3,"at":{"mono":310,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"rank_exited","attempt":0,"rank":1,"pid":12,"status":{"signal":9},"after_stop":false}}"#,
    ];

    #[test]
    fn entries_are_read_as_they_are_written_and_a_half_written_line_waits_for_its_end() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let file = dir.path().join("run/journal/000001.jsonl");
        let mut follower = Follower::new(dir.path());
        follower.poll();
        fs::create_dir_all(file.parent().expect("it has one")).expect("made");
        fs::write(&file, format!("{}\n{}\n{}", LINES[0], LINES[1], &LINES[2][..40])).expect("written");
        assert_eq!(follower.find(0, started), Some(BTreeMap::from([(0, 11), (1, 12)])));
        assert_eq!(follower.when(0, |fact| died(fact, 12)), None);
        fs::write(&file, format!("{}\n", LINES.join("\n"))).expect("written");
        assert_eq!(follower.when(1, |fact| died(fact, 12)), Some(310));
        assert_eq!(follower.entries.len(), 2);
    }
}
