//! Finds processes: descendants of one of ours, and those with a job's mark.

use std::collections::{BTreeMap, VecDeque};
use std::fs;

use crate::apart::is_working;
use mainstay_model::entry::ExitStatus;
use mainstay_model::id::Pid;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

/// All living descendants of `root`, without `root`, nearest first. If the launcher is a child subreaper, orphans
/// of its ranks stay among its descendants. Processes that work apart for this one are none of them.
pub fn descendants(root: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    let mut to_visit = VecDeque::from([root]);
    let listing = children_by_listing(root).is_none().then(children_by_scan);
    while let Some(parent) = to_visit.pop_front() {
        let children = match &listing {
            None => children_by_listing(parent).unwrap_or_default(),
            Some(all) => all.get(&parent.0).cloned().unwrap_or_default(),
        };
        for child in children {
            if is_working(nix::unistd::Pid::from_raw(child.0)) {
                continue;
            }
            if stat(child).is_some_and(|stat| stat.state != 'Z') {
                found.push(child);
            }
            to_visit.push_back(child);
        }
    }
    found
}

/// The children of a process as the kernel lists them; none if it does not (`CONFIG_PROC_CHILDREN`).
fn children_by_listing(parent: Pid) -> Option<Vec<Pid>> {
    let tasks = fs::read_dir(format!("/proc/{}/task", parent.0)).ok()?;
    let mut children = Vec::new();
    for task in tasks.flatten() {
        let list = fs::read_to_string(task.path().join("children")).ok()?;
        children.extend(list.split_whitespace().filter_map(|child| child.parse().ok().map(Pid)));
    }
    Some(children)
}

/// The children of every process, by reading the parent of each.
fn children_by_scan() -> BTreeMap<i32, Vec<Pid>> {
    let mut children: BTreeMap<i32, Vec<Pid>> = BTreeMap::new();
    for process in all() {
        if let Some(stat) = stat(process) {
            children.entry(stat.parent.0).or_default().push(process);
        }
    }
    children
}

/// The user who started a process. Not the owner of its files in /proc: those of a process that forbids core dumps are
/// root's, and a program with the set-user-ID bit has its starter's environment.
pub fn user(process: Pid) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.0)).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().next()?.parse().ok()
}

/// All living processes whose environment held `mark` (`NAME=value`) when they were started.
pub fn marked(mark: &str) -> Vec<Pid> {
    all()
        .into_iter()
        .filter(|pid| is_marked(*pid, mark))
        .filter(|pid| stat(*pid).is_some_and(|stat| stat.state != 'Z'))
        .collect()
}

fn is_marked(pid: Pid, mark: &str) -> bool {
    // Not readable for us, or gone: it does not have our mark.
    let environment = fs::read(format!("/proc/{}/environ", pid.0)).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
}

/// Kills a process with a mark. If its number belongs to another process by now, that process is not killed.
pub fn kill_marked(pid: Pid, mark: &str) {
    let raw = rustix::process::Pid::from_raw(pid.0);
    // The handle first: the process that is checked is the one that is signalled, or it is gone.
    let handle = raw.and_then(|raw| pidfd_open(raw, PidfdFlags::empty()).ok());
    if let Some(handle) = handle.filter(|_| is_marked(pid, mark)) {
        let _ = pidfd_send_signal(handle, rustix::process::Signal::KILL);
    }
}

/// The parent of a process; none if it is gone, or is the first process.
pub fn parent(pid: Pid) -> Option<Pid> {
    stat(pid).map(|stat| stat.parent).filter(|parent| parent.0 > 0)
}

/// The value of a variable when the process was started; none if it was not set or is not readable for us.
pub fn variable(pid: Pid, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{}/environ", pid.0)).ok()?;
    let mut variables =
        environment.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    variables.find_map(|text| text.strip_prefix(name)?.strip_prefix('=').map(ToOwned::to_owned))
}

/// Whether the process is alive; a zombie is not.
pub fn is_alive(pid: Pid) -> bool {
    stat(pid).is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'))
}

/// The exit status of a process that the kernel is tearing down: it no longer runs its own code, but its resources
/// are not free yet. None for a process that is alive.
pub fn ending(pid: Pid) -> Option<ExitStatus> {
    let stat = stat(pid).filter(|stat| stat.exiting)?;
    Some(ExitStatus::of_wait(stat.exit_code))
}

