//! Python stacks of ranks: by py-spy where it is installed, else by asking the ranks' own faulthandler, which the
//! client has registered.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mainstay_core::hang::{innermost_of_faulthandler, innermost_of_py_spy};
use mainstay_core::id::Pid;
use nix::sys::signal::Signal;

use super::{Subject, left};
use crate::os::processes;

/// The signal at which the client's ranks write their stacks: the kernel never sends it, and no library is known to
/// use it.
const STACK_SIGNAL: Signal = Signal::SIGSTKFLT;
/// A rank that has not begun to write by then will not.
const ANSWERS_WITHIN: Duration = Duration::from_millis(700);
/// How often is looked whether stacks are written.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(10);
/// No dump is longer.
const LONGEST: u64 = 1 << 20;

/// A rank's Python stacks.
pub(super) struct Stack {
    pub(super) by: &'static str,
    pub(super) text: String,
    pub(super) innermost: Option<String>,
}

/// The stacks of all ranks, in order; none for a rank that gives none.
pub(super) fn stacks(subjects: &[Subject], deadline: Instant) -> Vec<Option<Stack>> {
    let mut found = by_faulthandler(subjects, deadline);
    if let Some(program) = py_spy(subjects) {
        by_py_spy(&program, subjects, &mut found, deadline);
    }
    found
}

/// Asks those ranks that have a handler for it, all at once.
fn by_faulthandler(subjects: &[Subject], deadline: Instant) -> Vec<Option<Stack>> {
    let before: Vec<Option<(&Path, u64)>> = subjects
        .iter()
        .map(|subject| {
            let file = subject.stacks.as_deref()?;
            let length = fs::metadata(file).ok()?.len();
            // Without a handler the signal would end the process.
            if !catches(subject.pid) {
                return None;
            }
            processes::signal(subject.pid, STACK_SIGNAL);
            Some((file, length))
        })
        .collect();
    let until = Instant::now() + ANSWERS_WITHIN.min(left(deadline));
    let mut lengths = vec![0; before.len()];
    loop {
        std::thread::sleep(LOOK_EVERY);
        let now: Vec<u64> = before.iter().map(|file| file.map_or(0, |(path, _)| length(path))).collect();
        let written = before.iter().zip(&now).all(|(file, now)| file.is_none_or(|(_, before)| *now > before));
        if (written && now == lengths) || Instant::now() >= until {
            break;
        }
        lengths = now;
    }
    before
        .iter()
        .map(|file| {
            let text = tail((*file)?.0, (*file)?.1)?;
            Some(Stack { by: "faulthandler", innermost: innermost_of_faulthandler(&text), text })
        })
        .collect()
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn tail(path: &Path, from: u64) -> Option<String> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::open(path).ok()?;
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes).ok()?;
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
}

/// Whether the process has a handler for the signal.
fn catches(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.0)).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (STACK_SIGNAL as i32 - 1)) != 0
}

/// py-spy beside the ranks' interpreter, or on the path.
fn py_spy(subjects: &[Subject]) -> Option<PathBuf> {
    let argument = |pid: Pid| {
        let line = fs::read(format!("/proc/{}/cmdline", pid.0)).ok()?;
        let program = line.split(|byte| *byte == 0).next()?.to_vec();
        Some(PathBuf::from(String::from_utf8(program).ok()?))
    };
    let beside = subjects.first().and_then(|subject| argument(subject.pid));
    let beside = beside.and_then(|program| Some(program.parent()?.to_owned()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    beside
        .into_iter()
        .filter(|directory| directory.is_absolute())
        .chain(std::env::split_paths(&path))
        .map(|directory| directory.join("py-spy"))
        .find(|program| program.is_file())
}

/// With native frames and without stopping the process; at most eight at a time.
fn by_py_spy(program: &Path, subjects: &[Subject], found: &mut [Option<Stack>], deadline: Instant) {
    for (subjects, found) in subjects.chunks(8).zip(found.chunks_mut(8)) {
        let started: Vec<Option<Child>> =
            subjects.iter().map(|subject| start(program, subject.pid)).collect();
        for (child, found) in started.into_iter().zip(found) {
            let text = child.and_then(|child| finish(child, deadline));
            if let Some(text) = text.filter(|text| text.contains("Thread ")) {
                *found = Some(Stack { by: "py-spy", innermost: innermost_of_py_spy(&text), text });
            }
        }
    }
}

fn start(program: &Path, pid: Pid) -> Option<Child> {
    Command::new(program)
        .args(["dump", "--nonblocking", "--pid", &pid.0.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()
}

fn finish(mut child: Child, deadline: Instant) -> Option<String> {
    let mut text = Vec::new();
    let mut stdout = child.stdout.take()?;
    let reader = std::thread::spawn(move || {
        let read = stdout.by_ref().take(LONGEST).read_to_end(&mut text);
        read.map(|_| text)
    });
    while !reader.is_finished() && left(deadline) > Duration::ZERO {
        std::thread::sleep(LOOK_EVERY);
    }
    let _ = child.kill();
    let _ = child.wait();
    let text = reader.join().ok()?.ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}
