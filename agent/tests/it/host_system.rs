//! The operating system as read from directory trees and by child processes, and the whole agent with them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::os::{Capped, MemoryModule, MountState, Reading, SystemSample, Usage};
use mainstay_model::id::Pid;
use mainstay_model::time::{Mono, Span};
use mainstay_sensors::source::host::{Roots, SystemPlan, SystemSource};
use support::Agent;
use testing::TempDir;

/// A fake /proc and /sys, and possible mounts.
struct Tree(TempDir);

impl Tree {
    fn new() -> Tree {
        let tree = Tree(testing::tempdir().unwrap());
        tree.write("proc/loadavg", "2.50 1.00 0.50 3/120 4711\n");
        tree.write("proc/sys/kernel/pid_max", "4194304\n");
        tree.write("proc/sys/kernel/threads-max", "32768\n");
        tree.write("proc/sys/fs/file-nr", "1234\t0\t9223372036854775807\n");
        tree.write("proc/self/mountinfo", "");
        tree
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn process(&self, pid: u32, state: char, parent: u32, ran: u32) {
        let stat = format!(
            "{pid} (train.py (x)) {state} {parent} 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 {} 0 0 184467\n",
            pid * 100
        );
        self.write(&format!("proc/{pid}/stat"), &stat);
        self.write(&format!("proc/{pid}/comm"), "train.py\n");
        self.write(&format!("proc/{pid}/schedstat"), &format!("1 2 {ran}\n"));
        self.write(&format!("proc/{pid}/wchan"), "nv_lock_api");
    }

    /// A network file system in this tree.
    fn mount(&self, name: &str) -> PathBuf {
        let point = self.path(name);
        let line =
            format!("30 27 0:45 / {} rw,relatime shared:1 - nfs4 server:/{name} rw,hard\n", point.display());
        let table = fs::read_to_string(self.path("proc/self/mountinfo")).unwrap();
        self.write("proc/self/mountinfo", &format!("{table}{line}"));
        point
    }

    /// A program that answers like systemctl.
    fn systemctl(&self, script: &str) -> PathBuf {
        let path = self.path("systemctl");
        testing::executable(&path, format!("#!/bin/sh\n{script}\n"));
        path
    }

    fn plan(&self) -> SystemPlan {
        SystemPlan {
            roots: Roots { proc: self.path("proc"), sys: self.path("sys"), fstab: self.path("fstab") },
            program: env!("CARGO_BIN_EXE_mainstay").into(),
            scan_every: Duration::from_secs(30),
            ask_mounts_every: Duration::from_secs(30),
            mount_deadline: Duration::from_secs(20),
            exclude_mounts: vec![],
            file_systems: vec![],
            systemctl: Some(self.path("no systemctl")),
            ipmitool: None,
            units: vec![],
            modules: vec![],
        }
    }

    fn sample(&self) -> SystemSample {
        SystemSource::new(self.plan()).sample(at(10))
    }
}

fn at(seconds: u64) -> Mono {
    Mono(0).after(Span::seconds(seconds))
}

/// A directory whose open blocks: the FIFO has no writer.
fn hang(point: &Path) {
    fs::remove_dir(point).unwrap();
    nix::unistd::mkfifo(point, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

fn heal(point: &Path) {
    fs::remove_file(point).unwrap();
    fs::create_dir(point).unwrap();
}

/// The state of the first mount at this time: on a busy machine the answer may take several looks, each of which
/// waits a little for it.
fn answer(source: &mut SystemSource, seconds: u64) -> MountState {
    loop {
        let state = source.sample(at(seconds)).mounts.remove(0).state;
        if state != MountState::Asked {
            return state;
        }
    }
}

/// Child processes of ours that check this file system.
fn asking(point: &Path) -> usize {
    let children = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.contains(&b"mount".as_slice()) && words.contains(&point.as_os_str().as_encoded_bytes())
    });
    children.count()
}

#[test]
fn tables_and_processes_come_from_the_tree() {
    let tree = Tree::new();
    tree.process(10, 'S', 1, 5);
    tree.process(11, 'D', 10, 5);
    tree.process(12, 'Z', 10, 5);
    tree.process(13, 'Z', 10, 5);
    let sample = tree.sample();
    assert_eq!(sample.tables.tasks, Reading::Value(Usage { used: 120, limit: 32_768 }));
    assert_eq!(sample.tables.files, Reading::Value(Usage { used: 1234, limit: i64::MAX as u64 }));
    let Some(Reading::Value(scan)) = sample.scan else { panic!("no scan") };
    assert_eq!((scan.processes, scan.zombies), (4, 2));
    assert_eq!(scan.most, Some((Pid(10), "train.py".to_owned(), 2)));
    let blocked = &scan.blocked[0];
    assert_eq!((blocked.pid, blocked.start, blocked.ran), (11, 1100, Some(5)));
    assert_eq!(
        (blocked.name.as_str(), blocked.waits_in.as_slice()),
        ("train.py (x)", ["nv_lock_api".to_owned()].as_slice())
    );
}

#[test]
fn processes_are_looked_through_seldom_and_less_on_an_idle_host() {
    let tree = Tree::new();
    let mut source = SystemSource::new(tree.plan());
    let mut looks = |seconds: &[u64]| -> Vec<bool> {
        seconds.iter().map(|seconds| source.sample(at(*seconds)).scan.is_some()).collect()
    };
    assert_eq!(looks(&[10, 20, 30]), [true, false, false]);
    assert_eq!(looks(&[3600, 3610]), [true, false]);
    tree.write("proc/loadavg", "0.01 0.01 0.00 1/120 4711\n");
    assert_eq!(looks(&[7200, 7300, 7400]), [true, false, false]);
    // A process sleeps uninterruptibly: the host is no longer idle.
    tree.process(11, 'D', 1, 5);
    assert_eq!(looks(&[9000, 9100]), [true, true]);
}

#[test]
fn an_empty_tree_names_what_is_missing() {
    let tree = Tree(testing::tempdir().unwrap());
    let sample = tree.sample();
    assert!(sample.tables.files.why_absent().unwrap().contains("file-nr"));
    assert!(sample.tables.tasks.why_absent().unwrap().contains("loadavg"));
    assert!(matches!(&sample.scan, Some(Reading::Failed(why)) if why.contains("listing")));
    assert!(sample.mounts.is_empty() && sample.memory.is_empty() && sample.modules.is_none());
    assert!(sample.throttled.is_empty() && sample.governors.is_empty() && sample.services.is_none());
}

#[test]
fn memory_modules_heat_and_modules_come_from_the_tree() {
    let tree = Tree::new();
    let controllers = "sys/devices/system/edac/mc";
    for (file, text) in [
        ("mc0/dimm0/dimm_label", "CPU0_DIMM_A1\n"),
        ("mc0/dimm0/dimm_ce_count", "17\n"),
        ("mc0/dimm0/dimm_ue_count", "1\n"),
        ("mc0/ce_noinfo_count", "0\n"),
        ("mc0/ue_noinfo_count", "0\n"),
        ("mc1/ce_count", "4\n"),
        ("mc1/ue_count", "0\n"),
    ] {
        tree.write(&format!("{controllers}/{file}"), text);
    }
    for cpu in 0..4 {
        let path = format!("sys/devices/system/cpu/cpu{cpu}");
        tree.write(&format!("{path}/topology/physical_package_id"), &format!("{}\n", cpu / 2));
        tree.write(&format!("{path}/thermal_throttle/package_throttle_count"), "9\n");
        tree.write(&format!("{path}/cpufreq/scaling_governor"), "powersave\n");
        // The meaning of the governor depends on the driver.
        let driver = if cpu == 1 { "acpi-cpufreq\n" } else { "intel_pstate\n" };
        tree.write(&format!("{path}/cpufreq/scaling_driver"), driver);
        tree.write(&format!("{path}/cpufreq/cpuinfo_max_freq"), "4000000\n");
        let allowed = if cpu == 3 { "1000000\n" } else { "4000000\n" };
        tree.write(&format!("{path}/cpufreq/scaling_max_freq"), allowed);
    }
    tree.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1\n",
    );
    tree.write("sys/module/nvidia/refcnt", "1\n");
    tree.write("sys/bus/pci/devices/0000:3b:00.0/vendor", "0x10de\n");
    tree.write("sys/bus/pci/devices/0000:3b:00.0/class", "0x030200\n");
    let plan = SystemPlan { modules: vec!["lustre".to_owned()], ..tree.plan() };
    let sample = SystemSource::new(plan).sample(at(10));
    let module =
        |name: &str, corrected, uncorrected| MemoryModule { name: name.into(), corrected, uncorrected };
    assert_eq!(sample.memory, [module("mc0 CPU0_DIMM_A1", 17, 1), module("mc1", 4, 0)]);
    assert_eq!(sample.throttled, [("CPU package 0".into(), 9), ("CPU package 1".into(), 9)].into());
    assert_eq!((sample.governors, sample.held_low), ([("powersave".into(), 4)].into(), 1));
    assert_eq!(sample.capped, Some(Capped { cpus: 4, least: 25.0, at_least: 1 }));
    let Some(Reading::Value(modules)) = sample.modules else { panic!("no modules") };
    assert_eq!((modules.loaded, modules.lacking), (vec!["nvidia".to_owned()], vec!["lustre".to_owned()]));
    assert_eq!((modules.gpus, modules.rdma, modules.dma_buf), (1, false, true));
}

