//! Python stacks of ranks, from py-spy if it is installed, else from the ranks' own faulthandler, which the client has
//! registered. py-spy also reports the native frames between the Python frames.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mainstay_hang::{innermost_of_faulthandler, innermost_of_py_spy, innermost_of_worker_server};
use mainstay_model::id::Pid;

use super::{Frames, Subject, left};
use crate::source::trainer::{STACK_SIGNAL, writes_stacks};
use mainstay_sys::{foreign_files, processes};

/// Time limit for native frames: a library of gigabytes takes seconds to read.
const NATIVE_WITHIN: Duration = Duration::from_secs(1);
/// A rank that has not started to write by then will not.
const ANSWERS_WITHIN: Duration = Duration::from_millis(700);
/// How often to check whether stacks are written.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// No dump is longer than this.
const MAX_DUMP_BYTES: u64 = 1 << 20;

/// A rank's Python stacks.
pub(super) struct Stack {
    pub(super) by: &'static str,
    pub(super) text: String,
    pub(super) innermost: Option<String>,
    /// The stack with native frames.
    pub(super) native: Option<String>,
}

impl Stack {
    /// From the dump of a rank's PyTorch server.
    pub(super) fn of_worker_server(text: String) -> Stack {
        Stack { by: "worker server", innermost: innermost_of_worker_server(&text), native: None, text }
    }
}

/// The stacks of all ranks, in order; none for a rank that returns none.
pub(super) fn stacks(subjects: &[Subject], frames: Frames, deadline: Instant) -> Vec<Option<Stack>> {
    let mut found = by_faulthandler(subjects, deadline);
    let Some(program) = py_spy(subjects) else { return found };
    for (text, found) in by_py_spy(&program, &["--nonblocking"], subjects, deadline).zip(&mut found) {
        let Some(text) = text else { continue };
        *found = Some(Stack { by: "py-spy", innermost: innermost_of_py_spy(&text), native: None, text });
    }
    if frames == Frames::Native {
        // A stopped process cannot be asked so; then the earlier result is kept.
        let deadline = deadline.min(Instant::now() + NATIVE_WITHIN);
        for (native, found) in by_py_spy(&program, &["--native"], subjects, deadline).zip(&mut found) {
            if let Some(found) = found {
                found.native = native;
            }
        }
    }
    found
}

/// Asks the ranks that have a handler, all at once.
fn by_faulthandler(subjects: &[Subject], deadline: Instant) -> Vec<Option<Stack>> {
    let before: Vec<Option<(&Path, u64, Option<u32>)>> = subjects
        .iter()
        .map(|subject| {
            let file = subject.stacks.as_deref()?;
            let length = fs::metadata(file).ok()?.len();
            // Without a handler the signal would end the process.
            if !writes_stacks(subject.pid, file) {
                return None;
            }
            let owner = processes::user(subject.pid);
            processes::signal(subject.pid, STACK_SIGNAL);
            Some((file, length, owner))
        })
        .collect();
    let until = Instant::now() + ANSWERS_WITHIN.min(left(deadline));
    let mut lengths = vec![0; before.len()];
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let now: Vec<u64> = before.iter().map(|file| file.map_or(0, |(path, ..)| length(path))).collect();
        let written =
            before.iter().zip(&now).all(|(file, now)| file.is_none_or(|(_, before, _)| *now > before));
        if (written && now == lengths) || Instant::now() >= until {
            break;
        }
        lengths = now;
    }
    before
        .iter()
        .map(|file| {
            let (path, before, owner) = (*file)?;
            let text = tail(path, before, owner)?;
            Some(Stack {
                by: "faulthandler",
                innermost: innermost_of_faulthandler(&text),
                text,
                native: None,
            })
        })
        .collect()
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The rest of a rank's file. The job named it, and this process may be root: it must be the rank's own.
fn tail(path: &Path, from: u64, owner: Option<u32>) -> Option<String> {
    use std::io::{Seek, SeekFrom};
    let mut file = foreign_files::open(path, Some(owner?)).ok()?;
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_DUMP_BYTES).read_to_end(&mut bytes).ok()?;
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
}

/// A py-spy that this process may run: next to the ranks' interpreter, or on the path.
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
        .find(|program| program.is_file() && may_run(program))
}

