//! The launches of jobs that journals have. A job on several hosts has a journal on each, and each launch of a job may
//! have a run directory of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Context;
use mainstay_journal::store::journal::JournalReader;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::JobId;
use mainstay_model::time::Wall;
use mainstay_sys::clock;
use mainstay_view::goodput::Books;
use mainstay_view::goodput::google::Writer;
use serde_json::Value;

/// One launch as one host saw it.
#[derive(Debug)]
struct Launch {
    run: String,
    follows: bool,
    began: Wall,
    ended: Wall,
    /// It has no end, and its launcher is a process of this host.
    runs: bool,
    entries: Vec<Entry>,
}

/// All launches that were read.
#[derive(Debug, Default)]
pub(super) struct Launches(Vec<Launch>);

/// A job over its launches.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) run: String,
    launches: Vec<Launch>,
}

impl Launches {
    /// Reads a journal. Returns the run of its first launch.
    pub(super) fn read(&mut self, journal: &Path) -> anyhow::Result<Option<String>> {
        let known = self.0.len();
        let mut current: BTreeMap<JobId, usize> = BTreeMap::new();
        let read = JournalReader::new(journal).replay(|entry| {
            let Some(job) = entry.job.clone() else { return };
            if let Body::Fact(Fact::JobStarted(spec)) = &entry.body {
                let run = if spec.run.is_empty() { job.0.clone() } else { spec.run.clone() };
                let here = entry.boot == clock::boot_id();
                let runs = here && Path::new("/proc").join(spec.launcher.0.to_string()).exists();
                current.insert(job.clone(), self.0.len());
                let (began, follows) = (entry.at.wall, spec.follows);
                self.0.push(Launch { run, follows, began, ended: began, runs, entries: Vec::new() });
            }
            let Some(launch) = current.get(&job).and_then(|place| self.0.get_mut(*place)) else { return };
            launch.ended = launch.ended.max(entry.at.wall);
            if matches!(&entry.body, Body::Fact(Fact::JobEnded { .. } | Fact::LauncherLost { .. })) {
                launch.runs = false;
            }
            launch.entries.push(entry);
        });
        read.with_context(|| format!("reading the journal in {}", journal.display()))?;
        Ok(self.0.get(known).map(|launch| launch.run.clone()))
    }

    /// Reads the journals of all run directories in a directory.
    pub(super) fn read_all(&mut self, log_dir: &Path) -> anyhow::Result<()> {
        let Ok(entries) = std::fs::read_dir(log_dir) else { return Ok(()) };
        let mut journals: Vec<_> = entries.flatten().map(|of| of.path().join("journal")).collect();
        journals.sort();
        journals.into_iter().filter(|of| of.is_dir()).try_for_each(|of| self.read(&of).map(|_| ()))
    }

    /// The jobs, by name. What several hosts saw of one launch is taken from the host that led, and from one only.
    pub(super) fn into_runs(mut self) -> Vec<Run> {
        self.0.sort_by_key(|launch| (launch.run.clone(), launch.follows, launch.began));
        let mut runs: Vec<Run> = Vec::new();
        for launch in self.0 {
            if runs.last().is_none_or(|run| run.run != launch.run) {
                runs.push(Run { run: launch.run.clone(), launches: Vec::new() });
            }
            let Some(run) = runs.last_mut() else { continue };
            let overlaps = |of: &Launch| {
                of.began == launch.began || (launch.began < of.ended && of.began < launch.ended)
            };
            if !run.launches.iter().any(overlaps) {
                run.launches.push(launch);
            }
        }
        runs.iter_mut().for_each(|run| run.launches.sort_by_key(|launch| launch.began));
        runs
    }
}

impl Run {
    /// Whether this names it: the run with or without its id, or one of its launches.
    pub(super) fn is_named(&self, name: &str) -> bool {
        let job = |launch: &Launch| launch.entries.first().and_then(|entry| entry.job.clone());
        self.run == name
            || super::name_of(&self.run) == name
            || self.launches.iter().filter_map(job).any(|job| job.0 == name)
    }

    pub(super) fn books(&self, (from, to): (Wall, Wall)) -> Books {
        let mut books = Books::within(from, to);
        self.launches.iter().flat_map(|launch| &launch.entries).for_each(|entry| books.entry(entry));
        books
    }

    /// The log that Google's recorder would have written.
    pub(super) fn google_log(&self) -> Vec<Value> {
        let mut writer = Writer::new(super::name_of(&self.run));
        let entries = self.launches.iter().flat_map(|launch| &launch.entries);
        entries.flat_map(|entry| writer.entry(entry)).collect()
    }

    /// The present time, if it runs here.
    pub(super) fn now(&self) -> Option<Wall> {
        self.launches.last().filter(|launch| launch.runs).map(|_| clock::now().wall)
    }

    /// The hosts of its last attempts.
    pub(super) fn hosts(&self) -> Vec<String> {
        let of_attempt = |entry: &Entry| -> Vec<String> {
            let Body::Fact(Fact::AttemptStarted { hosts, .. }) = &entry.body else { return Vec::new() };
            hosts.iter().map(|of| of.host.clone()).collect()
        };
        let hosts: BTreeSet<String> =
            self.launches.iter().flat_map(|launch| &launch.entries).flat_map(of_attempt).collect();
        hosts.into_iter().collect()
    }
}
