//! From the SIGKILL of a rank with much memory until the launcher knows of it, and until its process ends, which
//! all other ranks wait for.

use super::prelude::*;

/// Memory of the rank that is killed, in GiB, in pages of 4 KiB. Ranks with a GPU hold far more, and pinned.
const GIB: &str = "4";

pub fn measure(bench: &mut Bench, bed: &Bed) {
    let deaths = bench.at_most(7, 2);
    let figures = Of::each([("detect.death_4g", "ms"), ("detect.death_4g_gone", "ms")]);
    bench.measure(figures, &format!("{deaths} kills"), || detect(bed, deaths));
}

/// Milliseconds to the first report of the death, and to the end of the process.
fn detect(bed: &Bed, deaths: usize) -> Result<Vec<[f64; 2]>> {
    let folder = paths::fresh(paths::target().join("bench/large"))?;
    let ready = folder.join("ready");
    let mut command = bed.job(Launcher::Mainstay, 1, &folder, "", "large_rank.py");
    command.env("BENCH_READY", &ready).env("BENCH_GIB", GIB);
    let mut running = Running::start(command, &folder.join("launcher.log"))?;
    let mut journal = Follower::new(&folder);
    let mut samples = Vec::new();
    for _ in 0..deaths {
        let pid: i32 = running.wait_for("a rank that holds its memory", || {
            fs::read_to_string(&ready).ok()?.strip_suffix('\n')?.parse().ok()
        })?;
        fs::remove_file(&ready)?;
        journal.poll();
        let from = journal.entries.len();
        let at = strike(pid, Signal::SIGKILL)?;
        samples.push(running.wait_for("its end in the journal", || {
            let known = journal.when(from, |fact| journal::died(fact, pid))?;
            // The journal records the lifeline's mark as the end of the rank, so the end of the attempt is used:
            // it follows when the process is gone.
            let gone = journal.when(from, |fact| matches!(fact, Fact::AttemptEnded { .. }))?;
            Some([known, gone].map(|then| then.saturating_sub(at) as f64 / 1e6))
        })?);
    }
    Ok(samples)
}
