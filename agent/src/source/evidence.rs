//! What the ranks of a job are at, written down before they are stopped or when somebody asks: stacks, threads, what
//! the kernel has them wait in. In a thread of its own, and with a deadline: what does not answer in time is left out.

mod collectives;
mod native;
mod nccl_version;
mod python;
mod worker_server;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mainstay_core::base::id::{Pid, Rank};
use mainstay_core::hang::{PlaceGroup, Waits, fold};
use serde_json::{Value, json};

use python::Stack;

use crate::source::trainer;

/// A rank to be looked at.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Which rank.
    pub rank: Rank,
    /// Its process: what was started as the rank.
    pub pid: Pid,
    /// Where its client writes stacks when asked to, if it does.
    pub stacks: Option<PathBuf>,
    /// The last step that it completed.
    pub step: Option<u64>,
    /// Its open sections, outermost first.
    pub sections: Vec<String>,
    /// Its last steps, the newest last: number and what each took in nanoseconds.
    pub last_steps: Vec<(u64, u64)>,
}

/// Which frames of a stack are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// Python's, for which nobody is held up.
    Python,
    /// Those of native code too, where py-spy is installed: it holds each process for a fraction of a second.
    Native,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// The ranks by where they stand, the fewest first.
    pub groups: Vec<PlaceGroup>,
    /// Whom the ranks wait for, by NCCL's RAS service and by PyTorch's flight recorders.
    pub waits: Vec<Waits>,
    /// Other findings, one sentence each.
    pub findings: Vec<String>,
    /// Everything, for the file.
    pub whole: Value,
}

impl Subject {
    /// The same, of the process that trains.
    fn training(&self) -> Subject {
        Subject { pid: trainer::of(self.pid, self.stacks.as_deref()), ..self.clone() }
    }
}

/// Takes the evidence. Returns by `deadline`, unless the kernel holds up a read of `/proc`.
pub fn take(subjects: &[Subject], frames: Frames, deadline: Instant) -> Taken {
    // What was started as a rank may only wait for the process that matters.
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
    let reported: Vec<String> = groups.iter().map(PlaceGroup::to_string).collect();
    let collectives::CollectiveReport { waits, findings, ras } = collectives;
    let waited: Vec<&str> = waits.iter().map(|waits| waits.reported.as_str()).collect();
    let whole =
        json!({ "groups": reported, "waits": waited, "findings": findings, "nccl_ras": ras, "ranks": ranks });
    Taken { groups, waits, findings, whole }
}

/// How far ranks are in their collectives by NCCL's RAS service, asked for in a thread of its own: its counts in writing, and
/// whom the ranks wait for. None where it does not tell.
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
        // The attempt may be over meanwhile, and nobody listens.
        let _ = sender.send(collectives::ask_counts(&subjects, Instant::now() + within));
    };
    if let Err(error) = std::thread::Builder::new().name("nccl-counts".to_owned()).spawn(ask) {
        tracing::debug!(%error, "no thread to ask NCCL in");
    }
    answer
}

/// Writes it beside the logs of the attempt, whole or not at all.
///
/// # Errors
/// Path and what the kernel says.
pub fn write(taken: &Taken, file: &Path) -> Result<(), String> {
    let text = serde_json::to_string_pretty(&taken.whole).map_err(|error| error.to_string())?;
    let aside = file.with_extension("new");
    let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, file));
    written.map_err(|error| format!("writing {}: {error}", file.display()))
}

/// How long is left.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
