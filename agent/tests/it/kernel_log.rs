//! The kernel log as the agent reads it: files and pipes in its place, restarts, and the whole agent with one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_model::entry::Fact;
use mainstay_model::id::BootId;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::Mono;
use mainstay_sensors::source::kmsg::KernelLog;
use support::Agent;
use testing::TempDir;

const NOTHING: [u32; 0] = [];

fn boot() -> BootId {
    BootId("this boot".into())
}

fn xid_line(code: u32) -> String {
    format!("4,{code},1000,-;NVRM: Xid (PCI:0000:01:00): {code}, pid=1, name=python, text\n SUBSYSTEM=pci\n")
}

struct Log {
    directory: TempDir,
    path: PathBuf,
}

impl Log {
    fn new() -> Log {
        let directory = testing::tempdir().unwrap();
        let path = directory.path().join("kmsg");
        fs::write(&path, "").unwrap();
        Log { directory, path }
    }

    fn write(&self, text: &str) {
        OpenOptions::new().append(true).open(&self.path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn open(&self, cursor: Option<&LogCursor>) -> KernelLog {
        KernelLog::open(&self.path, boot(), cursor).unwrap()
    }
}

fn codes(log: &mut KernelLog) -> Vec<u32> {
    let mut codes = Vec::new();
    loop {
        let batch = log.read(Mono(5_000_000_000)).unwrap();
        codes.extend(batch.facts.into_iter().filter_map(|(_, fact)| match fact {
            Fact::Xid(xid) => Some(xid.code),
            _ => None,
        }));
        if !batch.more {
            return codes;
        }
    }
}

#[test]
fn lines_are_read_as_they_come_and_only_when_they_are_whole() {
    let file = Log::new();
    let mut log = file.open(None);
    assert_eq!(codes(&mut log), NOTHING);
    file.write(&xid_line(79));
    file.write("4,2,3,-;NVRM: Xid (PCI:0000:01:00): 4");
    assert_eq!(codes(&mut log), [79]);
    file.write("8, pid=1, text\n");
    assert_eq!(codes(&mut log), [48]);
}

#[test]
fn after_a_restart_nothing_is_read_twice_and_nothing_missed() {
    let file = Log::new();
    file.write(&xid_line(79));
    let mut log = file.open(None);
    assert_eq!(codes(&mut log), [79]);
    let cursor = log.cursor().clone();
    drop(log);
    file.write(&xid_line(48));
    assert_eq!(codes(&mut file.open(Some(&cursor))), [48]);
    assert_eq!(codes(&mut file.open(None)), [79, 48]);
}

#[test]
fn another_file_in_its_place_is_read_from_its_start() {
    let file = Log::new();
    file.write(&xid_line(79));
    let mut log = file.open(None);
    assert_eq!(codes(&mut log), [79]);
    let cursor = log.cursor().clone();

    fs::rename(&file.path, file.directory.path().join("kmsg.1")).unwrap();
    assert_eq!(codes(&mut log), NOTHING);
    fs::write(&file.path, xid_line(62)).unwrap();
    assert_eq!(codes(&mut log), NOTHING);
    assert_eq!(codes(&mut log), [62]);
    assert_eq!(codes(&mut file.open(Some(&cursor))), [62]);

    File::create(&file.path).unwrap();
    assert_eq!(codes(&mut log), NOTHING);
    file.write(&xid_line(95));
    assert_eq!(codes(&mut log), [95]);
}

#[test]
fn a_pipe_outlives_its_writers() {
    let directory = testing::tempdir().unwrap();
    let path = directory.path().join("pipe");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut log = KernelLog::open(&path, boot(), None).unwrap();
    let (stop, _writer) = std::io::pipe().unwrap();
    for code in [79, 48] {
        OpenOptions::new().write(true).open(&path).unwrap().write_all(xid_line(code).as_bytes()).unwrap();
        log.wait(&stop, Duration::from_secs(60)).unwrap();
        assert_eq!(codes(&mut log), [code]);
    }
}

#[test]
fn waiting_ends_with_the_stop() {
    let directory = testing::tempdir().unwrap();
    let path = directory.path().join("pipe");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let log = KernelLog::open(&path, boot(), None).unwrap();
    let (stop, writer) = std::io::pipe().unwrap();
    drop(writer);
    log.wait(&stop, Duration::from_secs(3600)).unwrap();
}

#[test]
fn bytes_that_are_no_text_and_lines_without_end_do_no_harm() {
    let file = Log::new();
    let mut bytes = vec![0xff, 0xfe, b'\n', 0, b'\n'];
    bytes.extend(std::iter::repeat_n(b'x', 300_000));
    bytes.push(b'\n');
    fs::write(&file.path, &bytes).unwrap();
    let mut log = file.open(None);
    assert_eq!(codes(&mut log), NOTHING);
    assert_eq!(log.cursor().next, bytes.len() as u64);
    file.write(&xid_line(79));
    assert_eq!(codes(&mut log), [79]);
}

#[test]
fn an_unreadable_log_is_reported_with_what_to_do() {
    let refused = KernelLog::open(Path::new("/nowhere/kmsg"), boot(), None).unwrap_err().to_string();
    assert!(refused.contains("/nowhere/kmsg: No such file"), "{refused}");
    assert!(refused.contains("kernel_log.path"), "{refused}");
    let mut endless = KernelLog::open(Path::new("/dev/null"), boot(), None).unwrap();
    assert!(endless.read(Mono(1)).unwrap_err().to_string().contains("/dev/null"));
}

#[test]
fn a_lost_gpu_is_reported_and_stays_reported_over_a_restart() {
    let file = Log::new();
    let agent = Agent::start(file.directory.path(), &[("KERNEL_LOG_PATH", &file.path)]);
    agent.wait_for_state("host.kernel_log", "HEALTHY");
    file.write(&xid_line(13));
    agent.wait_for_state("gpu.0000:01:00", "HEALTHY");
    file.write(&xid_line(79));
    let change = agent.wait_for_change("gpu.0000:01:00", "HEALTHY", "UNHEALTHY");
    assert!(change.contains("XID 79") && change.contains("REBOOT_NODE"), "{change}");
    drop(agent);

    let agent = Agent::start(file.directory.path(), &[("KERNEL_LOG_PATH", &file.path)]);
    file.write(&xid_line(62));
    agent.wait_for("XID 62 of GPU 0000:01:00");
    drop(agent);
    let journal = fs::read_dir(file.directory.path().join("state/journal")).unwrap();
    let text: String = journal
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "jsonl"))
        .map(|entry| fs::read_to_string(entry.path()).unwrap())
        .collect();
    let xids: Vec<&str> = text.lines().filter(|line| line.contains("\"what\":\"xid\"")).collect();
    assert_eq!(xids.len(), 3, "each line is one fact:\n{}", xids.join("\n"));
    let again =
        text.lines().rfind(|line| line.contains("gpu.0000:01:00") && line.contains("\"health\"")).unwrap();
    assert!(again.contains("UNHEALTHY") && again.contains("XID 79"), "{again}");
    // A restart does not change its start time.
    let since = |line: &str| line.split("\"since\":").nth(1)?.split([',', '}']).next().map(str::to_owned);
    let reported: Vec<Option<String>> = text
        .lines()
        .filter(|line| {
            line.contains("gpu.0000:01:00") && line.contains("\"health\"") && line.contains("\"UNHEALTHY\"")
        })
        .map(since)
        .collect();
    assert!(
        reported.len() >= 2 && reported.iter().all(|of| of.is_some() && *of == reported[0]),
        "{reported:?}"
    );
}
