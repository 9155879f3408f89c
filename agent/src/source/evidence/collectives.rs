//! How far the ranks are in their collectives, requested once nothing makes progress. Sources: PyTorch's flight recorders,
//! which ranks write to files when their pipe is written to, and NCCL's RAS service, which reports about the whole job.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Instant, SystemTime};

use mainstay_core::base::id::{Pid, Rank};
use mainstay_core::hang::flight::{DUMP_BYTES, FlightRecord, counted};
use mainstay_core::hang::nccl_ras::{Asked, RasReport};
use mainstay_core::hang::{Waits, waits};
use nix::libc;

use super::python::POLL_INTERVAL;
use super::{Subject, left, nccl_version};
use crate::os::processes;
use crate::source::nccl_ras;

/// The default address of NCCL's RAS service.
const RAS_ADDRESS: &str = "localhost:28028";

/// The reports of both sources.
#[derive(Debug, Default)]
pub(super) struct CollectiveReport {
    pub(super) waits: Vec<Waits>,
    pub(super) findings: Vec<String>,
    /// The RAS service's report, one line for each item.
    pub(super) ras: Vec<String>,
}

impl CollectiveReport {
    pub(super) fn take_in(&mut self, other: CollectiveReport) {
        self.waits.extend(other.waits);
        self.findings.extend(other.findings);
        self.ras.extend(other.ras);
    }
}

/// Requested dumps, and when they were requested.
pub(super) struct Recorder {
    asked: SystemTime,
    dumps: BTreeMap<Rank, PathBuf>,
}

