//! What the kernel writes of the host: PCIe, memory and CPU errors, kills, hangs, disks, cards, crashes.

use crate::id::Pid;
use crate::kernel::{KernelClass, KernelReport, LogPlace};

use KernelClass::{
    AerCorrected, AerUncorrected, DiskError, FileSystemError, HungTask, KernelBug, Lockup, MachineCheck,
    MachineCheckCorrected, NetworkCard, Nvme, OutOfMemory, RemountedReadOnly, Segfault,
};

/// Reads a line of any class of the host.
pub fn report(message: &str) -> Option<KernelReport> {
    const READERS: [fn(&str) -> Option<KernelReport>; 9] =
        [out_of_memory, stuck, kernel_bug, network_card, nvme, file_system, disk, pcie, hardware];
    READERS.iter().find_map(|reader| reader(message)).or_else(|| segfault(message))
}

fn about(class: KernelClass, subject: Option<&str>) -> KernelReport {
    let subject = subject.map(|subject| subject.trim().to_owned()).filter(|subject| !subject.is_empty());
    KernelReport { class, subject, pid: None, process: None, cgroup: None, place: LogPlace::default() }
}

/// The text between two marks.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

fn word_after<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split(|letter: char| letter.is_whitespace() || letter == ',' || letter == ':').next()
}

fn pid(text: &str) -> Option<Pid> {
    text.trim().parse().ok().filter(|pid| *pid > 0).map(Pid)
}

/// `oom-kill:constraint=…,task_memcg=/job,task=python,pid=1,uid=0` and `Out of memory: Killed process 1 (python)`.
fn out_of_memory(message: &str) -> Option<KernelReport> {
    if let Some(fields) = message.strip_prefix("oom-kill:") {
        // The task's name comes before its pid and may itself hold a comma.
        let process = between(fields, ",task=", ",pid=");
        let cgroup = between(fields, ",task_memcg=", ",task=");
        let pid = fields.rsplit_once(",pid=").and_then(|(_, rest)| pid(rest.split(',').next()?));
        return Some(KernelReport {
            pid,
            process: process.map(str::to_owned),
            cgroup: cgroup.map(str::to_owned),
            ..about(OutOfMemory, None)
        });
    }
    let (before, killed) = message.split_once("ut of memory: Kill")?;
    if !matches!(before, "O" | "Memory cgroup o") {
        return None;
    }
    let (number, rest) = killed.split_once("process ")?.1.split_once(" (")?;
    let process = rest.split_once(')').map(|(process, _)| process.to_owned());
    Some(KernelReport { pid: pid(number), process, ..about(OutOfMemory, None) })
}

/// `INFO: task python:1 blocked for more than 120 seconds.` and `watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:1]`.
fn stuck(message: &str) -> Option<KernelReport> {
    if let Some(task) = message.strip_prefix("INFO: task ") {
        let (who, _) = task.split_once(" blocked for more than ")?;
        let (process, number) = who.rsplit_once(':')?;
        return Some(KernelReport {
            pid: pid(number),
            process: Some(process.to_owned()),
            ..about(HungTask, None)
        });
    }
    let text = message
        .strip_prefix("watchdog: ")
        .or_else(|| message.strip_prefix("NMI watchdog: "))
        .unwrap_or(message);
    if text.starts_with("BUG: soft lockup")
        || text.starts_with("Watchdog detected hard LOCKUP")
        || text.starts_with("BUG: workqueue lockup")
    {
        let cpu = text
            .split(|letter: char| letter.is_whitespace())
            .find(|word| word.to_ascii_lowercase().starts_with("cpu#"));
        let who = text.rsplit_once('[').and_then(|(_, who)| who.trim_end_matches(']').rsplit_once(':'));
        return Some(KernelReport {
            pid: who.and_then(|(_, number)| pid(number)),
            process: who.map(|(process, _)| process.to_owned()),
            ..about(Lockup, cpu)
        });
    }
    let stalled = text.starts_with("rcu: INFO: rcu_") || text.starts_with("INFO: rcu_");
    (stalled && text.contains("detected stall")).then(|| about(Lockup, None))
}

fn kernel_bug(message: &str) -> Option<KernelReport> {
    let oops = message.starts_with("BUG: unable to handle ")
        || message.starts_with("BUG: kernel NULL pointer dereference")
        || message.starts_with("kernel BUG at ")
        || message.starts_with("Oops: ")
        || message.starts_with("general protection fault")
        || message.starts_with("Kernel panic - not syncing");
    oops.then(|| about(KernelBug, None))
}

