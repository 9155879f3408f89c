//! The heartbeat pages of the ranks.

pub mod files;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mainstay_checkpoint::replication_cost::StepTime;
use mainstay_diagnosis::progress_rule::ProgressRule;
use mainstay_model::entry::StepDone;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Span;
use mainstay_sensors::source::nvrx::Monitor;
use mainstay_sensors::source::output_lines::OutputLines;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::inotify::Watcher;

use crate::ranks::RankSpec;
use crate::ranks::process::RankProcess;

/// The pages of ranks that have one.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) readers: BTreeMap<Rank, PageReader>,
    /// Reports that ranks ring.
    pub(crate) watcher: Option<Watcher>,
    /// The sockets of ranks that may connect to a rank monitor of NVRx.
    monitors: BTreeMap<Rank, Monitor>,
    /// Reads steps from the ranks' output, if a rule was given.
    lines: Option<OutputLines>,
    /// The steps of the first rank since they were taken.
    pub(crate) step_times: Vec<StepDone>,
}

impl Pages {
    /// Pages in this directory.
    pub(crate) fn open(directory: Option<&Path>, rule: Option<&Arc<ProgressRule>>) -> Pages {
        let watch = |directory| {
            let watcher = Watcher::new().and_then(|watcher| watcher.watch(directory).map(|_| watcher));
            watcher
                .inspect_err(|error| {
                    tracing::warn!(%error, "cannot watch the heartbeat pages' directory; looking regularly instead");
                })
                .ok()
        };
        let watcher = directory.and_then(watch);
        Pages {
            readers: BTreeMap::new(),
            watcher,
            monitors: BTreeMap::new(),
            lines: rule.cloned().and_then(OutputLines::start),
            step_times: Vec::new(),
        }
    }

    pub(crate) fn get(&self, rank: Rank) -> Option<&PageReader> {
        self.readers.get(&rank)
    }

    /// The last step that a rank has completed.
    pub(crate) fn step(&self, rank: Rank) -> Option<u64> {
        self.get(rank)?.beat()?.step
    }

    /// Forgets all ranks.
    pub(crate) fn clear(&mut self) {
        self.monitors.clear();
        self.readers.clear();
        self.lines.iter().for_each(OutputLines::forget);
    }

    /// Creates sockets for ranks that connect to a rank monitor of NVRx. Without them the ranks run all the same.
    pub(crate) fn listen_to_nvrx(&mut self, spec: &RankSpec, attempt: Attempt, which: &[u32]) {
        let Some(directory) = &spec.page_dir else { return };
        for &local_rank in which {
            // Dropping the old one removes its socket, so it must precede the new one.
            let rank = spec.rank(local_rank);
            self.monitors.remove(&rank);
            match Monitor::listen(directory, &spec.page_spec(attempt, local_rank)) {
                Ok(monitor) => drop(self.monitors.insert(rank, monitor)),
                Err(error) => tracing::debug!(local_rank, %error, "no socket for NVRx's client"),
            }
        }
    }

    /// Reads the page of a new process, and the steps that it prints if there is a rule for them.
    pub(crate) fn add(&mut self, process: &RankProcess, spec: &RankSpec, attempt: Attempt) {
        let Some((path, file)) = &process.page else { return };
        match PageReader::map(file) {
            Ok(reader) => {
                let substitute = self.monitors.get(&process.rank).map(Monitor::page);
                let spec = spec.page_spec(attempt, process.local_rank);
                let files = [&*process.files.stdout, &*process.files.stderr];
                let lines = self.lines.as_ref().and_then(|lines| lines.read(&spec, files));
                let reader = reader.with_substitute(substitute).with_output_lines(lines);
                self.readers.insert(process.rank, reader);
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read a heartbeat page");
            }
        }
    }

    /// How long steps of a rank took since the last call.
    pub(crate) fn take_step_times(&mut self) -> Vec<StepTime> {
        let whole = self.step_times.drain(..).filter(|step| !step.first);
        whole
            .map(|step| StepTime { start: step.start, end: step.end, saving: Span(step.checkpoint_ns) })
            .collect()
    }
}
