//! `mainstay check` as a Slurm prolog runs it: the real program, on a simulated host.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

#[allow(dead_code, reason = "shared with the tests of the agent, which use all of it")]
use crate::support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use support::Agent;
use testing::TempDir;

/// XID 79 as the kernel writes it.
const OFF_BUS: &str = "4,100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n";

/// A simulated host with two GPUs and a kernel log.
struct Host {
    directory: TempDir,
}

impl Host {
    fn new() -> Host {
        let host = Host { directory: testing::tempdir().unwrap() };
        let built = std::env::current_exe().unwrap().with_file_name(fake_devices::LIBRARY);
        fs::copy(built, host.library()).unwrap();
        host.driver(&json!({}));
        fs::write(host.log(), "6,1,1000000,-;Linux version 6.1\n").unwrap();
        host
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn library(&self) -> PathBuf {
        self.path().join(fake_devices::LIBRARY)
    }

    fn log(&self) -> PathBuf {
        self.path().join("kmsg")
    }

    /// Two GPUs whose driver has these additional behaviours.
    fn driver(&self, habits: &Value) {
        let gpus = json!([
            {"uuid": "GPU-0", "pci": "00000000:3B:00.0"},
            {"uuid": "GPU-1", "pci": "00000000:5E:00.0"},
        ]);
        let mut script = json!({"driver": "550.54.15", "gpus": gpus});
        for (key, value) in habits.as_object().unwrap() {
            script[key] = value.clone();
        }
        fs::write(self.path().join(fake_devices::SCRIPT), script.to_string()).unwrap();
    }

    fn settings(&self) -> Vec<(&'static str, PathBuf)> {
        vec![
            ("GPU_LIBRARY", self.library()),
            ("LIMITS_GPU_DEADLINE", "60s".into()),
            ("KERNEL_LOG_PATH", self.log()),
            ("STATE_DIR", self.path().join("state")),
        ]
    }

    fn agent(&self) -> Agent {
        let settings = self.settings();
        let settings: Vec<(&str, &Path)> =
            settings.iter().map(|(name, value)| (*name, value.as_path())).collect();
        Agent::start(self.path(), &settings)
    }

    /// Runs it in an environment without an agent of this machine.
    fn check(&self, options: &str) -> Output {
        let temporary = self.path().join("tmp");
        fs::create_dir_all(&temporary).unwrap();
        Command::new(env!("CARGO_BIN_EXE_mainstay"))
            .arg("check")
            .args(options.split_whitespace())
            .env_clear()
            .env("TMPDIR", &temporary)
            .envs(self.settings().iter().map(|(name, value)| (format!("MAINSTAY_AGENT_{name}"), value)))
            .output()
            .unwrap()
    }

    fn check_as_json(&self, options: &str) -> Value {
        let output = self.check(&format!("{options} --json"));
        let reported: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        assert_eq!(reported["exit_status"], json!(output.status.code().unwrap()));
        reported
    }
}

fn of<'a>(reported: &'a Value, name: &str) -> &'a Value {
    let checks = reported["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name} in {reported:#}"))
}

/// Asserts that a check has the reason of the case.
#[track_caller]
fn says(check: &Value, case: &str) {
    testing::snapshot!("preflight", case, check["reason"].as_str().unwrap());
}

#[test]
fn a_host_that_is_well_passes_with_one_line() {
    let host = Host::new();
    let output = host.check("--alone --group gpu --require gpu=2");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{printed}");
    assert_eq!(printed.lines().count(), 1, "{printed}");
    assert!(printed.starts_with("PASS: ") && !printed.contains('\x1b'), "{printed}");
    assert_eq!(fs::read_dir(host.path().join("tmp")).unwrap().count(), 0, "it leaves nothing behind");
}

#[test]
fn a_fault_of_this_boot_fails_the_check_with_what_to_do() {
    let host = Host::new();
    fs::write(host.log(), OFF_BUS).unwrap();
    let reported = host.check_as_json("--alone --group gpu");
    assert_eq!((&reported["verdict"], &reported["exit_status"]), (&json!("fail"), &json!(2)));
    let gpu = of(&reported, "gpu.0000:3b:00");
    assert_eq!(gpu["recommended_action"], "REBOOT_NODE");
    assert!(gpu["evidence"].to_string().contains("NVRM: Xid"), "{gpu}");
    assert_eq!(of(&reported, "gpu.0000:5e:00")["verdict"], "pass");
}