/// mlx5 lines that mean trouble; links that go up and down are told by the ports themselves.
fn network_card(message: &str) -> Option<KernelReport> {
    const TROUBLE: [&str; 10] = [
        "health compromised",
        "unrecoverable",
        "Will cause a leak of a command resource",
        "assert_var[0]",
        "Fatal error",
        "fatal sensor",
        "High Temperature",
        "insufficient power",
        "not responding",
        "device is gone",
    ];
    let rest = message.strip_prefix("mlx5_core ")?;
    TROUBLE
        .iter()
        .any(|trouble| rest.contains(trouble))
        .then(|| about(NetworkCard, rest.split_whitespace().next().map(|card| card.trim_end_matches(':'))))
}

fn nvme(message: &str) -> Option<KernelReport> {
    let rest = message.strip_prefix("nvme ")?;
    let (disk, what) = rest.split_once(": ")?;
    let trouble = (what.contains("timeout") && what.starts_with("I/O"))
        || what.starts_with("controller is down")
        || what.starts_with("Removing after probe failure")
        || what.starts_with("Device not ready")
        || what.starts_with("Disabling device after reset failure")
        || what.starts_with("Abort status");
    trouble.then(|| about(Nvme, Some(disk)))
}

fn file_system(message: &str) -> Option<KernelReport> {
    if let Some(rest) = message.strip_prefix("EXT4-fs error (device ") {
        return Some(about(FileSystemError, rest.split_once(')').map(|(device, _)| device)));
    }
    if message.to_ascii_lowercase().contains("remounting filesystem read-only") {
        return Some(about(RemountedReadOnly, between(message, "(", ")")));
    }
    if let Some(rest) = message.strip_prefix("XFS (") {
        let (device, what) = rest.split_once("): ")?;
        let what = what.to_ascii_lowercase();
        let down = what.contains("shut down") || what.contains("shutting down");
        let damaged =
            what.contains("corrupt") || what.contains("log i/o error") || what.contains("metadata i/o error");
        return match (down, damaged) {
            // A file system that XFS shut down can no more be written than one that EXT4 made read-only.
            (true, _) => Some(about(RemountedReadOnly, Some(device))),
            (false, true) => Some(about(FileSystemError, Some(device))),
            (false, false) => None,
        };
    }
    let rest = message.strip_prefix("BTRFS ")?;
    let forced = rest.contains("forced readonly");
    let error = rest.starts_with("error") || rest.starts_with("critical");
    let class = if forced { RemountedReadOnly } else { FileSystemError };
    (forced || error).then(|| {
        about(class, between(rest, "(device ", ")").map(|device| device.trim_end_matches(": state")))
    })
}

/// `Buffer I/O error on dev sdb1, …` and `blk_update_request: I/O error, dev sdb, sector …`.
fn disk(message: &str) -> Option<KernelReport> {
    let (_, rest) = message.split_once("I/O error")?;
    let device = rest
        .strip_prefix(" on dev ")
        .or_else(|| rest.strip_prefix(", dev "))
        .or_else(|| rest.strip_prefix(" on device "))?;
    let device = device.split([',', ' ']).next()?;
    // Drives without a medium and loops over files that are gone are nobody's disks.
    let none_of_ours = ["sr", "fd", "loop"].iter().any(|kind| device.starts_with(kind));
    (!none_of_ours).then(|| about(DiskError, Some(device)))
}

/// PCIe's error reporting, in its own words and in those of the firmware.
fn pcie(message: &str) -> Option<KernelReport> {
    let (before, rest) = match message.split_once(": AER: ") {
        Some(found) => found,
        None => message.split_once(": PCIe Bus Error: ")?,
    };
    let reporter = before.rsplit(' ').next();
    let lower = rest.to_ascii_lowercase();
    let class = if lower.contains("uncorrect") {
        AerUncorrected
    } else if lower.contains("correct") {
        AerCorrected
    } else {
        return None;
    };
    // The port reports for the device behind it, where it names one.
    let device = word_after_from(rest).or(reporter);
    Some(about(class, device))
}

fn word_after_from(text: &str) -> Option<&str> {
    let (_, device) = text.split_once(" from ").or_else(|| text.split_once("received: "))?;
    device.split_whitespace().next()
}

