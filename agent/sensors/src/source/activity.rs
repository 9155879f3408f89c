//! What a rank's processes do, from `/proc`. It is read only while a job makes no progress.

use std::fs;
use std::path::Path;

use mainstay_hang::{Probe, ProcessState};
use mainstay_model::id::Pid;
use mainstay_wire::wait_channel;

use crate::source::trainer;
use mainstay_sys::{clock, processes};

/// What the kernel reports about a rank's process and its descendants; none if the process is gone or cannot be read. The
/// state is that of the process that trains, which is identified by the file into which it writes `stacks`.
pub fn probe(rank: Pid, stacks: Option<&Path>) -> Option<Probe> {
    stat(rank)?;
    let mut family = processes::descendants(rank);
    let trainer = trainer::among(rank, &family, stacks);
    let state = match stat(trainer)?.state {
        // FUSE makes its callers wait in an interruptible sleep.
        ProcessState::Normal if waits_for_file_system(trainer) => ProcessState::Uninterruptible,
        state => state,
    };
    let mut probe = Probe { at: clock::mono(), state, processes: 1, ..Probe::default() };
    probe.processes += u32::try_from(family.len()).unwrap_or(u32::MAX);
    family.push(rank);
    for process in family {
        let directory = format!("/proc/{}", process.0);
        let directory = Path::new(&directory);
        probe.cpu = probe.cpu.plus(clock::cpu_of(process).unwrap_or_default());
        // Unreadable without the right to trace; CPU time and faults are enough.
        probe.bytes = probe.bytes.saturating_add(transferred(directory).unwrap_or(0));
        probe.holds_device |= holds_device(directory);
        if let Some(stat) = stat(process) {
            probe.faults = probe.faults.saturating_add(stat.faults);
            probe.runnable |= stat.runnable;
        }
    }
    Some(probe)
}

/// Whether the process waits in the kernel for a network file system or FUSE.
fn waits_for_file_system(process: Pid) -> bool {
    fs::read_to_string(format!("/proc/{}/wchan", process.0))
        .is_ok_and(|channel| wait_channel::is_of_network_file_system(&channel))
}

/// Bytes that the network of the process's namespace and the host's RDMA devices have carried; zero if they cannot be read.
pub fn network(process: Pid) -> u64 {
    interfaces(process).saturating_add(rdma(Path::new("/sys/class/infiniband")))
}

/// Bytes that the ports of all RDMA devices have carried: no interface counts traffic that bypasses the kernel.
fn rdma(devices: &Path) -> u64 {
    let ports =
        |device: fs::DirEntry| fs::read_dir(device.path().join("ports")).into_iter().flatten().flatten();
    let number = |file: &Path| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let of_port = |port: fs::DirEntry| {
        // InfiniBand and RoCE count words of four bytes. EFA counts bytes, among its own counters.
        let words = ["port_rcv_data", "port_xmit_data"];
        let bytes = ["rx_bytes", "tx_bytes"];
        let words = words.iter().filter_map(|name| number(&port.path().join("counters").join(name)));
        let bytes = bytes.iter().filter_map(|name| number(&port.path().join("hw_counters").join(name)));
        words.map(|words| words.saturating_mul(4)).chain(bytes).fold(0, u64::saturating_add)
    };
    let devices = fs::read_dir(devices).into_iter().flatten().flatten();
    devices.flat_map(ports).map(of_port).fold(0, u64::saturating_add)
}

fn interfaces(process: Pid) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/net/dev", process.0)).unwrap_or_default();
    // A line of an interface: its name, eight counters for received data, eight for sent data. Bytes are the first of each.
    let of_line = |line: &str| {
        let counters: Vec<&str> = line.split_once(':')?.1.split_whitespace().collect();
        let number = |index: usize| counters.get(index)?.parse::<u64>().ok();
        Some(number(0)?.saturating_add(number(8)?))
    };
    text.lines().filter_map(of_line).fold(0, u64::saturating_add)
}

/// Whether the process has an accelerator open; also true if that cannot be read.
fn holds_device(process: &Path) -> bool {
    const DEVICES: [&str; 7] =
        ["/dev/nvidia", "/dev/accel", "/dev/vfio", "/dev/kfd", "/dev/dri", "/dev/neuron", "/dev/hl"];
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else { return true };
    let mut files = descriptors.flatten().filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    files.any(|file| DEVICES.iter().any(|device| file.to_string_lossy().starts_with(device)))
}

struct Stat {
    state: ProcessState,
    runnable: bool,
    faults: u64,
}

fn stat(process: Pid) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{}/stat", process.0)).ok()?;
    // The command's name is in brackets and may itself contain brackets and blanks.
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
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(value("rchar:")?.saturating_add(value("wchar:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rdma_devices_carry_is_counted_in_bytes() {
        let host = testing::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = host.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        assert_eq!(rdma(&host.path().join("absent")), 0);
        write("mlx5_0/ports/1/counters/port_rcv_data", "1000\n");
        write("mlx5_0/ports/1/counters/port_xmit_data", "500\n");
        write("mlx5_0/ports/1/counters/symbol_error", "7\n");
        write("efa_0/ports/1/hw_counters/rx_bytes", "30\n");
        write("efa_0/ports/1/hw_counters/tx_bytes", "N/A (no counter)\n");
        assert_eq!(rdma(host.path()), 6030);
    }

    #[test]
    fn our_own_process_can_be_read_and_uses_time() {
        let us = Pid(i32::try_from(std::process::id()).unwrap());
        let first = probe(us, None).unwrap();
        let mut text = String::new();
        while probe(us, None).unwrap().cpu == first.cpu {
            text.push_str("work");
        }
        let second = probe(us, None).unwrap();
        assert!(second.bytes > first.bytes, "reading /proc is reading");
        assert_eq!(second.state, ProcessState::Normal);
        assert!(probe(Pid(-5), None).is_none());
        assert!(!second.holds_device);
    }

    #[test]
    fn a_process_that_has_an_accelerator_open_or_cannot_be_read_holds_one() {
        let process = testing::tempdir().unwrap();
        assert!(holds_device(process.path()), "nothing can be read");
        let descriptors = process.path().join("fd");
        fs::create_dir(&descriptors).unwrap();
        std::os::unix::fs::symlink("/dev/null", descriptors.join("0")).unwrap();
        assert!(!holds_device(process.path()));
        std::os::unix::fs::symlink("/dev/nvidia3", descriptors.join("1")).unwrap();
        assert!(holds_device(process.path()));
    }
}
