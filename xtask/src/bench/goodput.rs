//! Goodput of a run that loses a rank every 20 s: `mainstay run` and the peers, measured in sequence.
//!
//! Goodput is the useful work per time: the newest step times the length of a step, divided by the time since
//! the first step. Repeated steps count once.

use std::collections::BTreeMap;

use super::prelude::*;
use super::restart;

/// Ranks of the job.
const WORLD: usize = 2;

/// How long each launcher's run is watched, from its first step; and the same with `--quick`: two kills.
const RUN: Duration = Duration::from_secs(180);
const QUICK_RUN: Duration = Duration::from_secs(60);

/// From one SIGKILL to the next.
const EVERY: Duration = Duration::from_secs(20);

/// A step of `restart_rank.py`.
const STEP: Duration = Duration::from_millis(50);

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let run = if bench.args.quick { QUICK_RUN } else { RUN };
    let figures = vec![Of::median("restart.goodput_kill_20s", "%", |percent: &f64| *percent)];
    let what = format!("a SIGKILL every {} s", EVERY.as_secs());
    bench.by_launcher(bed, figures, &what, 1, |launcher| Ok(vec![goodput(bed, launcher, run)?]));
}

fn goodput(bed: &Bed, launcher: Launcher, length: Duration) -> Result<f64> {
    let (mut running, mut events) = restart::job(bed, launcher, WORLD)?;
    let began = running.wait_for("the first step", || {
        events.all().iter().find(|event| event.event == "step").map(|event| event.at)
    })?;
    let elapsed = || Duration::from_nanos(journal::now().saturating_sub(began));
    let mut next = Instant::now() + EVERY;
    let mut kills = 0;
    while elapsed() < length {
        let left = length.saturating_sub(elapsed());
        std::thread::sleep(left.min(next.saturating_duration_since(Instant::now())));
        if Instant::now() >= next {
            next += EVERY;
            let newest: BTreeMap<u64, i32> =
                events.all().iter().map(|event| (event.rank, event.pid)).collect();
            // A launcher in the middle of a restart has no process to lose, which costs it nothing here.
            if let Some(pid) = newest.get(&(kills % WORLD as u64))
                && strike(*pid, Signal::SIGKILL).is_ok()
            {
                kills += 1;
            }
        }
    }
    ensure!(kills > 0, "no rank could be killed");
    let end = began + length.as_nanos() as u64;
    let steps = events.all().iter().filter(|event| event.at <= end).filter_map(|event| event.step).max();
    Ok(100.0 * steps.unwrap_or(0) as f64 * STEP.as_secs_f64() / length.as_secs_f64())
}
