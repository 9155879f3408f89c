//! The GPU acceptance program with a library that has NVML's ABI and an `nvidia-smi` that agrees with it or not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use testing::TempDir;

/// A host with one GPU.
struct Host(TempDir);

impl Host {
    fn new() -> Host {
        let host = Host(testing::tempdir().unwrap());
        let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
        fs::copy(built, host.path(fake_devices::LIBRARY)).unwrap();
        let values = json!({"temperature": 40, "power": 91_000, "memory_used": 2_147_483_648_u64});
        let gpu = json!({"uuid": "GPU-1", "pci": "00000000:01:00.0", "values": values});
        let script = json!({"driver": "580.1", "gpus": [gpu]});
        fs::write(host.path(fake_devices::SCRIPT), script.to_string()).unwrap();
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the parts that read; `nvidia-smi` shows this temperature, and a memory temperature if given.
    fn accept(&self, temperature: &str, memory_temperature: &str) -> (Output, Value) {
        let xml = format!(
            "<nvidia_smi_log><gpu id=\"00000000:01:00.0\"><uuid>GPU-1</uuid>\
             <temperature><gpu_temp>{temperature}</gpu_temp><memory_temp>{memory_temperature}</memory_temp>\
             </temperature><gpu_power_readings><power_draw>91.00 W</power_draw></gpu_power_readings>\
             <fb_memory_usage><total>81920 MiB</total><used>2048 MiB</used></fb_memory_usage></gpu>\
             </nvidia_smi_log>"
        );
        let smi = self.path("nvidia-smi");
        testing::executable(
            &smi,
            format!("#!/bin/sh\n[ \"$*\" = '-q -x' ] || exit 9\ncat <<'END'\n{xml}\nEND\n"),
        );
        let mut search = self.0.path().as_os_str().to_owned();
        search.push(":");
        search.push(std::env::var_os("PATH").unwrap());
        let report = self.path("report");
        let done = Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .args(["doctor", "--gpu", "--parts", "nvml,commands,deep,weight", "--out"])
            .arg(&report)
            .env("PATH", search)
            .env("MAINSTAY_AGENT_GPU_LIBRARY", self.path(fake_devices::LIBRARY))
            .output()
            .unwrap();
        assert!(fs::read_to_string(report.join("report.md")).unwrap().contains("| part | check |"));
        let text = fs::read_to_string(report.join("report.json")).unwrap();
        (done, serde_json::from_str(&text).unwrap())
    }
}

/// The verdict and the observation of the check whose name has this ending.
fn check<'a>(report: &'a Value, part: &str, ending: &str) -> (&'a str, &'a str) {
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|of| of["part"] == part && of["name"].as_str().unwrap().ends_with(ending));
    let found = found.unwrap_or_else(|| panic!("no check {ending:?} of {part}: {report:#}"));
    (found["verdict"].as_str().unwrap(), found["seen"].as_str().unwrap())
}

#[test]
fn readings_that_agree_with_nvidia_smi_pass_and_the_commands_name_the_gpu() {
    let (done, report) = Host::new().accept("41 C", "N/A");
    for reading in ["temperature", "power", "memory_total", "memory_used", "uuid"] {
        assert_eq!(check(&report, "nvml", &format!(" {reading}")).0, "pass", "{reading}: {report:#}");
    }
    assert_eq!(check(&report, "commands", "mainstay gpus"), ("pass", "1"));
    assert_eq!(check(&report, "commands", "status shows gpu.0000:01:00").0, "pass");
    assert_eq!(check(&report, "commands", "metrics name gpu.0000:01:00").0, "pass");
    assert_eq!(check(&report, "weight", "memory of agent").0, "pass");
    // Only requested parts were run.
    assert!(report["checks"].as_array().unwrap().iter().all(|of| of["part"] != "training"), "{report:#}");
    assert_eq!(report["counts"]["fail"] == 0, done.status.success(), "{report:#}");
}

#[test]
fn a_reading_that_differs_from_nvidia_smi_fails_and_so_does_the_command() {
    let (done, report) = Host::new().accept("73 C", "N/A");
    let (verdict, seen) = check(&report, "nvml", "00 temperature");
    assert_eq!((verdict, seen), ("fail", "40"), "{report:#}");
    assert_eq!(done.status.code(), Some(1));
}

#[test]
fn a_host_without_a_driver_runs_no_check_and_reports_no_success() {
    if std::path::Path::new("/proc/driver/nvidia/version").exists()
        || std::path::Path::new("/dev/nvidiactl").exists()
    {
        return testing::skip("this host has an NVIDIA driver");
    }
    let report = testing::tempdir().unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_mainstay"))
        .args(["doctor", "--gpu", "--parts", "nvml,commands,deep,weight", "--out"])
        .arg(report.path())
        .env_remove("MAINSTAY_AGENT_GPU_LIBRARY")
        .output()
        .unwrap();
    let text = fs::read_to_string(report.path().join("report.json")).unwrap();
    let read: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(read["counts"], json!({"pass": 0, "fail": 0, "not_run": 4}), "{read:#}");
    assert_eq!(done.status.code(), Some(0));
}

#[test]
fn a_part_that_does_not_exist_is_refused_with_the_names_of_those_that_do() {
    let report = testing::tempdir().unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_mainstay"))
        .args(["doctor", "--gpu", "--parts", "nvlm", "--out"])
        .arg(report.path())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && printed.contains("nvlm") && printed.contains("nvml"), "{printed}");
}
