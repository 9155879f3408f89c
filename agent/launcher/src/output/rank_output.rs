//! What ranks wrote before they ended, when they wrote each line, and how many steps the job did after it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mainstay_diagnosis::line_times::{Progress, Reports, Steps, Written, line_time};
use mainstay_diagnosis::traceback_tail;
use mainstay_model::entry::{LineTime, Note, StepDone};
use mainstay_model::id::Rank;
use mainstay_model::time::Mono;
use mainstay_sys::clock;

use crate::log_files;
use crate::output::growth::{Growth, Growths};
use crate::output::{Tail, tail};
use crate::ranks::RankFiles;

/// Bytes of a file that are searched for reports of steps.
const LOOKED_THROUGH: u64 = 256 * 1024;

/// Bytes that are searched for a traceback's last line.
const TRACEBACK: u64 = 64 * 1024;

/// The end of a rank's streams.
#[derive(Debug, Default)]
pub(crate) struct StreamTails {
    pub(crate) stderr_tail: Vec<String>,
    pub(crate) stdout_tail: Vec<String>,
    pub(crate) stderr_times: Vec<LineTime>,
    pub(crate) stdout_times: Vec<LineTime>,
}

/// The ranks' output and their steps in the current attempt.
#[derive(Debug)]
pub(crate) struct RankOutput {
    growths: Growths,
    /// From heartbeat pages.
    steps: BTreeMap<Rank, Steps>,
    /// The reports of files that were read, each with the file's length at that time.
    reports: BTreeMap<PathBuf, (u64, Reports)>,
    /// The last line of the traceback of each rank that left an exit note.
    raised: BTreeMap<Rank, String>,
    /// Whether the end of a rank shows that the program cannot run.
    pub(crate) may_not_run: bool,
}

impl RankOutput {
    pub(crate) fn start() -> RankOutput {
        RankOutput {
            growths: Growths::start(),
            steps: BTreeMap::new(),
            reports: BTreeMap::new(),
            raised: BTreeMap::new(),
            may_not_run: false,
        }
    }

    /// Watches the output of a new process.
    pub(crate) fn watch(&self, files: &RankFiles) {
        self.growths.watch(&files.stdout);
        self.growths.watch(&files.stderr);
    }

    /// All processes are gone; new ones have separate files.
    pub(crate) fn forget_files(&mut self) {
        self.growths.clear();
        self.reports.clear();
    }

    pub(crate) fn begin_attempt(&mut self) {
        self.steps.clear();
        self.raised.clear();
        self.may_not_run = false;
    }

    /// A rank left an exit note, or an error file.
    pub(crate) fn note(&mut self, rank: Rank, note: &Note) {
        let last = note.traceback.lines().map(str::trim_end).rfind(|line| !line.is_empty());
        self.raised.insert(rank, last.unwrap_or_default().to_owned());
    }

    /// Whether a rank that raised an exception has printed its traceback to the last line. One whose note has none has
    /// nothing to print.
    pub(crate) fn has_printed(&self, rank: Rank, files: &RankFiles) -> bool {
        let Some(last) = self.raised.get(&rank).filter(|last| !last.is_empty()) else { return true };
        let tail = tail(&files.stderr, TRACEBACK);
        // PyTorch writes `[rank0]: ` before it.
        memchr::memmem::rfind_iter(&tail.bytes, last).any(|at| {
            let rest = &tail.bytes[at + last.len()..];
            matches!(rest.first(), Some(b'\n' | b'\r'))
        })
    }

    pub(crate) fn has_steps(&self) -> bool {
        !self.steps.is_empty()
    }

    /// A rank's page reported these steps.
    pub(crate) fn stepped(&mut self, rank: Rank, done: &[StepDone]) {
        let steps = self.steps.entry(rank).or_default();
        done.iter().for_each(|step| steps.completed(step));
    }

    /// The last output of a rank that ended at `at`. `all` are the files of all ranks.
    pub(crate) fn tails(
        &mut self,
        rank: Rank,
        files: &RankFiles,
        all: &[&RankFiles],
        at: Mono,
    ) -> StreamTails {
        let steps = self.steps_of(rank).cloned();
        if steps.is_none() {
            for other in all {
                self.read_reports(&other.stdout);
                self.read_reports(&other.stderr);
            }
        }
        let timed = |path: &PathBuf| {
            let (tail, growth) = self.read(path);
            let lines = traceback_tail::kept(&tail.bytes, tail.start);
            let none = Reports::default();
            let own = self.reports.get(path).map_or(&none, |(_, reports)| reports);
            let others: Vec<&Reports> = self
                .reports
                .iter()
                .filter(|(other, _)| *other != path)
                .map(|(_, (_, reports))| reports)
                .collect();
            let progress = match &steps {
                Some(steps) => Progress::Steps(steps),
                None => Progress::Reports { own, others: &others },
            };
            let time = |line: &traceback_tail::Line| line_time(line.end, &growth.timeline, at, progress);
            let times = lines.iter().map(time).collect();
            (lines.into_iter().map(|line| line.text).collect(), times)
        };
        let (stderr_tail, stderr_times) = timed(&files.stderr);
        let (stdout_tail, stdout_times) = timed(&files.stdout);
        StreamTails { stderr_tail, stdout_tail, stderr_times, stdout_times }
    }

    /// The steps of this rank, or of another one if its page reported none.
    fn steps_of(&self, rank: Rank) -> Option<&Steps> {
        self.steps.get(&rank).or_else(|| self.steps.values().next())
    }

    /// The end of a file, and how it grew until it was read.
    fn read(&self, path: &Path) -> (Tail, Growth) {
        let before = clock::mono();
        let mut growth = self.growths.get(path);
        let tail = tail(path, LOOKED_THROUGH);
        // What was written since the thread last looked is there as well.
        growth.grown(before, clock::mono(), tail.length());
        (tail, growth)
    }

    fn read_reports(&mut self, path: &PathBuf) {
        let known = self.reports.get(path).map(|(length, _)| *length);
        if known.is_some() && known == log_files::length(path) {
            return;
        }
        let (tail, growth) = self.read(path);
        let written = Written { bytes: &tail.bytes, start: tail.start, growth: &growth.timeline };
        self.reports.insert(path.clone(), (tail.length(), Reports::of(written)));
    }
}
