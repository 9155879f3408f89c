//! From a fault to the first Python line of the new ranks, and to their first step: `mainstay run` compared with
//! the peers, with the same script on the same machine.

use super::prelude::*;

/// Ranks of the job.
const WORLD: usize = 2;

/// Steps before the first fault, 15 s: the same for all, and time enough for `mainstay run` to have its
/// template. Then steps between two faults, so that a launcher is idle again.
pub const SETTLE_STEPS: (usize, usize) = (300, 30);

/// A rank that dies early dies this long after its first line: it imports, and nothing is warm yet.
const EARLY: Duration = Duration::from_secs(3);

/// Measures each fault under each launcher: one job, several faults.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let faults = bench.samples(5, 2);
    for (fault, name) in [(Fault::Kill, "kill"), (Fault::Raise, "raise")] {
        let figures = vec![
            Of::median(format!("restart.{name}_to_python"), "ms", |of: &Restart| of.to_python),
            Of::median(format!("restart.{name}_to_step"), "ms", |of: &Restart| of.to_step),
        ];
        bench.by_launcher(bed, figures, &format!("{faults} faults"), 1, |launcher| {
            let (mut running, mut events) = job(bed, launcher, WORLD)?;
            events.restarts(&mut running, (fault, faults), SETTLE_STEPS, |_| Ok(()))
        });
    }
}

/// Measures the first SIGKILL of separate jobs: it includes what a launcher does once, such as reading its
/// catalog.
pub fn measure_first(bench: &mut Bench, bed: &Bed) {
    let jobs = bench.at_most(5, 2);
    let to_step =
        |name: &str| Of::median(format!("restart.{name}_kill_to_step"), "ms", |of: &Restart| of.to_step);
    let resident = Of::median("attribute.rss_after", "MiB", |of: &Restart| of.resident_mib);
    for (figures, is_early) in [(vec![to_step("first"), resident], false), (vec![to_step("early")], true)] {
        bench.by_launcher(bed, figures, &format!("{jobs} jobs"), 1, |launcher| {
            (0..jobs).map(|_| first_restart(bed, launcher, is_early)).collect()
        });
    }
}

/// A job and the record of its ranks.
pub fn job(bed: &Bed, launcher: Launcher, world: usize) -> Result<(Running, Events)> {
    let folder = paths::fresh(paths::target().join("bench/restart"))?;
    let events = Events::of(folder.join("events.jsonl"), world);
    let mut command = bed.job(launcher, world, &folder.join("logs"), "", "restart_rank.py");
    command.env("BENCH_EVENTS", events.path());
    let running = Running::start(command, &folder.join("launcher.log"))?;
    Ok((running, events))
}

/// The first fault of a job, a SIGKILL of its last rank.
fn first_restart(bed: &Bed, launcher: Launcher, is_early: bool) -> Result<Restart> {
    let (mut running, mut events) = job(bed, launcher, WORLD)?;
    let pids = if is_early {
        let pids = running.wait_for("the first lines of all ranks", || events.started())?;
        std::thread::sleep(EARLY);
        pids
    } else {
        let begin = Moment::default();
        running.wait_for("steps of all ranks", || events.stepping(&begin, SETTLE_STEPS.0))?
    };
    let victim = WORLD as u64 - 1;
    let restart = events.restart(&mut running, Fault::Kill, (victim, pids.get(&victim).copied()))?;
    let resident = process::memory_mib(running.pid()).filter(|_| launcher == Launcher::Mainstay);
    Ok(Restart { resident_mib: resident.map_or(f64::NAN, |(rss, _)| rss), ..restart })
}