/// The open files of a process whose path starts with `prefix`, each once. None if the process is not readable for
/// us.
pub fn open_files(pid: Pid, prefix: &str) -> Vec<String> {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", pid.0)).into_iter().flatten().flatten();
    let paths = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    let mut files: Vec<String> = paths.map(|path| path.display().to_string()).collect();
    files.retain(|path| path.starts_with(prefix));
    files.sort_unstable();
    files.dedup();
    files
}

/// Where a process waits in the kernel, for a person: state and wait channel.
pub fn waits_in(pid: Pid) -> String {
    let state = stat(pid).map_or('?', |stat| stat.state);
    let channel = fs::read_to_string(format!("/proc/{}/wchan", pid.0)).unwrap_or_default();
    format!("state {state}, wait channel {}", if channel.is_empty() { "unknown" } else { channel.trim() })
}

/// Kills one process. A process that is gone is no error.
pub fn kill_process(pid: Pid) {
    let _ = kill(nix::unistd::Pid::from_raw(pid.0), Signal::SIGKILL);
}

/// Sends a signal to one process. A process that is gone is no error.
pub fn signal(pid: Pid, signal: Signal) {
    let _ = kill(nix::unistd::Pid::from_raw(pid.0), signal);
}

/// Sends a signal to a process group. Returns whether it had any member.
pub fn signal_group(group: Pid, signal: Signal) -> bool {
    killpg(nix::unistd::Pid::from_raw(group.0), signal) != Err(Errno::ESRCH)
}

/// When a process started, in clock ticks since the boot: with its PID this identifies it on this host.
pub fn start_ticks(pid: Pid) -> Option<u64> {
    stat(pid).map(|stat| stat.start_ticks)
}

struct Stat {
    parent: Pid,
    state: char,
    /// Its first thread has started to end: `PF_EXITING`.
    exiting: bool,
    /// As `wait` would return it; 0 while it is alive, and if it is not readable for us.
    exit_code: i32,
    start_ticks: u64,
}

/// Of field 9 of `/proc/<pid>/stat`.
const PF_EXITING: u64 = 0x4;

fn all() -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid)).collect()
}

fn stat(pid: Pid) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{}/stat", pid.0)).ok()?;
    // The command's name is in parentheses and may itself contain parentheses and blanks.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = Pid(fields.next()?.parse().ok()?);
    // Fields 9, 22 and 52, counted from 1; the last two were 3 and 4.
    let flags: u64 = fields.nth(4).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    let start_ticks = fields.nth(12).and_then(|ticks| ticks.parse().ok()).unwrap_or(0);
    let exit_code = fields.nth(29).and_then(|code| code.parse().ok()).unwrap_or(0);
    Some(Stat { parent, state, exiting: flags & PF_EXITING != 0, exit_code, start_ticks })
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    const MARK: &str = "MAINSTAY_LAUNCH=of-this-test";

    fn sleeper(mark: Option<&str>) -> Child {
        let mut command = Command::new("sleep");
        command.arg("600");
        if let Some((name, value)) = mark.and_then(|mark| mark.split_once('=')) {
            command.env(name, value);
        }
        command.spawn().unwrap()
    }

    fn pid(child: &Child) -> Pid {
        Pid(child.id().cast_signed())
    }

    #[test]
    fn a_process_that_got_the_number_of_a_marked_one_is_not_killed() {
        let mut ours = sleeper(Some(MARK));
        let number = pid(&ours);
        // Between fork and exec it has this process's environment.
        while !is_marked(number, MARK) {
            std::thread::yield_now();
        }
        assert_eq!(marked(MARK), [number]);
        kill_marked(number, MARK);
        assert!(!ours.wait().unwrap().success());
        // The next process gets the number after this one; other processes of this host may be faster.
        let again = (0..200).find_map(|_| {
            fs::write("/proc/sys/kernel/ns_last_pid", (number.0 - 1).to_string()).ok()?;
            let mut other = sleeper(None);
            if pid(&other) == number {
                return Some(other);
            }
            other.kill().unwrap();
            other.wait().unwrap();
            None
        });
        let Some(mut other) = again else {
            return testing::skip(
                "the number of a process cannot be used again on purpose here: it takes root",
            );
        };
        kill_marked(number, MARK);
        signal(number, Signal::SIGTERM);
        let how = std::os::unix::process::ExitStatusExt::signal(&other.wait().unwrap());
        assert_eq!(how, Some(Signal::SIGTERM as i32), "another process was killed");
    }
}