#[test]
fn the_fast_counter_of_the_cpus_is_known_and_that_of_guests_is_not_counted_on() {
    for (flags, expected) in [
        ("fpu tsc constant_tsc nonstop_tsc avx512f", true),
        ("fpu tsc constant_tsc nonstop_tsc hypervisor", false),
        ("fpu tsc", false),
    ] {
        let tree = Tree::new();
        let clock = "sys/devices/system/clocksource/clocksource0/current_clocksource";
        tree.write(clock, "hpet\n");
        tree.write("proc/cpuinfo", &format!("processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n"));
        // A sandbox may refuse to return the clock.
        if let Reading::Value(clock) = SystemSource::new(tree.plan()).sample(at(10)).clock {
            assert_eq!((clock.source.as_deref(), clock.has_fast), (Some("hpet"), expected), "{flags}");
        }
    }
}

/// The configuration space of a downstream switch port with this ACS control register.
fn port(control: u8) -> Vec<u8> {
    let mut config = vec![0; 4096];
    for (at, byte) in [(0x34, 0x40), (0x40, 0x10), (0x42, 0x62), (0x100, 0x0d), (0x106, control)] {
        config[at] = byte;
    }
    config
}

#[test]
fn switches_above_gpus_are_read_and_those_of_guests_are_not() {
    for (driver, length, expected) in [
        ("nvidia", 4096, Some((2, vec!["0000:3a:00.0".to_owned()]))),
        ("nvidia", 64, None),
        ("vfio-pci", 4096, None),
    ] {
        let tree = Tree::new();
        let bus = tree.path("sys/bus/pci");
        for (number, control) in [(0x3a, 0x1d), (0x3b, 0x01)] {
            let port_path = format!("sys/devices/pci0000:38/0000:38:01.0/0000:{number:02x}:00.0");
            let gpu = format!("0000:{:02x}:00.0", number + 0x10);
            tree.write(&format!("{port_path}/{gpu}/vendor"), "0x10de\n");
            fs::write(tree.path(&format!("{port_path}/config")), &port(control)[..length]).unwrap();
            fs::create_dir_all(bus.join("devices")).unwrap();
            fs::create_dir_all(bus.join("drivers").join(driver)).unwrap();
            let device = tree.path(&format!("{port_path}/{gpu}"));
            std::os::unix::fs::symlink(bus.join("drivers").join(driver), device.join("driver")).unwrap();
            std::os::unix::fs::symlink(&device, bus.join("devices").join(&gpu)).unwrap();
        }
        let read = tree.sample().switch_ports.map(|ports| (ports.read, ports.redirecting));
        assert_eq!(read, expected, "{driver}, {length} bytes");
    }
}