/// Requests the flight records of ranks that listen on a pipe (`TORCH_NCCL_DEBUG_INFO_PIPE_FILE`).
pub(super) fn ask_flight_recorders(subjects: &[Subject]) -> Recorder {
    let mut recorder = Recorder { asked: SystemTime::now(), dumps: BTreeMap::new() };
    for subject in subjects {
        let environment = Environment::of(subject.pid);
        let Some(stem) = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") else { continue };
        let pipe = format!("{stem}{}.pipe", subject.rank.0);
        if !fs::metadata(&pipe).is_ok_and(|metadata| metadata.file_type().is_fifo()) {
            continue;
        }
        // Without a reader at the other end, opening fails instead of waiting.
        let pipe = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(pipe);
        if pipe.and_then(|mut pipe| pipe.write_all(b"1")).is_err() {
            continue;
        }
        let given = environment
            .get("TORCH_FR_DUMP_TEMP_FILE")
            .or_else(|| environment.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE"));
        let prefix = given.unwrap_or_else(|| {
            let home = environment.get("HOME").unwrap_or_default();
            let cache = environment.get("XDG_CACHE_HOME").unwrap_or_else(|| format!("{home}/.cache"));
            format!("{cache}/torch/comm_lib_trace_rank_")
        });
        recorder.dumps.insert(subject.rank, PathBuf::from(format!("{prefix}{}", subject.rank.0)));
    }
    recorder
}

/// Waits for the dumps and reads them. Returns where they are, and which ranks the others wait for, according to them and
/// to the records of the ranks' servers.
pub(super) fn flight_records(
    recorder: &Recorder,
    mut records: BTreeMap<Rank, FlightRecord>,
    subjects: &[Subject],
    deadline: Instant,
) -> CollectiveReport {
    let mut reported = CollectiveReport::default();
    let mut waited_for = recorder.dumps.clone();
    let mut errors: BTreeMap<Rank, String> = BTreeMap::new();
    loop {
        // A dump may be incomplete; then it is read again.
        waited_for.retain(|rank, path| match read(path, recorder.asked) {
            Some(Ok(record)) => {
                reported.findings.push(format!("flight record of {rank}: {}", path.display()));
                records.insert(*rank, record);
                false
            }
            Some(Err(error)) => {
                errors.insert(*rank, error);
                true
            }
            None => true,
        });
        if waited_for.is_empty() || left(deadline) <= POLL_INTERVAL {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    for (rank, path) in waited_for {
        let why = errors.get(&rank).map_or("it was not written in time", String::as_str);
        reported.findings.push(format!("flight record of {rank} ({}): {why}", path.display()));
    }
    if !records.is_empty() {
        let all: Vec<Rank> = subjects.iter().map(|subject| subject.rank).collect();
        reported.waits.extend(waits("PyTorch's flight recorders", &counted(&all, &records)));
    }
    reported
}

/// A dump that was written since then; none if there is none.
fn read(path: &Path, since: SystemTime) -> Option<Result<FlightRecord, String>> {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified()).ok()?;
    if modified < since {
        return None;
    }
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(DUMP_BYTES as u64 + 1).read_to_end(&mut bytes));
    Some(match read {
        Ok(_) => FlightRecord::read(&bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    })
}

/// A request to NCCL's RAS service that is in progress.
pub(super) struct Ras {
    answer: Option<mpsc::Receiver<Asked>>,
    /// Why it was not asked.
    objection: Option<String>,
}

/// Sends the request in a separate thread: a stopped process accepts the request and never answers. A release whose RAS
/// service may end the job is not asked.
pub(super) fn ask_ras(subjects: &[Subject], deadline: Instant) -> Ras {
    let objection = subjects.iter().find_map(|subject| nccl_version::objection(subject.pid));
    if objection.is_some() {
        return Ras { answer: None, objection };
    }
    let given = subjects.first().and_then(|subject| Environment::of(subject.pid).get("NCCL_RAS_ADDR"));
    let address = given.unwrap_or_else(|| RAS_ADDRESS.to_owned());
    let (sender, answer) = mpsc::channel();
    let ask = move || {
        // The receiver is gone if it took too long.
        let _ = sender.send(nccl_ras::ask_blocking(&address, left(deadline)));
    };
    let started = std::thread::Builder::new().name("nccl-ras".to_owned()).spawn(ask);
    Ras { answer: started.is_ok().then_some(answer), objection }
}

impl Ras {
    /// The answer by the deadline.
    pub(super) fn finish(self, subjects: &[Subject], deadline: Instant) -> CollectiveReport {
        if let Some(objection) = self.objection {
            return CollectiveReport { findings: vec![objection], ..CollectiveReport::default() };
        }
        match self.answer.and_then(|answer| answer.recv_timeout(left(deadline)).ok()) {
            Some(Asked::Reported(report)) => of_report(&report, subjects),
            Some(Asked::Failed(why)) => {
                let findings = vec![format!("NCCL's RAS service gives no answer: {why}")];
                CollectiveReport { findings, ..CollectiveReport::default() }
            }
            // If nothing listens, no NCCL is in use.
            Some(Asked::Refused | Asked::NoJob) | None => CollectiveReport::default(),
        }
    }
}

/// The counts of NCCL's RAS service as text, and which ranks the others wait for; none without an answer.
pub(super) fn ask_counts(subjects: &[Subject], deadline: Instant) -> Option<(String, Waits)> {
    let answer = ask_ras(subjects, deadline).answer?.recv_timeout(left(deadline)).ok()?;
    let Asked::Reported(report) = answer else { return None };
    let waits = of_report(&report, subjects).waits.into_iter().next()?;
    Some((format!("{:?}", report.counts()), waits))
}

fn of_report(report: &RasReport, subjects: &[Subject]) -> CollectiveReport {
    let mut ranks = BTreeMap::new();
    for subject in subjects {
        // Training may run in a child of the process that was started as the rank.
        for pid in processes::descendants(subject.pid) {
            ranks.insert(pid.0, subject.rank);
        }
        ranks.insert(subject.pid.0, subject.rank);
    }
    let waits = waits("NCCL's RAS service", &report.counted(&ranks)).into_iter().collect();
    CollectiveReport { waits, findings: Vec::new(), ras: report.lines() }
}

/// A process's environment at its start.
pub(super) struct Environment(Vec<u8>);

impl Environment {
    pub(super) fn of(pid: Pid) -> Environment {
        Environment(fs::read(format!("/proc/{}/environ", pid.0)).unwrap_or_default())
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        let mut lines = self.0.split(|byte| *byte == 0);
        let value = lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        String::from_utf8(value.to_vec()).ok()
    }
}
