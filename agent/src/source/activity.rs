//! What a rank's processes do, from `/proc`: read only while nothing moves in a job.

use std::fs;
use std::path::Path;

use mainstay_core::hang::{Probe, ProcessState};
use mainstay_core::id::Pid;

use crate::os::{clock, processes};

/// What the kernel tells of a rank's process and its descendants; none if the process is gone or not to be read.
pub fn probe(rank: Pid) -> Option<Probe> {
    let own = stat(rank)?;
    let mut probe = Probe { at: clock::mono(), state: own.state, processes: 1, ..Probe::default() };
    let mut family = processes::descendants(rank);
    probe.processes += u32::try_from(family.len()).unwrap_or(u32::MAX);
    family.push(rank);
    for process in family {
        let directory = format!("/proc/{}", process.0);
        let directory = Path::new(&directory);
        probe.cpu = probe.cpu.plus(clock::cpu_of(process).unwrap_or_default());
        // Not to be read without the right to trace: CPU time and faults are enough to go by.
        probe.bytes = probe.bytes.saturating_add(transferred(directory).unwrap_or(0));
        if let Some(stat) = stat(process) {
            probe.faults = probe.faults.saturating_add(stat.faults);
            probe.runnable |= stat.runnable;
        }
    }
    Some(probe)
}

/// Bytes that the network of the process's namespace carried so far; zero where that is not to be read.
pub fn network(process: Pid) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/net/dev", process.0)).unwrap_or_default();
    // A line of an interface: its name, eight counters of what came in, eight of what went out; bytes are the first of each.
    let of_line = |line: &str| {
        let counters: Vec<&str> = line.split_once(':')?.1.split_whitespace().collect();
        let number = |index: usize| counters.get(index)?.parse::<u64>().ok();
        Some(number(0)?.saturating_add(number(8)?))
    };
    text.lines().filter_map(of_line).fold(0, u64::saturating_add)
}

struct Stat {
    state: ProcessState,
    runnable: bool,
    faults: u64,
}

fn stat(process: Pid) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{}/stat", process.0)).ok()?;
    // The command's name stands in brackets and may itself hold brackets and blanks.
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let state = match *fields.first()? {
        "T" => ProcessState::Stopped,
        "t" => ProcessState::Traced,
        "D" => ProcessState::Uninterruptible,
        _ => ProcessState::Normal,
    };
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    // Fields 10 and 12 of proc_pid_stat(5), counted from the state as field 3.
    let runnable = *fields.first()? == "R";
    Some(Stat { state, runnable, faults: number(7).saturating_add(number(9)) })
}

/// Bytes of read and write calls.
fn transferred(process: &Path) -> Option<u64> {
    let text = fs::read_to_string(process.join("io")).ok()?;
    let of = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(of("rchar:")?.saturating_add(of("wchar:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_process_can_be_read_and_uses_time() {
        let us = Pid(i32::try_from(std::process::id()).unwrap());
        let first = probe(us).unwrap();
        let mut text = String::new();
        while probe(us).unwrap().cpu == first.cpu {
            text.push_str("work");
        }
        let second = probe(us).unwrap();
        assert!(second.bytes > first.bytes, "reading /proc is reading");
        assert_eq!(second.state, ProcessState::Normal);
        assert!(probe(Pid(-5)).is_none());
    }
}