#[test]
fn the_tightest_limit_of_tasks_is_that_of_our_group() {
    let tree = Tree::new();
    tree.write("proc/self/cgroup", "0::/job/step\n");
    tree.write("sys/fs/cgroup/job/pids.max", "100\n");
    tree.write("sys/fs/cgroup/job/pids.current", "90\n");
    tree.write("sys/fs/cgroup/job/step/pids.max", "max\n");
    assert_eq!(tree.sample().tables.group_tasks, Some(Usage { used: 90, limit: 100 }));
}

#[test]
fn services_are_reported_by_systemctl_or_the_reason_why_not_is_shown() {
    let tree = Tree::new();
    let answer = "echo \"Id=$5\"; echo LoadState=loaded; echo ActiveState=failed; echo Result=exit-code; \
        echo; echo Id=other; echo LoadState=not-found";
    let reported = |program: PathBuf| {
        let plan =
            SystemPlan { systemctl: Some(program), units: vec!["a.service".to_owned()], ..tree.plan() };
        let mut source = SystemSource::new(plan);
        loop {
            if let Some(services) = source.sample(at(10)).services {
                return services;
            }
        }
    };
    let Reading::Value(services) = reported(tree.systemctl(answer)) else { panic!("no answer") };
    assert_eq!(services.units.len(), 1);
    assert_eq!((services.units[0].name.as_str(), services.units[0].active.as_str()), ("a.service", "failed"));
    assert!(!services.switches);
    tree.write("sys/class/infiniband/mlx5_4/device/vendor", "0x15b3\n");
    tree.write("sys/class/infiniband/mlx5_4/device/vpd", "bridge SMDL=SW_MNG");
    let Reading::Value(services) = reported(tree.systemctl(answer)) else { panic!("no answer") };
    assert!(services.switches, "they are behind a card");
    let failed = reported(tree.systemctl("exit 1"));
    let folder = tree.0.path().display().to_string();
    testing::snapshot!(
        "host_system",
        "systemctl fails",
        failed.why_absent().unwrap().replace(&folder, "DIRECTORY")
    );
    assert!(reported("/nowhere/systemctl".into()).why_absent().unwrap().contains("/nowhere/systemctl"));
}

