//! Scans all processes from time to time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use mainstay_health::host::os::{Blocked, ProcessScan, Reading};
use mainstay_health::parse::proc::{ProcessStat, process_stat, runs};
use mainstay_model::id::Pid;
use mainstay_model::time::{Mono, Span};

/// A scan takes at most one part in this many of our time, for any number of processes.
const MIN_TIME_TO_SCAN: u32 = 300;

/// A process that sleeps uninterruptibly for two minutes raises the load average above this. Below it there is none, and a
/// scan only finds zombies.
const LOAD_OF_ONE: f64 = 0.5;

/// How much less often a scan runs for those alone.
const IDLE_SCAN_FACTOR: u32 = 10;

#[derive(Debug)]
pub(super) struct Processes {
    every: Duration,
    next: Option<Mono>,
    found_blocked: bool,
}

impl Processes {
    pub(super) fn new(every: Duration) -> Processes {
        Processes { every, next: None, found_blocked: false }
    }

    /// Scans them if it is due.
    pub(super) fn poll(&mut self, now: Mono, proc: &Path) -> Option<Reading<ProcessScan>> {
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        let started = Instant::now();
        let scan = scan(proc);
        self.found_blocked = scan.as_ref().is_ok_and(|scan| !scan.blocked.is_empty());
        let idle = !self.found_blocked && load(proc).is_some_and(|load| load < LOAD_OF_ONE);
        let pace = if idle { self.every.saturating_mul(IDLE_SCAN_FACTOR) } else { self.every };
        let pause = pace.max(started.elapsed().saturating_mul(MIN_TIME_TO_SCAN));
        self.next = Some(now.after(Span(u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX))));
        Some(scan.map_or_else(Reading::Failed, Reading::Value))
    }
}

fn load(proc: &Path) -> Option<f64> {
    let text = fs::read_to_string(proc.join("loadavg")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

fn scan(proc: &Path) -> Result<ProcessScan, String> {
    let entries = fs::read_dir(proc).map_err(|error| format!("listing {}: {error}", proc.display()))?;
    let mut scan = ProcessScan::default();
    let mut children: BTreeMap<i32, u64> = BTreeMap::new();
    let mut buffer = [0; 1024];
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let path = entry.path();
        // A process that ended meanwhile does not count.
        let Some(stat) = stat(&path, &mut buffer) else { continue };
        scan.processes += 1;
        match stat.state {
            'Z' => {
                scan.zombies += 1;
                *children.entry(stat.parent).or_default() += 1;
            }
            'D' => scan.blocked.push(blocked(pid, &path, stat)),
            _ => {}
        }
    }
    scan.most = children.into_iter().max_by_key(|(_, count)| *count).map(|(parent, count)| {
        let name = fs::read_to_string(proc.join(parent.to_string()).join("comm")).unwrap_or_default();
        let name = if name.is_empty() { "an unknown process".to_owned() } else { name.trim().to_owned() };
        (Pid(parent), name, count)
    });
    Ok(scan)
}

fn stat(path: &Path, buffer: &mut [u8]) -> Option<ProcessStat> {
    let length = File::open(path.join("stat")).ok()?.read(buffer).ok()?;
    process_stat(&String::from_utf8_lossy(&buffer[..length]))
}

fn blocked(pid: i32, path: &Path, stat: ProcessStat) -> Blocked {
    let read = |file: &str| fs::read_to_string(path.join(file)).ok();
    // Only root can read the whole stack. Others can read the function alone, or `0`.
    let mut waits_in: Vec<String> = read("stack")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| Some(line.split_once("] ")?.1.trim().to_owned()))
        .collect();
    if waits_in.is_empty() {
        waits_in.extend(read("wchan").filter(|name| !matches!(name.trim(), "" | "0")));
    }
    let ran = read("schedstat").and_then(|text| runs(&text)).or_else(|| switches(&read("status")?));
    Blocked { pid, start: stat.start, name: stat.name, kernel_thread: stat.kernel_thread, waits_in, ran }
}

/// How often a process yielded its CPU or lost it.
fn switches(status: &str) -> Option<u64> {
    let count = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    Some(count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?)
}