/// Machine checks, EDAC, and the firmware's own reports (GHES).
fn hardware(message: &str) -> Option<KernelReport> {
    if let Some(rest) = message.strip_prefix("EDAC ") {
        let (controller, what) = rest.split_once(": ")?;
        let (_, kind) = what.split_once(' ')?;
        let class = match kind.split_whitespace().next()? {
            "CE" => MachineCheckCorrected,
            "UE" => MachineCheck,
            _ => return None,
        };
        let module = word_after(what, " on ").unwrap_or(controller);
        return Some(about(class, Some(module)));
    }
    if message.starts_with("Memory failure: ") {
        return Some(about(MachineCheck, None));
    }
    if !message.contains("[Hardware Error]: ") {
        return None;
    }
    let (_, what) = message.split_once("[Hardware Error]: ")?;
    if let Some(severity) = what.strip_prefix("event severity: ") {
        let corrected = severity.starts_with("corrected") || severity.starts_with("info");
        return Some(about(if corrected { MachineCheckCorrected } else { MachineCheck }, None));
    }
    if what.starts_with("Corrected error") {
        return Some(about(MachineCheckCorrected, None));
    }
    let uncorrected = what.contains("Machine Check Exception")
        || what.starts_with("Uncorrected")
        || what.starts_with("Deferred error")
        || what.contains("Machine check: Processor context corrupt");
    uncorrected.then(|| about(MachineCheck, between(what, "CPU ", ":")))
}