#[test]
fn a_systemctl_that_hangs_is_abandoned_and_no_second_one_is_started() {
    let tree = Tree::new();
    let program = tree.systemctl("echo x >> \"$0.started\"; exec sleep 1000");
    let plan = SystemPlan { systemctl: Some(program), units: vec!["a.service".to_owned()], ..tree.plan() };
    let mut source = SystemSource::new(plan);
    assert_eq!(source.sample(at(10)).services, None);
    let reported = source.sample(at(100)).services.unwrap();
    let folder = tree.0.path().display().to_string();
    testing::snapshot!(
        "host_system",
        "systemctl hangs",
        reported.why_absent().unwrap().replace(&folder, "DIRECTORY")
    );
    assert_eq!(fs::read_to_string(tree.path("systemctl.started")).unwrap(), "x\n");
}

#[test]
fn network_file_systems_answer_or_fail() {
    let tree = Tree::new();
    fs::create_dir(tree.mount("data")).unwrap();
    tree.mount("gone");
    let mount = |tree: &Tree, point: &str| {
        let mut source = SystemSource::new(tree.plan());
        loop {
            let mounts = source.sample(at(10)).mounts;
            let state =
                mounts.into_iter().find(|mount| mount.point.ends_with(point)).map(|mount| mount.state);
            if state != Some(MountState::Asked) {
                return state;
            }
        }
    };
    // Both have the device 0:45, as bind mounts of one file system do: it is checked once, at its shortest path.
    assert_eq!(tree.sample().mounts.len(), 1);
    let table = fs::read_to_string(tree.path("proc/self/mountinfo")).unwrap();
    let several = table.replacen("0:45", "0:46", 1);
    tree.write(
        "proc/self/mountinfo",
        &format!("{several}1 2 8:1 / / rw - ext4 /dev/sda rw\n1 2 0:9 / /x rw - fuse.lxcfs l rw\n"),
    );
    assert_eq!(mount(&tree, "/data"), Some(MountState::Answers));
    assert!(matches!(mount(&tree, "/gone"), Some(MountState::Fails(why)) if why.contains("No such file")));
    assert_eq!(tree.sample().mounts.len(), 2);
    let plan = SystemPlan { exclude_mounts: vec![tree.0.path().to_owned()], ..tree.plan() };
    assert!(SystemSource::new(plan).sample(at(10)).mounts.is_empty());
}

#[test]
fn a_network_file_system_that_hangs_is_asked_by_one_process_at_most() {
    let tree = Tree::new();
    let point = tree.mount("data");
    fs::create_dir(&point).unwrap();
    hang(&point);
    let mut source = SystemSource::new(tree.plan());
    assert_eq!(source.sample(at(10)).mounts[0].state, MountState::Asked);
    assert_eq!(asking(&point), 1);
    for seconds in [40, 70, 100, 130] {
        assert_eq!(source.sample(at(seconds)).mounts[0].state, MountState::Silent { since: at(10) });
        assert!(asking(&point) <= 1);
    }
    heal(&point);
    // The last check still waits for the old one: it is ended, and the next one is answered.
    while source.sample(at(160)).mounts[0].state != MountState::Answers {}
    drop(source);
    assert_eq!(asking(&point), 0);
}