#[test]
fn a_driver_that_hangs_is_unknown_and_holds_up_nothing() {
    let host = Host::new();
    host.driver(&json!({"hang": ["nvmlInit_v2"]}));
    let reported = host.check_as_json("--alone --deadline 300ms --require gpu=2");
    says(of(&reported, "devices"), "a driver that hangs");
    assert_eq!(of(&reported, "required.gpu")["verdict"], "unknown");
    assert_eq!(of(&reported, "host.memory")["group"], "host");
    assert!(
        reported["checks"].as_array().unwrap().iter().all(|check| check["name"] != "gpu"),
        "{reported:#}"
    );
    // The caller decides which verdicts count.
    assert_eq!(host.check("--alone --deadline 300ms --group gpu").status.code(), Some(3));
    assert_eq!(host.check("--alone --deadline 300ms --group gpu --fail-on fail").status.code(), Some(0));
    assert_eq!(host.check("--alone --deadline 300ms --group gpu --strict").status.code(), Some(2));
}

#[test]
fn what_is_required_and_not_there_fails() {
    let host = Host::new();
    let reported = host.check_as_json("--alone --require gpu=8");
    says(of(&reported, "required.gpu"), "too few GPUs");
    assert_eq!(reported["exit_status"], 2);
}

#[test]
fn node_problem_detector_gets_a_short_line_and_its_statuses() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/npd/mainstay.json");
    let plugin: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    // node-problem-detector refuses a rule without its condition. It must not report a healthy node before the first check.
    assert_eq!(plugin["rules"][0]["condition"], plugin["conditions"][0]["type"]);
    assert_eq!(plugin["pluginConfig"]["skip_initial_status"], true);
    let arguments = plugin["rules"][0]["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
    let options: Vec<&str> = arguments.skip(1).collect();
    let options = format!("{} --alone --group gpu", options.join(" "));
    let host = Host::new();
    let status = |more: &str| {
        let output = host.check(&format!("{options} {more}"));
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(printed.lines().count() == 1 && printed.trim_end().len() <= 80, "{printed}");
        output.status.code()
    };
    assert_eq!(status(""), Some(0));
    assert_eq!(status("--require gpu=8"), Some(1));
    host.driver(&json!({"hang": ["nvmlInit_v2"]}));
    assert_eq!(status("--deadline 300ms"), Some(2));
}

#[test]
fn nagios_and_junit_get_their_forms() {
    let host = Host::new();
    fs::write(host.log(), OFF_BUS).unwrap();
    let printed = |format: &str| {
        let output = host.check(&format!("--alone --group gpu --format {format}"));
        assert_eq!(output.status.code(), Some(2), "{format}");
        String::from_utf8(output.stdout).unwrap()
    };
    let nagios = printed("nagios");
    let (first, rest) = nagios.split_once('\n').unwrap();
    let (text, figures) = first.split_once(" | ").unwrap();
    assert!(text.starts_with("MAINSTAY CRITICAL: ") && rest.starts_with("gpu.0000:3b:00: "), "{nagios}");
    assert!(figures.split(' ').all(|figure| figure.split_once('=').is_some()), "{figures}");
    let checks = host.check_as_json("--alone --group gpu")["checks"].as_array().unwrap().len();
    let junit = printed("junit");
    let count = |of: &str| junit.matches(of).count();
    assert_eq!(
        (count("<testcase "), count("</testcase>"), count("<failure ")),
        (checks, checks, 1),
        "{junit}"
    );
    assert!(junit.contains(&format!("tests=\"{checks}\" failures=\"1\"")), "{junit}");
    let json: Value = serde_json::from_str(&printed("json")).unwrap();
    assert_eq!(json["verdict"], "fail");
}

