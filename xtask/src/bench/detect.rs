//! From the SIGKILL of a rank to the fact in the launcher's journal: both times are of the same clock.

use super::prelude::*;

/// Ranks of the job; they only sleep, because this measures the launcher and not Python's start.
const RANKS: usize = 4;

/// Measures many deaths, in as many jobs as it takes: a launcher may decide to restart no more.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let deaths = bench.samples(1000, 100);
    bench.measure(Of::latency("detect.death"), &format!("{deaths} kills"), || {
        let mut samples = Vec::new();
        for job in 0.. {
            let before = samples.len();
            one_job(bed, deaths, &mut samples)?;
            ensure!(samples.len() > before, "a job ended without a single death being noticed");
            if samples.len() >= deaths {
                break;
            }
            eprintln!("detect: the launcher gave up restarting {} times; went on with a new job", job + 1);
        }
        Ok(samples)
    });
}

/// Kills ranks of one job until there are enough samples, or the launcher decides to restart no more.
fn one_job(bed: &Bed, deaths: usize, samples: &mut Vec<f64>) -> Result<()> {
    let folder = paths::fresh(paths::target().join("bench/detect"))?;
    let mut command = bed.mainstay(&format!("--nproc-per-node {RANKS} --max-restarts 100000"), &folder);
    command.args(["--no-python", "sleep", "1000000"]);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    let mut journal = Follower::new(&folder);
    let mut read = 0;
    while samples.len() < deaths {
        let started = running.wait_for("ranks in the journal", || journal.find(read, journal::started));
        let Ok(pids) = started else { return Ok(()) };
        read = journal.entries.len();
        let pid = *pids.values().nth(samples.len() % RANKS).context("the journal names no such rank")?;
        let at = strike(pid, Signal::SIGKILL)?;
        let noticed = running
            .wait_for("fact in the journal", || journal.when(read, |fact| journal::died(fact, pid)))?;
        samples.push(noticed.saturating_sub(at) as f64 / 1e6);
    }
    Ok(())
}
