//! Which process of a rank trains. If a shell script, `numactl` or another launcher started the rank, the first process
//! only waits for the one that trains.

use std::fs;
use std::iter;
use std::path::Path;

use mainstay_model::id::Pid;
use nix::sys::signal::Signal;

use mainstay_sys::processes;

/// The signal at which the client's ranks write their stacks: the kernel never sends it, and no library is known to use it.
pub(super) const STACK_SIGNAL: Signal = Signal::SIGSTKFLT;

/// How many last parts of a path identify a rank's file of stacks: run, attempt, rank and name. The parts before them may
/// differ in a container, or be a link.
const TELLING_PARTS: usize = 4;

/// The process of the rank that trains: the nearest that writes its stacks to `stacks` on request, else the nearest that
/// runs Python, else the rank itself.
pub fn trainer_of(rank: Pid, stacks: Option<&Path>) -> Pid {
    among(rank, &processes::descendants(rank), stacks)
}

/// The same, with the rank's descendants, the nearest first.
pub(super) fn among(rank: Pid, descendants: &[Pid], stacks: Option<&Path>) -> Pid {
    let family = || iter::once(rank).chain(descendants.iter().copied());
    let writer = family().find(|process| stacks.is_some_and(|file| writes_stacks(*process, file)));
    writer.or_else(|| family().find(|process| runs_python(*process))).unwrap_or(rank)
}

/// Whether the process has this file open and a handler for the signal. Without a handler the signal would end it. The
/// effect on a program that does not have the file open is unknown.
pub(super) fn writes_stacks(process: Pid, file: &Path) -> bool {
    let end = |path: &Path| -> Vec<_> {
        path.components().rev().take(TELLING_PARTS).map(|part| part.as_os_str().to_owned()).collect()
    };
    let file = end(file);
    catches(process) && {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", process.0)).into_iter().flatten().flatten();
        // Read the links without following them: a target may hang.
        descriptors.filter_map(|open| fs::read_link(open.path()).ok()).any(|open| end(&open) == file)
    }
}

fn catches(process: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", process.0)).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (STACK_SIGNAL as i32 - 1)) != 0
}

fn runs_python(process: Pid) -> bool {
    let program = fs::read_link(format!("/proc/{}/exe", process.0)).unwrap_or_default();
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A shell that waits for the child of its script; the script reports when the child runs.
    struct Script(Child);

    impl Script {
        fn start(script: &str, directory: &Path) -> (Script, Pid) {
            let mut shell = Command::new("sh")
                .args(["-c", script])
                .current_dir(directory)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut output = String::new();
            BufReader::new(shell.stdout.take().unwrap()).read_line(&mut output).unwrap();
            let other = Pid(output.trim().parse().unwrap());
            (Script(shell), other)
        }

        fn pid(&self) -> Pid {
            Pid(i32::try_from(self.0.id()).unwrap())
        }
    }

    impl Drop for Script {
        fn drop(&mut self) {
            for process in processes::descendants(self.pid()) {
                processes::kill_process(process);
            }
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// A program started by the shell that has a handler for the signal and, at `open`, the file for stacks.
    fn with_handler(open: &str) -> String {
        format!("sh -c 'trap : 16; {open}; echo $$; while :; do sleep 0.05; done' & wait")
    }

    #[test]
    fn behind_a_script_it_is_the_program_that_has_the_file_for_stacks() {
        let directory = testing::tempdir().unwrap();
        let file = directory.path().join("stacks.txt");
        let (script, program) = Script::start(&with_handler("exec 9>>stacks.txt"), directory.path());
        assert_eq!(trainer_of(script.pid(), Some(&file)), program);
        assert!(writes_stacks(program, &file));
        assert!(!writes_stacks(script.pid(), &file));
        assert_eq!(trainer_of(program, Some(&file)), program, "without a script it is the rank itself");
    }

    #[test]
    fn a_program_with_its_own_handler_gets_no_request() {
        let directory = testing::tempdir().unwrap();
        let file = directory.path().join("stacks.txt");
        let (script, program) = Script::start(&with_handler("exec 9>>other.txt"), directory.path());
        assert!(!writes_stacks(program, &file));
        assert_eq!(trainer_of(script.pid(), Some(&file)), script.pid());
    }

    #[test]
    fn without_the_client_it_is_the_program_that_runs_python() {
        let directory = testing::tempdir().unwrap();
        // Copied by a separate process: a file that one of ours has open for writing cannot be executed.
        let script = "cp /bin/sh python3.11; ./python3.11 -c 'while :; do sleep 0.05; done' & echo $!; wait";
        let (script, program) = Script::start(script, directory.path());
        // The shell may not have started the program yet when it prints the number.
        while !runs_python(program) {
            assert!(processes::is_alive(program));
            std::thread::yield_now();
        }
        assert_eq!(trainer_of(script.pid(), None), program);
    }
}
