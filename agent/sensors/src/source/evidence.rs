//! What the ranks of a job are doing, recorded before they are stopped or on request: stacks, threads, and what they wait
//! for in the kernel. It runs in a separate thread with a deadline; what does not answer in time is left out.

mod collectives;
mod connections;
mod native;
mod nccl_version;
mod python;
mod worker_server;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mainstay_hang::{PlaceGroup, Waits, fold};
use mainstay_model::id::{Pid, Rank};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use python::Stack;

use crate::source::trainer;

/// A rank to collect evidence from.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Which rank.
    pub rank: Rank,
    /// The process that was started as the rank.
    pub pid: Pid,
    /// The file into which its client writes stacks on request, if it does.
    pub stacks: Option<PathBuf>,
    /// The last step that it completed.
    pub step: Option<u64>,
    /// Its open sections, outermost first.
    pub sections: Vec<String>,
    /// Its last steps, the newest last: number and duration in nanoseconds.
    pub last_steps: Vec<(u64, u64)>,
}

/// Which frames of a stack to collect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// Python's frames; no process is paused.
    Python,
    /// Frames of native code too, if py-spy is installed: it pauses each process for a fraction of a second.
    Native,
}

/// The collected evidence.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CollectedEvidence {
    /// The ranks grouped by place in the code, the smallest group first.
    pub groups: Vec<PlaceGroup>,
    /// Which ranks the others wait for, from NCCL's RAS service and PyTorch's flight recorders.
    pub waits: Vec<Waits>,
    /// Other findings, one sentence each.
    pub findings: Vec<String>,
    /// All evidence, for the file.
    pub whole: Value,
}

impl CollectedEvidence {
    /// Adds what another host has collected.
    pub fn add(&mut self, other: CollectedEvidence) {
        let CollectedEvidence { groups, waits, findings, whole } = other;
        let all = std::mem::take(&mut self.groups).into_iter().chain(groups);
        self.groups = fold(all.flat_map(|PlaceGroup { ranks, place }| {
            ranks.into_iter().map(move |rank| (rank, place.clone()))
        }));
        // Each host may ask the same service.
        self.waits.extend(waits.into_iter().filter(|of| !self.waits.contains(of)).collect::<Vec<_>>());
        self.findings
            .extend(findings.into_iter().filter(|of| !self.findings.contains(of)).collect::<Vec<_>>());
        let lines: Vec<String> = self.groups.iter().map(PlaceGroup::to_string).collect();
        let waited: Vec<&str> = self.waits.iter().map(|waits| waits.reported.as_str()).collect();
        let list = |whole: &Value| whole["ranks"].as_array().cloned().unwrap_or_default();
        let ranks = [list(&self.whole), list(&whole)].concat();
        let ras = self.whole["nccl_ras"].take();
        let ras = if ras.is_null() { whole["nccl_ras"].clone() } else { ras };
        let findings = &self.findings;
        self.whole = json!({ "groups": lines, "waits": waited, "findings": findings, "nccl_ras": ras, "ranks": ranks });
    }
}

impl Subject {
    /// The same subject, with the process that trains.
    fn training(&self) -> Subject {
        Subject { pid: trainer::trainer_of(self.pid, self.stacks.as_deref()), ..self.clone() }
    }
}

/// Collects the evidence. Returns by `deadline`, unless the kernel blocks a read of `/proc`.
pub fn take(subjects: &[Subject], frames: Frames, deadline: Instant) -> CollectedEvidence {
    // The process that was started as a rank may only wait for the one that trains.
    let training: Vec<Subject> = subjects.iter().map(Subject::training).collect();
    let ras = collectives::ask_ras(&training, deadline);
    let recorder = collectives::ask_flight_recorders(&training);
    let mut servers = worker_server::ask(&training, deadline);
    let stacks = python::stacks(&training, frames, deadline);
    let mut places = Vec::new();
    let mut ranks = Vec::new();
    for ((subject, training), stack) in subjects.iter().zip(&training).zip(stacks) {
        let stack = stack.or_else(|| servers.stacks.remove(&subject.rank).map(Stack::of_worker_server));
        let native = native::look(training.pid);
        let place = stack.as_ref().and_then(|stack| stack.innermost.clone());
        let place = place.or_else(|| native.as_ref().map(native::Native::place));
        places.push((subject.rank, place.unwrap_or_else(|| "no process".to_owned())));
        ranks.push(json!({
            "rank": subject.rank.0,
            "pid": subject.pid.0,
            "training_pid": training.pid.0,
            "step": subject.step,
            "sections": subject.sections,
            "last_steps_ns": subject.last_steps,
            "python_by": stack.as_ref().map(|stack| stack.by),
            "python": stack.as_ref().map(|stack| stack.text.as_str()),
            "python_and_native": stack.as_ref().and_then(|stack| stack.native.as_deref()),
            "native": native.as_ref().map(native::Native::as_json),
        }));
    }
    let mut collectives = collectives::flight_records(&recorder, servers.records, subjects, deadline);
    collectives.take_in(ras.finish(subjects, deadline));
    let groups = fold(places);
    let lines: Vec<String> = groups.iter().map(PlaceGroup::to_string).collect();
    let collectives::CollectiveReport { waits, mut findings, ras } = collectives;
    findings.extend(connections::unanswered(&training));
    let waited: Vec<&str> = waits.iter().map(|waits| waits.reported.as_str()).collect();
    let whole =
        json!({ "groups": lines, "waits": waited, "findings": findings, "nccl_ras": ras, "ranks": ranks });
    CollectedEvidence { groups, waits, findings, whole }
}

/// Asks NCCL's RAS service, in a separate thread, how far ranks are in their collectives: its counts as text, and which
/// ranks the others wait for. None if there is no answer.
pub fn ask_nccl(ranks: Vec<(Rank, Pid)>, within: Duration) -> mpsc::Receiver<Option<(String, Waits)>> {
    let (sender, answer) = mpsc::channel();
    let subject = |(rank, pid)| Subject {
        rank,
        pid,
        stacks: None,
        step: None,
        sections: Vec::new(),
        last_steps: Vec::new(),
    };
    let ask = move || {
        let subjects: Vec<Subject> = ranks.into_iter().map(subject).collect();
        // The attempt may be over meanwhile, and the receiver gone.
        let _ = sender.send(collectives::ask_counts(&subjects, Instant::now() + within));
    };
    if let Err(error) = std::thread::Builder::new().name("nccl-counts".to_owned()).spawn(ask) {
        tracing::debug!(%error, "no thread to ask NCCL in");
    }
    answer
}

/// Writes the evidence next to the logs of the attempt, atomically.
///
/// # Errors
/// The path and the error of the kernel.
pub fn write(taken: &CollectedEvidence, file: &Path) -> Result<(), String> {
    let text = serde_json::to_string_pretty(&taken.whole).map_err(|error| error.to_string())?;
    let aside = file.with_extension("new");
    let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, file));
    written.map_err(|error| format!("writing {}: {error}", file.display()))
}

/// The remaining time.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
