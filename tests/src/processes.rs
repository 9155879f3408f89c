//! What processes there are on this host, read from `/proc`.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::waiting::{self, DEADLINE};

/// All living processes of a job: those with its mark in the environment, and its guardian.
pub fn of_job(job: &str) -> Vec<i32> {
    let mark = format!("MAINSTAY_JOB_ID={job}");
    all()
        .into_iter()
        .filter(|pid| {
            let has = |file: &str| {
                let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                bytes.split(|byte| *byte == 0).any(|part| part == mark.as_bytes())
            };
            has("environ") || has("cmdline")
        })
        .filter(|pid| is_alive(*pid))
        .collect()
}

/// The control groups of a job, where launchers may make any.
pub fn cgroups_of(job: &str) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mount = mounts.lines().map(|line| line.split(' ').collect::<Vec<&str>>());
    let Some(mount) = mount.into_iter().find(|fields| fields.get(2) == Some(&"cgroup2")) else {
        return Vec::new();
    };
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let entries = fs::read_dir(Path::new(mount[1]).join(own)).into_iter().flatten().flatten();
    let name = format!("mainstay-{job}-");
    entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains(&name)).collect()
}

/// Waits until no process of a job is left.
pub fn wait_until_none_of(job: &str) {
    let began = Instant::now();
    loop {
        let left = of_job(job);
        let Some(first) = left.first() else { return };
        let reported: Vec<String> = left.iter().map(|pid| reported(*pid)).collect();
        assert!(began.elapsed() < DEADLINE, "of job {job} there are left: {reported:?}");
        if let Some(process) = waiting::handle(*first) {
            assert!(waiting::ended(process), "of job {job} there are left: {reported:?}");
        }
    }
}

/// Polls until a condition on processes holds for which the kernel has no event, such as a zombie being reaped.
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < DEADLINE, "it never came true that {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the process is gone.
pub fn wait_until_gone(pid: i32) {
    if let Some(process) = waiting::handle(pid) {
        assert!(waiting::ended(process), "process {} still lives", reported(pid));
    }
}

/// Whether a process lives; a zombie does not.
pub fn is_alive(pid: i32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The letter of `/proc/PID/stat`.
pub fn state(pid: i32) -> Option<char> {
    stat(pid)?.first()?.chars().next()
}

/// The children of a process, zombies included.
pub fn children(parent: i32) -> Vec<i32> {
    let is_child = |pid: &i32| stat(*pid).is_some_and(|stat| stat[1] == parent.to_string());
    all().into_iter().filter(is_child).collect()
}

/// All processes below a process, zombies included.
pub fn descendants(parent: i32) -> Vec<i32> {
    let mut all = children(parent);
    let mut next = 0;
    while let Some(pid) = all.get(next).copied() {
        all.extend(children(pid));
        next += 1;
    }
    all
}

/// How many file descriptors a process has open.
pub fn open_files(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// How many sockets a process has open. A port that is only reserved is one of them, and listed nowhere else.
pub fn sockets(pid: i32) -> usize {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = links.map(|link| fs::read_link(link.path()).unwrap_or_default());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// The value of a variable in the environment with which a process was started.
pub fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let prefix = format!("{name}=");
    environment.split(|byte| *byte == 0).find_map(|variable| {
        let text = String::from_utf8_lossy(variable);
        text.strip_prefix(&prefix).map(ToOwned::to_owned)
    })
}

/// A description of a process for a person.
pub fn reported(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let state = state(pid).unwrap_or('?');
    format!("{pid} ({state}) {}", String::from_utf8_lossy(&line).replace('\0', " "))
}

fn all() -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted");
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// State, parent and what follows.
fn stat(pid: i32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<String> = rest.split_whitespace().map(ToOwned::to_owned).collect();
    (fields.len() > 1).then_some(fields)
}
