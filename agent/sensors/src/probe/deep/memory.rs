//! Host memory: a pattern is written, copied by all CPUs at once, and read back.

use std::time::{Duration, Instant};

use mainstay_health::host::preflight::deep::{Measured, Probed, What};

use super::buffer::{difference, fill};

/// Memory for each CPU, twice: more than most caches hold, and in total at most a quarter of the available memory.
const BLOCK: u64 = 64 << 20;
/// CPUs that take part: more of them do not copy faster.
const CPUS: usize = 8;
/// How long to copy.
const WINDOW: Duration = Duration::from_millis(300);

pub(super) fn probe() -> Probed {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(CPUS);
    let Some(available) = available() else {
        return Probed::Untried("/proc/meminfo does not report the available memory".to_owned());
    };
    let size = (available / 4 / 2 / cpus as u64).min(BLOCK) / 8 * 8;
    if size < 1 << 20 {
        return Probed::Untried("there is too little memory available to test any".to_owned());
    }
    let began = Instant::now();
    let workers: Vec<_> =
        (0..cpus as u64).map(|seed| std::thread::spawn(move || work(seed, size as usize))).collect();
    let mut copied = 0.0;
    for worker in workers {
        match worker.join() {
            Ok(Ok(speed)) => copied += speed,
            Ok(Err(place)) => {
                return Probed::Wrong(format!(
                    "memory returned other values than those written, at byte {place} of a block"
                ));
            }
            Err(_) => {
                return Probed::Untried(format!("a worker crashed after {:?}", began.elapsed()));
            }
        }
    }
    Probed::Done(vec![
        Measured { what: What::Copy, value: copied },
        Measured { what: What::Cpus, value: cpus as f64 },
    ])
}

/// Bytes copied per second by one CPU, or the place where the data read differ from the data written.
fn work(seed: u64, size: usize) -> Result<f64, u64> {
    let (mut one, mut other) = (vec![0; size], vec![0; size]);
    fill(&mut one, seed, 0);
    other.copy_from_slice(&one);
    let (began, mut rounds) = (Instant::now(), 0_u32);
    while began.elapsed() < WINDOW {
        // There and back, so that an error in one copy persists.
        other.copy_from_slice(std::hint::black_box(&one));
        one.copy_from_slice(std::hint::black_box(&other));
        rounds += 2;
    }
    let speed = f64::from(rounds) * size as f64 / began.elapsed().as_secs_f64();
    // Each bit is set once and cleared once.
    for complement in [false, true] {
        if complement {
            other.iter_mut().for_each(|byte| *byte = !*byte);
            one.copy_from_slice(std::hint::black_box(&other));
            one.iter_mut().for_each(|byte| *byte = !*byte);
        }
        if let Some(place) = difference(std::hint::black_box(&one), seed, 0) {
            return Err(place);
        }
    }
    Ok(speed)
}

fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