#[test]
fn an_agent_is_asked_where_there_is_one() {
    let host = Host::new();
    fs::write(host.log(), OFF_BUS).unwrap();
    let agent = host.agent();
    let socket = host.path().join("agent.sock");
    let reported = host.check_as_json(&format!("--socket {} --group gpu", socket.display()));
    assert_eq!(reported["by"], format!("agent at {}", socket.display()));
    assert_eq!(of(&reported, "gpu.0000:3b:00")["verdict"], "fail");
    drop(agent);
    let reported = host.check_as_json(&format!("--socket {} --group gpu", socket.display()));
    assert_eq!(reported["exit_status"], 3, "whom we were told to ask is gone: {reported:#}");
}

#[test]
fn a_wrong_configuration_is_reported_and_nothing_is_checked() {
    let host = Host::new();
    let file = host.path().join("agent.toml");
    fs::write(&file, "colour = 1\n").unwrap();
    let output = host.check(&format!("--alone --config {}", file.display()));
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8(output.stderr).unwrap().contains("colour"));
}

#[test]
fn probes_measure_the_host_and_leave_nothing_behind() {
    let host = Host::new();
    let scratch = host.path().join("scratch");
    fs::create_dir(&scratch).unwrap();
    let reported = host.check_as_json(&format!(
        "--alone --deep --group host,storage,network --deadline 60s --path {} --path /nowhere/at/all",
        scratch.display()
    ));
    for name in ["deep.memory", "deep.cpu", "deep.loopback"] {
        let check = of(&reported, name);
        assert!(check["verdict"] == "pass" || check["verdict"] == "warn", "{check:#}");
        assert!(check["seconds"].as_f64().unwrap() > 0.0);
    }
    let storage = of(&reported, &format!("deep.storage:{}", scratch.display()));
    assert!(storage["evidence"].to_string().contains("fsync"), "{storage:#}");
    assert_eq!(of(&reported, "deep.storage:/nowhere/at/all")["verdict"], "unknown");
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
}

#[test]
fn a_probe_that_takes_too_long_is_unknown_and_the_command_ends() {
    let host = Host::new();
    let reported = host.check_as_json("--alone --deep --group network --deadline 20ms");
    assert_eq!(of(&reported, "deep.loopback")["verdict"], "unknown");
    says(of(&reported, "deep.loopback"), "a probe that takes too long");
}

#[test]
fn gpus_that_are_in_use_are_not_touched_and_not_free() {
    let host = Host::new();
    host.driver(&json!({"gpus": [
        {"uuid": "GPU-0", "pci": "00000000:3B:00.0", "values": {"memory_used": 30_u64 << 30}},
        {"uuid": "GPU-1", "pci": "00000000:5E:00.0", "values": {"memory_used": 4 << 20, "memory_reserved": 616 << 20}},
    ]}));
    let reported = host.check_as_json("--alone --deep --exclusive --group gpu --cuda /nowhere/libcuda.so.1");
    let held = of(&reported, "deep.gpu:0000:3b:00.0");
    assert_eq!(held["verdict"], "skipped");
    says(held, "a GPU in use");
    assert_eq!(of(&reported, "free.0000:3b:00")["verdict"], "fail");
    assert_eq!(of(&reported, "free.0000:5e:00")["verdict"], "pass");
    let absent = of(&reported, "deep.gpu:0000:5e:00.0");
    assert_eq!(absent["verdict"], "skipped");
    says(absent, "no CUDA");
}

#[test]
fn the_way_to_a_peer_is_measured() {
    let host = Host::new();
    let mut listening = Command::new(env!("CARGO_BIN_EXE_mainstay"))
        .args(["check", "--listen", "127.0.0.1:0"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(listening.stderr.take().unwrap()), &mut line)
        .unwrap();
    let address = line.split_whitespace().find(|word| word.starts_with("127.0.0.1:")).unwrap().to_owned();
    let reported = host.check_as_json(&format!("--alone --group network --peer {address} --deadline 60s"));
    let peer = of(&reported, &format!("deep.peer:{address}"));
    assert!(peer["evidence"].to_string().contains("round trip"), "{peer:#}");
    listening.kill().unwrap();
    listening.wait().unwrap();
    let reported = host.check_as_json(&format!("--alone --group network --peer {address} --deadline 60s"));
    assert_eq!(of(&reported, &format!("deep.peer:{address}"))["verdict"], "fail");
}
