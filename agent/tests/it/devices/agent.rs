//! The whole agent with simulated GPUs.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use super::host::Host;
use crate::support::Agent;

/// An agent with the host's library as NVML, an empty kernel log and these GPU settings.
fn start(host: &Host, settings: &[(&str, &str)]) -> Agent {
    fs::write(kernel_log(host), "").unwrap();
    let (library, log) = (host.directory.path().join(fake_devices::LIBRARY), kernel_log(host));
    let mut all: Vec<(&str, &Path)> = vec![("GPU_LIBRARY", &library), ("KERNEL_LOG_PATH", &log)];
    all.extend(settings.iter().map(|(key, value)| (*key, Path::new(*value))));
    Agent::start(host.directory.path(), &all)
}

fn kernel_log(host: &Host) -> PathBuf {
    host.directory.path().join("kmsg")
}

#[test]
fn an_agent_whose_driver_hangs_answers_and_reports_it() {
    let mut host = Host::with_gpus(2);
    host.set("/hang", json!(["nvmlDeviceGetTemperature"]));
    let agent = start(&host, &[("LIMITS_GPU_DEADLINE", "1s"), ("GPU_INTERVAL", "1s")]);
    agent.wait_for("gpu_driver_silent");
    agent.wait_until_in_state("gpu.driver", "UNKNOWN");
    let status = agent.status();
    let driver = status.lines().find(|line| line.contains("gpu.driver"));
    assert!(driver.is_some_and(|line| line.contains("UNKNOWN")), "{status}");
    host.set("/hang", json!([]));
    agent.wait_for_change("gpu.driver", "UNKNOWN", "HEALTHY");
    assert!(agent.status().contains("gpu.0000:02:00"), "{}", agent.status());
}

#[test]
fn a_probe_that_hangs_in_the_driver_goes_with_an_agent_that_is_killed() {
    let mut host = Host::with_gpus(1);
    host.set("/hang", json!(["nvmlDeviceGetTemperature"]));
    let agent = start(&host, &[("LIMITS_GPU_DEADLINE", "60s")]);
    let probe = loop {
        let is_probe = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("nvml"))
        };
        if let Some(child) = agent.children().into_iter().find(is_probe) {
            break pidfd_open(Pid::from_raw(child).unwrap(), PidfdFlags::empty()).unwrap();
        }
        std::thread::yield_now();
    };
    drop(agent);
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&probe, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ended, 1, "it hangs in the driver and sees nothing of its pipes");
}

#[test]
fn an_agent_shows_its_gpus_and_reports_an_xid_once() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/processes", json!([[4711, 1_000_000]]));
    let agent = start(&host, &[("GPU_INTERVAL", "1s")]);
    // Learned: three readings were healthy.
    agent.wait_for("18 NVLinks up");
    let reported: Value = serde_json::from_str(&agent.ask(&["gpus", "--json"])).unwrap();
    assert_eq!(reported["exit_status"], 0, "{reported}");
    let first = &reported["devices"][0];
    assert_eq!((&first["pci_address"], &first["uuid"]), (&json!("0000:01:00"), &json!("GPU-0")));
    assert_eq!((&first["links_up"], &first["power_limit"]), (&json!(18), &json!(700.0)));
    assert_eq!(first["processes"], json!([{"pid": 4711, "memory": 1_000_000}]));

    // Kernel log and driver report one XID, and only the driver reports another.
    let line = "4,1,1000,-;NVRM: Xid (PCI:0000:02:00): 119, pid=7, name=python, Timeout after 6s\n";
    fs::write(kernel_log(&host), line).unwrap();
    let event = |gpu, code| json!({"gpu": gpu, "kind": 8, "data": code});
    host.set("/events", json!([event(1, 119), event(0, 79)]));
    agent.wait_for_xid_by_nvml("0000:01:00", 79);
    let events = agent.ask(&["events", "--json"]);
    let xids = events.lines().filter(|line| line.contains("XID 119 of GPU")).count();
    assert_eq!(xids, 1, "{events}");
    let gpus = agent.ask(&["gpus"]);
    assert!(gpus.contains("0000:01:00  UNHEALTHY") && gpus.contains("XID 79"), "{gpus}");
}

#[test]
fn a_lost_gpu_is_known_long_before_the_next_full_reading_and_the_other_stays_well() {
    let mut host = Host::with_gpus(2);
    // Only the probe's own look can find it within this test.
    let agent = start(&host, &[("GPU_INTERVAL", "1h")]);
    while !agent.ask(&["gpus"]).contains("0000:02:00  HEALTHY") {
        std::thread::yield_now();
    }
    host.set("/gpus/1/codes", json!({"*": 15}));
    agent.wait_for_change("gpu.0000:02:00", "HEALTHY", "UNHEALTHY");
    let gpus = agent.ask(&["gpus"]);
    assert!(gpus.contains("0000:02:00  UNHEALTHY"), "{gpus}");
    assert!(!gpus.contains("0000:01:00  UNHEALTHY"), "{gpus}");
}

#[test]
fn an_xid_of_a_lost_gpu_names_it_though_its_handle_is_a_new_one() {
    let mut host = Host::with_gpus(2);
    host.set("/fresh_handles", json!(true));
    let agent = start(&host, &[("GPU_INTERVAL", "1s")]);
    agent.wait_for("18 NVLinks up");
    host.script["gpus"][1]["codes"] = json!({"*": 15});
    host.set("/events", json!([{"gpu": 1, "kind": 8, "data": 79}]));
    agent.wait_for_xid_by_nvml("0000:02:00", 79);
}

#[test]
fn a_slowdown_and_a_narrow_link_of_an_idle_gpu_are_notes_and_do_not_count() {
    let mut host = Host::with_gpus(2);
    host.set("/gpus/0/values", json!({"clock_reasons": 0x40, "pcie_width": 8, "utilization": 0}));
    let agent = start(&host, &[("GPU_INTERVAL", "1s")]);
    agent.wait_for("18 NVLinks up");
    let reported: Value = serde_json::from_str(&agent.ask(&["gpus", "--json"])).unwrap();
    let (first, second) = (&reported["devices"][0], &reported["devices"][1]);
    assert_eq!(first["state"], "HEALTHY", "{reported}");
    let notes: Vec<&str> =
        first["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    testing::snapshot!(
        "components",
        "notes of a GPU that is slowed down and has a narrow link",
        notes.join("\n")
    );
    assert_eq!(second["notes"], json!([]), "{reported}");
    let screen = agent.ask(&["gpus"]);
    assert!(notes.iter().all(|note| screen.contains(note)), "on the screen too: {screen}");
    let explained = agent.ask(&["explain", "gpu.0000:01:00"]);
    assert!(notes.iter().all(|note| explained.contains(note)), "{explained}");
}