/// `python[1]: segfault at 0 ip … in libtorch.so[…]`.
fn segfault(message: &str) -> Option<KernelReport> {
    let (who, rest) = message
        .split_once("]: segfault at ")
        .or_else(|| message.split_once("] general protection fault ip:"))?;
    let (process, number) = who.rsplit_once('[')?;
    let library = rest.rsplit_once(" in ").map(|(_, library)| library.split('[').next().unwrap_or(library));
    Some(KernelReport {
        pid: pid(number),
        process: Some(process.trim_start_matches("traps: ").to_owned()),
        ..about(Segfault, library)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(line: &str, class: KernelClass, subject: Option<&str>) {
        let read = report(line).unwrap_or_else(|| panic!("nothing read: {line}"));
        assert_eq!((read.class, read.subject.as_deref()), (class, subject), "{line}");
    }

    fn check_process(line: &str, class: KernelClass, pid: i32, process: &str) {
        let read = report(line).unwrap_or_else(|| panic!("nothing read: {line}"));
        assert_eq!(
            (read.class, read.pid, read.process.as_deref()),
            (class, Some(Pid(pid)), Some(process)),
            "{line}"
        );
    }

    #[test]
    fn kills_name_process_and_control_group() {
        let line = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0-1,oom_memcg=/job,task_memcg=/job/rank0,task=pt_data, worker,pid=77,uid=1000";
        check_process(line, OutOfMemory, 77, "pt_data, worker");
        assert_eq!(report(line).and_then(|report| report.cgroup), Some("/job/rank0".to_owned()));
        check_process(
            "Memory cgroup out of memory: Killed process 78 (python) total-vm:1kB",
            OutOfMemory,
            78,
            "python",
        );
        check_process(
            "Out of memory: Kill process 79 (python) score 900 or sacrifice child",
            OutOfMemory,
            79,
            "python",
        );
    }

    #[test]
    fn what_is_stuck_is_named() {
        check_process(
            "INFO: task nvidia-smi:4242 blocked for more than 241 seconds.",
            HungTask,
            4242,
            "nvidia-smi",
        );
        check_process(
            "watchdog: BUG: soft lockup - CPU#17 stuck for 23s! [kworker/17:2:901]",
            Lockup,
            901,
            "kworker/17:2",
        );
        check("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", Lockup, None);
        check("rcu: INFO: rcu_sched self-detected stall on CPU", Lockup, None);
        check("BUG: kernel NULL pointer dereference, address: 0000000000000008", KernelBug, None);
    }

    #[test]
    fn pcie_errors_name_the_device_behind_the_port() {
        check(
            "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
            AerCorrected,
            Some("0000:01:00.0"),
        );
        check(
            "pcieport 0000:00:01.0: AER: Multiple Corrected error message received from 0000:02:00.0",
            AerCorrected,
            Some("0000:02:00.0"),
        );
        check(
            "nvidia 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
            AerCorrected,
            Some("0000:01:00.0"),
        );
        check(
            "nvidia 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
            AerUncorrected,
            Some("0000:01:00.0"),
        );
        check(
            "pcieport 0000:00:01.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:01:00.0",
            AerUncorrected,
            Some("0000:01:00.0"),
        );
        assert_eq!(report("pcieport 0000:00:01.0: AER: enabled with IRQ 24"), None);
    }

    #[test]
    fn hardware_errors_are_told_apart_by_whether_they_were_corrected() {
        check(
            "EDAC MC2: 5 CE memory scrubbing error on CPU_SrcID#1_MC#0_Chan#0_DIMM#1 (channel:0)",
            MachineCheckCorrected,
            Some("CPU_SrcID#1_MC#0_Chan#0_DIMM#1"),
        );
        check("EDAC MC0: 1 UE on unknown memory", MachineCheck, Some("unknown"));
        check(
            "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400",
            MachineCheck,
            Some("3"),
        );
        check("{1}[Hardware Error]: event severity: corrected", MachineCheckCorrected, None);
        check("{1}[Hardware Error]: event severity: fatal", MachineCheck, None);
        check(
            "Memory failure: 0x12ab34: Sending SIGBUS to python:4711 due to hardware memory corruption",
            MachineCheck,
            None,
        );
        assert_eq!(
            report("mce: [Hardware Error]: Machine check events logged"),
            None,
            "the events themselves tell"
        );
        assert_eq!(report("EDAC MC: Ver: 3.0.0"), None);
    }

    #[test]
    fn disks_and_file_systems_are_named() {
        check(
            "Buffer I/O error on dev sdb1, logical block 7, lost async page write",
            DiskError,
            Some("sdb1"),
        );
        check(
            "blk_update_request: I/O error, dev nvme1n1, sector 12345 op 0x0:(READ)",
            DiskError,
            Some("nvme1n1"),
        );
        check("critical medium error, dev sdc: I/O error, dev sdc, sector 5", DiskError, Some("sdc"));
        check("EXT4-fs (dm-0): Remounting filesystem read-only", RemountedReadOnly, Some("dm-0"));
        check(
            "XFS (sdb1): Corruption of in-memory data detected.  Shutting down filesystem",
            RemountedReadOnly,
            Some("sdb1"),
        );
        check(
            "XFS (sdb1): Metadata corruption detected at xfs_agf_read_verify",
            FileSystemError,
            Some("sdb1"),
        );
        check(
            "nvme nvme2: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
            Nvme,
            Some("nvme2"),
        );
        check(
            "nvme nvme2: I/O tag 12 (100c) opcode 0x2 (I/O Cmd) QID 3 timeout, reset controller",
            Nvme,
            Some("nvme2"),
        );
        for calm in [
            "XFS (sdb1): Mounting V5 Filesystem",
            "EXT4-fs (sda1): mounted filesystem with ordered data mode",
            "nvme nvme0: 32/0/0 default/read/poll queues",
            "blk_update_request: I/O error, dev sr0, sector 0",
            "Buffer I/O error on dev loop3, logical block 0",
        ] {
            assert_eq!(report(calm), None, "{calm}");
        }
    }

    #[test]
    fn cards_are_told_of_when_they_fail_and_not_when_links_change() {
        check(
            "mlx5_core 0000:3b:00.0: health_care:123: handling bad device here: fatal sensor",
            NetworkCard,
            Some("0000:3b:00.0"),
        );
        check(
            "mlx5_core 0000:3b:00.1: wait_func:1151:(pid 12): ENABLE_HCA(0x104) timeout. Will cause a leak of a command resource",
            NetworkCard,
            Some("0000:3b:00.1"),
        );
        assert_eq!(report("mlx5_core 0000:3b:00.0 ens1np0: Link down"), None);
        assert_eq!(report("mlx5_core 0000:3b:00.0: firmware version: 28.39.1002"), None);
    }

    #[test]
    fn crashes_name_the_library() {
        let line = "python3[4711]: segfault at 7f00 ip 00007f sp 00007f error 4 in libnccl.so.2.18.1[7f1c+1000000] likely on CPU 3";
        check_process(line, Segfault, 4711, "python3");
        check(line, Segfault, Some("libnccl.so.2.18.1"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in any::<String>()) {
            let _ = report(&text);
        }

        #[test]
        fn nor_does_the_rest_of_a_known_line(head in prop::sample::select(vec!["oom-kill:", "INFO: task ", "watchdog: BUG: soft lockup", "EDAC ", "XFS (", "nvme ", "mlx5_core ", "x: AER: ", "[Hardware Error]: ", "EXT4-fs error (device ", "I/O error, dev ", "Out of memory: Killed process ", "BTRFS "]), tail in any::<String>()) {
            let _ = report(&format!("{head}{tail}"));
        }
    }
}
