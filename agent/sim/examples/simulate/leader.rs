//! The resources that the leader of 12,500 hosts with 8 ranks each needs, and the time until all of them start again.

use mainstay_model::id::Attempt;
use mainstay_sim::crowd::{Crowd, MS, Plan, SECOND};
use nix::time::{ClockId, clock_gettime};

use crate::figure;

const HOSTS: u32 = 12_500;

/// A network card of 25 Gbit/s, the slowest in published clusters for traffic other than that of the ranks.
const BYTES_PER_SECOND: f64 = 25e9 / 8.0;

/// The duration of a step, over which the load is measured.
const STEP: u64 = 6 * SECOND;

/// Writes of a launcher that joins: its lease, its member record, and that it has a seat.
const WRITES_OF_A_MEMBER: f64 = 3.0;

/// The hosts of a large job join within this time, in seconds.
const JOIN_WITHIN: f64 = 300.0;

pub fn measure(quick: bool) {
    let plan = Plan {
        hosts: HOSTS,
        ranks: 8,
        copies: true,
        bytes_per_second: BYTES_PER_SECOND,
        latency: MS / 2,
        store: 10 * MS,
        agent: 5 * MS,
        host: MS,
        processor,
    };
    let (steps, rounds) = if quick { (2, 1) } else { (4, 3) };
    let mut crowd = Crowd::new(plan, 1);
    let began = crowd.now();
    crowd.run_until(began + 600 * SECOND, |crowd| crowd.runs());
    let seconds = |span: u64| span as f64 / SECOND as f64;
    figure("start_12500", "s of the leader's part", &[seconds(crowd.now() - began)], None);
    // Skip the first steps, which belong to the start.
    let settled = crowd.now() + 2 * STEP;
    crowd.run_until(settled, |_| false);
    let (mut cpu, mut up, mut down) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..steps {
        let (before, from) = (crowd.counts(), crowd.now());
        crowd.run_until(from + STEP, |_| false);
        let (after, took) = (crowd.counts(), seconds(crowd.now() - from));
        cpu.push(seconds(after.processor - before.processor) / took * 100.0);
        up.push((after.received.0 - before.received.0) as f64 / took);
        down.push((after.received.1 - before.received.1) as f64 / took / 1e6);
    }
    figure("leader_cpu_100k", "% of a core", &cpu, None);
    figure("leader_messages_100k", "messages/s", &up, None);
    figure("leader_mb_per_s_100k", "MB/s received", &down, None);
    let mut took = Vec::new();
    for round in 1..=rounds {
        let killed = crowd.now();
        crowd.kill((HOSTS / 2 + round) as usize);
        let next = Attempt(round);
        crowd.run_until(killed + 600 * SECOND, |crowd| crowd.started(next).is_some());
        took.extend(crowd.started(next).map(|started| seconds(started - killed)));
        for (phase, at) in crowd.phases() {
            eprintln!(
                "round {round}: last {phase} after {:.3} s",
                (at as f64 - killed as f64) / SECOND as f64
            );
        }
        crowd.run_until(killed + 600 * SECOND, |crowd| crowd.runs());
        give_back();
        // Wait until all ranks complete steps again.
        let stepping = crowd.now() + 2 * STEP;
        crowd.run_until(stepping, |_| false);
    }
    figure("round_12500", "s", &took, None);
    let most = |count: &dyn Fn(u64) -> usize| crowd.stored().iter().map(|at| count(*at)).max().unwrap_or(0);
    let within = |from: u64| crowd.stored().iter().filter(|at| (from..from + SECOND).contains(*at)).count();
    figure("store_writes_100k", "writes/s", &[most(&within) as f64], None);
    figure("store_writes_join", "writes/s", &[WRITES_OF_A_MEMBER * f64::from(HOSTS) / JOIN_WITHIN], None);
    let (records, bytes) = crowd.counts().records;
    figure("record_100k", "KiB", &[bytes as f64 / records.max(1) as f64 / 1024.0], None);
    if let Some((now, most)) = memory() {
        figure("leader_mb_100k", "MiB", &[now], None);
        figure("leader_mb_most_100k", "MiB", &[most], None);
    }
}

/// Processor time of this thread in nanoseconds; 0 if the kernel does not report it.
fn processor() -> u64 {
    let used = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    used.map_or(0, |used| used.tv_sec().unsigned_abs() * SECOND + used.tv_nsec().unsigned_abs())
}

/// Returns freed memory to the kernel, as the launcher does when ranks run again after a failure.
fn give_back() {
    // SAFETY: the function takes the allocator's own locks, touches only memory that is not in use, and keeps no
    // pointer.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// The current and the peak memory of this process in MiB, including the followers' messages in transit.
fn memory() -> Option<(f64, f64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    Some((kib("VmRSS:")? / 1024.0, kib("VmHWM:")? / 1024.0))
}