/// Root must not run a program that a user could have written: the program and the directories above it belong to root, and
/// no one else may write them.
fn may_run(program: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    if !nix::unistd::geteuid().is_root() {
        return true;
    }
    let Ok(program) = fs::canonicalize(program) else { return false };
    program.ancestors().all(|path| {
        // In a sticky directory no user can replace root's files.
        fs::symlink_metadata(path).is_ok_and(|found| {
            found.uid() == 0 && (found.mode() & 0o022 == 0 || (found.is_dir() && found.mode() & 0o1000 != 0))
        })
    })
}

/// What py-spy reports about each of them, in order; at most eight requests run at a time.
fn by_py_spy<'a>(
    program: &'a Path,
    options: &'a [&'a str],
    subjects: &'a [Subject],
    deadline: Instant,
) -> impl Iterator<Item = Option<String>> + 'a {
    subjects.chunks(8).flat_map(move |subjects| {
        let start = |subject: &Subject| start(program, options, subject.pid);
        let started: Vec<Option<Child>> = subjects.iter().map(start).collect();
        let finish = move |child: Option<Child>| finish(child?, deadline);
        started.into_iter().map(finish).map(|text| text.filter(|text| text.contains("Thread ")))
    })
}

fn start(program: &Path, options: &[&str], pid: Pid) -> Option<Child> {
    Command::new(program)
        .arg("dump")
        .args(options)
        .args(["--pid", &pid.0.to_string()])
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
        let read = stdout.by_ref().take(MAX_DUMP_BYTES).read_to_end(&mut text);
        read.map(|_| text)
    });
    while !reader.is_finished() && left(deadline) > Duration::ZERO {
        std::thread::sleep(POLL_INTERVAL);
    }
    let _ = child.kill();
    let _ = child.wait();
    let text = reader.join().ok()?.ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use mainstay_model::id::Rank;

    use super::*;

    /// Starts a process and, next to it as the rank's interpreter, a fake py-spy. `native` is what it does when native
    /// frames are requested.
    fn asked(frames: Frames, native: &str) -> Stack {
        let place = testing::tempdir().unwrap();
        let program = place.path().join("py-spy");
        let text = format!(
            "#!/bin/sh\ncase \"$2\" in --native) {native};; --nonblocking) echo 'Process 7'; echo 'Thread 7 (idle): \"MainThread\"'; \
             echo '    step (train.py:12)';; esac\n"
        );
        // Written by a separate process: a file that one of ours has open for writing cannot be executed.
        let write = Command::new("sh")
            .args(["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\""])
            .args([program.as_os_str(), text.as_ref()])
            .status();
        assert!(write.unwrap().success());
        let mut rank = Command::new("sleep").arg0(place.path().join("python3")).arg("1000").spawn().unwrap();
        let pid = Pid(i32::try_from(rank.id()).unwrap());
        let (sections, last_steps) = (Vec::new(), Vec::new());
        let subject = Subject { rank: Rank(0), pid, stacks: None, step: None, sections, last_steps };
        let found = stacks(&[subject], frames, Instant::now() + Duration::from_secs(60)).remove(0);
        rank.kill().unwrap();
        rank.wait().unwrap();
        found.unwrap()
    }

    #[test]
    fn native_frames_are_collected_on_request_and_the_place_is_the_python_frame() {
        let native = "echo 'Thread 7 (idle): \"MainThread\"'; echo '    0x7f (libc.so.6)'; echo '    step (train.py:12)'";
        let stack = asked(Frames::Native, native);
        assert_eq!(stack.by, "py-spy");
        assert_eq!(stack.innermost.as_deref(), Some("step (train.py:12)"));
        assert!(stack.native.unwrap().contains("libc.so.6"));
        assert!(!stack.text.contains("libc.so.6"));
        assert_eq!(asked(Frames::Python, native).native, None, "nobody is held up for what nobody wants");
    }

    #[test]
    fn a_process_without_native_frames_is_described_by_its_python_frames() {
        let stack = asked(Frames::Native, "echo 'Failed to suspend process' >&2; exit 1");
        assert_eq!(stack.native, None);
        assert_eq!(stack.innermost.as_deref(), Some("step (train.py:12)"));
    }
}