#[test]
fn an_old_answer_does_not_count() {
    let tree = Tree::new();
    fs::create_dir(tree.mount("data")).unwrap();
    let program = tree.path("program");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_mainstay"), &program).unwrap();
    let mut source = SystemSource::new(SystemPlan { program: program.clone(), ..tree.plan() });
    assert_eq!(answer(&mut source, 10), MountState::Answers);
    fs::remove_file(&program).unwrap();
    assert_eq!(source.sample(at(60)).mounts[0].state, MountState::Answers);
    assert_eq!(source.sample(at(1000)).mounts[0].state, MountState::Asked);
}

/// The agent with this tree, fast enough for a test.
fn agent(tree: &Tree) -> Agent {
    let (proc, sys) = (tree.path("proc"), tree.path("sys"));
    fs::create_dir_all(&sys).unwrap();
    let settings: &[(&str, &Path)] = &[
        ("HOST_PROC_ROOT", &proc),
        ("HOST_SYS_ROOT", &sys),
        ("KERNEL_LOG_PATH", Path::new("")),
        ("HOST_SYSTEM_INTERVAL", Path::new("1s")),
        ("LIMITS_HOST_MOUNTS_DEADLINE", Path::new("2s")),
        ("LIMITS_HOST_PROCESSES_STUCK_AFTER", Path::new("2s")),
    ];
    Agent::start(tree.0.path(), settings)
}

#[test]
fn the_agent_reports_a_mount_that_hangs_and_that_it_answers_again() {
    let tree = Tree::new();
    let point = tree.mount("data");
    fs::create_dir(&point).unwrap();
    let agent = agent(&tree);
    // On a busy machine the first answer may arrive after the first look.
    agent.wait_until_in_state("host.mounts", "HEALTHY");
    hang(&point);
    let reported = agent.wait_for_change("host.mounts", "HEALTHY", "UNHEALTHY");
    assert!(reported.contains("nfs4 from server:/data"), "it names the mount: {reported}");
    heal(&point);
    agent.wait_for_change("host.mounts", "UNHEALTHY", "HEALTHY");
}

#[test]
fn the_agent_reports_a_process_that_is_stuck_in_the_driver_and_none_that_works() {
    let tree = Tree::new();
    tree.process(10, 'S', 1, 5);
    let agent = agent(&tree);
    agent.wait_for_state("host.processes", "HEALTHY");
    tree.process(11, 'D', 10, 5);
    let reported = agent.wait_for_change("host.processes", "HEALTHY", "UNHEALTHY");
    assert!(reported.contains("train.py (x) (process 11)") && reported.contains("REBOOT_NODE"), "{reported}");
    tree.process(11, 'S', 10, 6);
    agent.wait_for_change("host.processes", "UNHEALTHY", "HEALTHY");
    let status = agent.status();
    for absent in ["host.mounts", "host.services", "host.modules", "host.memory_errors", "host.cpu_speed"] {
        assert!(!status.contains(absent), "{status}");
    }
}

#[test]
fn the_management_controller_is_asked_by_its_program() {
    let tree = Tree::new();
    let program = tree.path("ipmitool");
    testing::executable(
        &program,
        "#!/bin/sh\n[ \"$1 $2\" = 'sdr elist' ] && echo 'PSU2 Status | C9h | ok | 10.2 | Presence detected, Power Supply AC lost'\n",
    );
    let ask = |program: std::path::PathBuf| {
        let mut source = SystemSource::new(SystemPlan { ipmitool: Some(program), ..tree.plan() });
        loop {
            if let Some(reading) = source.sample(at(10)).sensors {
                return reading;
            }
        }
    };
    let Reading::Value(sensors) = ask(program) else { panic!("no sensors") };
    assert_eq!((sensors.len(), sensors[0].name.as_str()), (1, "PSU2 Status"));
    // A named program that does not exist is an error; without a named one there is nothing to show.
    assert!(matches!(ask(tree.path("no ipmitool")), Reading::Failed(_)));
    assert_eq!(tree.sample().sensors, None);
}
