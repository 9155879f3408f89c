//! How far the ranks are in their collectives, requested once nothing makes progress. Sources: PyTorch's flight recorders,
//! which ranks write to files when their pipe is written to, and NCCL's RAS service, which reports about the whole job.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Instant, SystemTime};

use mainstay_hang::flight::{DUMP_BYTES, FlightRecord, counted};
use mainstay_hang::nccl_ras::{RasReply, RasReport};
use mainstay_hang::{Waits, waits};
use mainstay_model::id::{Pid, Rank};

use super::python::POLL_INTERVAL;
use super::{Subject, left, nccl_version};
use crate::source::nccl_ras;
use mainstay_sys::{foreign_files, processes};

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
    dumps: BTreeMap<Rank, Dump>,
}

/// A rank's dump: where its environment places it, and whose it must be.
#[derive(Clone)]
struct Dump {
    path: PathBuf,
    owner: u32,
}

/// Requests the flight records of ranks that listen on a pipe (`TORCH_NCCL_DEBUG_INFO_PIPE_FILE`).
pub(super) fn ask_flight_recorders(subjects: &[Subject]) -> Recorder {
    let mut recorder = Recorder { asked: SystemTime::now(), dumps: BTreeMap::new() };
    for subject in subjects {
        let environment = Environment::of_process(subject.pid);
        let Some(stem) = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") else { continue };
        let pipe = format!("{stem}{}.pipe", subject.rank.0);
        // The rank's user named the pipe and the dump: root must not write to or read another file for that user.
        let Some(owner) = processes::user(subject.pid) else { continue };
        let pipe = foreign_files::open_pipe(Path::new(&pipe), Some(owner));
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
        let path = PathBuf::from(format!("{prefix}{}", subject.rank.0));
        recorder.dumps.insert(subject.rank, Dump { path, owner });
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
    let mut report = CollectiveReport::default();
    let mut waited_for = recorder.dumps.clone();
    let mut errors: BTreeMap<Rank, String> = BTreeMap::new();
    loop {
        // A dump may be incomplete; then it is read again.
        waited_for.retain(|rank, dump| match read(dump, recorder.asked) {
            Some(Ok(record)) => {
                report.findings.push(format!("flight record of {rank}: {}", dump.path.display()));
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
    for (rank, Dump { path, .. }) in waited_for {
        let why = errors.get(&rank).map_or("it was not written in time", String::as_str);
        report.findings.push(format!("flight record of {rank} ({}): {why}", path.display()));
    }
    if !records.is_empty() {
        let all: Vec<Rank> = subjects.iter().map(|subject| subject.rank).collect();
        report.waits.extend(waits("PyTorch's flight recorders", &counted(&all, &records)));
    }
    report
}

/// A dump that was written since then; none if there is none.
fn read(dump: &Dump, since: SystemTime) -> Option<Result<FlightRecord, String>> {
    let file = match foreign_files::open(&dump.path, Some(dump.owner)) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => return Some(Err(error.to_string())),
    };
    let modified = file.metadata().and_then(|metadata| metadata.modified()).ok()?;
    if modified < since {
        return None;
    }
    let mut bytes = Vec::new();
    Some(match file.take(DUMP_BYTES as u64 + 1).read_to_end(&mut bytes) {
        Ok(_) => FlightRecord::read(&bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    })
}

/// A request to NCCL's RAS service that is in progress.
pub(super) struct Ras {
    answer: Option<mpsc::Receiver<RasReply>>,
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
    let given =
        subjects.first().and_then(|subject| Environment::of_process(subject.pid).get("NCCL_RAS_ADDR"));
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
            Some(RasReply::Reported(report)) => of_report(&report, subjects),
            Some(RasReply::Failed(why)) => {
                let findings = vec![format!("NCCL's RAS service gives no answer: {why}")];
                CollectiveReport { findings, ..CollectiveReport::default() }
            }
            // If nothing listens, no NCCL is in use.
            Some(RasReply::Refused | RasReply::NoJob) | None => CollectiveReport::default(),
        }
    }
}

/// The counts of NCCL's RAS service as text, and which ranks the others wait for; none without an answer.
pub(super) fn ask_counts(subjects: &[Subject], deadline: Instant) -> Option<(String, Waits)> {
    let answer = ask_ras(subjects, deadline).answer?.recv_timeout(left(deadline)).ok()?;
    let RasReply::Reported(report) = answer else { return None };
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
    pub(super) fn of_process(pid: Pid) -> Environment {
        Environment(fs::read(format!("/proc/{}/environ", pid.0)).unwrap_or_default())
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        let mut lines = self.0.split(|byte| *byte == 0);
        let value = lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        String::from_utf8(value.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::{OpenOptionsExt, symlink};
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::time::Duration;

    use nix::libc;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    const NO_ONE: u32 = 65_534;

    /// A process whose environment names a pipe and a dump in this directory, as a rank's does.
    fn rank(directory: &Path, user: Option<u32>) -> (Child, Subject) {
        let mut sleep = Command::new("sleep");
        sleep.arg("1000").env("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", directory.join("p"));
        sleep.env("TORCH_FR_DUMP_TEMP_FILE", directory.join("dump"));
        user.map(|user| sleep.uid(user));
        let child = sleep.spawn().unwrap();
        let pid = Pid(i32::try_from(child.id()).unwrap());
        // Its environment is readable only after the kernel has set up the new program.
        while Environment::of_process(pid).get("TORCH_FR_DUMP_TEMP_FILE").is_none() {
            std::thread::yield_now();
        }
        let (sections, last_steps) = (Vec::new(), Vec::new());
        (child, Subject { rank: Rank(0), pid, stacks: None, step: None, sections, last_steps })
    }

    /// A pipe with a reader, so that a writer finds one.
    fn pipe(path: &Path) -> File {
        mkfifo(path, Mode::S_IRWXU).unwrap();
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap()
    }

    fn end(mut rank: Child) {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }

    #[test]
    fn nothing_is_written_through_a_link_in_the_place_of_a_pipe() {
        let directory = testing::tempdir().unwrap();
        let mut target = pipe(&directory.path().join("target"));
        symlink(directory.path().join("target"), directory.path().join("p0.pipe")).unwrap();
        let (child, subject) = rank(directory.path(), None);
        assert!(ask_flight_recorders(std::slice::from_ref(&subject)).dumps.is_empty());
        let read = target.read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock, "nothing was written");

        std::fs::remove_file(directory.path().join("p0.pipe")).unwrap();
        let mut pipe = pipe(&directory.path().join("p0.pipe"));
        assert_eq!(ask_flight_recorders(&[subject]).dumps.len(), 1);
        assert_eq!(pipe.read(&mut [0]).unwrap(), 1, "the rank's own pipe is used");
        end(child);
    }

    #[test]
    fn a_pipe_in_the_place_of_a_dump_is_refused_without_waiting_for_a_writer() {
        let directory = testing::tempdir().unwrap();
        let _pipe = pipe(&directory.path().join("p0.pipe"));
        let (child, subject) = rank(directory.path(), None);
        let recorder = ask_flight_recorders(std::slice::from_ref(&subject));
        mkfifo(&directory.path().join("dump0"), Mode::S_IRWXU).unwrap();
        let deadline = Instant::now() + Duration::from_millis(50);
        let report = flight_records(&recorder, BTreeMap::new(), &[subject], deadline);
        assert!(report.findings[0].contains("not a regular file"), "{:?}", report.findings);
        end(child);
    }

    #[test]
    fn files_of_another_user_than_the_ranks_are_neither_written_nor_read() {
        if !nix::unistd::geteuid().is_root() {
            return testing::skip("a process of another user needs root");
        }
        let directory = testing::tempdir().unwrap();
        let path = directory.path().join("p0.pipe");
        let mut of_root = pipe(&path);
        let (child, subject) = rank(directory.path(), Some(NO_ONE));
        assert!(ask_flight_recorders(std::slice::from_ref(&subject)).dumps.is_empty());
        assert_eq!(of_root.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);

        std::os::unix::fs::chown(&path, Some(NO_ONE), None).unwrap();
        let recorder = ask_flight_recorders(std::slice::from_ref(&subject));
        assert_eq!(recorder.dumps.len(), 1);
        std::fs::write(directory.path().join("dump0"), "of root").unwrap();
        let deadline = Instant::now() + Duration::from_millis(50);
        let report = flight_records(&recorder, BTreeMap::new(), &[subject], deadline);
        assert!(report.findings[0].contains("belongs to user 0"), "{:?}", report.findings);
        end(child);
    }
}
