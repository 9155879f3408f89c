//! From the SIGSTOP of a rank to the verdict that it hangs. Ours is measured by the launcher's journal, NVRx's
//! by the end of the rank, which its monitor kills as soon as it considers it hung. In seconds beyond the limit:
//! two seconds, or one and a half times the step time that only one step in a thousand exceeds, whichever is
//! longer; below zero is sooner.

use super::prelude::*;

const RANKS: usize = 4;

/// Each launcher is measured for at most this time, with as many hangs as fit: a restart under NVRx takes a
/// quarter of a minute, and both together must finish within six.
const BUDGET: Duration = Duration::from_secs(160);

/// Fewer hangs are no measurement.
const LEAST: usize = 5;

/// The tightest settings of NVRx that do not kill healthy ranks here: a heartbeat every 50 ms, and a monitor
/// that polls twice a second.
const NVRX_SETTINGS: &str = "--ft-param-workload_check_interval=0.5 --ft-param-rank_heartbeat_timeout=1 \
                             --ft-param-initial_rank_heartbeat_timeout=60";

/// Seconds.
struct Hang {
    noticed: f64,
    limit: f64,
}

/// Measures some hangs under each launcher.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let hangs = bench.at_most(20, 2);
    let mut comparison = Comparison::of(vec![
        Of::at(0.95, "detect.hang_p95", "s over the limit", |hang: &Hang| hang.noticed - hang.limit),
        Of::median("detect.hang", "s", |hang: &Hang| hang.noticed),
    ]);
    for launcher in bed.launchers().into_iter().filter(|launcher| *launcher != Launcher::Torchrun) {
        let what = format!("{hangs} stopped ranks under {}", launcher.name());
        bench.take(&mut comparison, launcher.peer(), &what, || detect(bed, launcher, hangs));
    }
}

fn detect(bed: &Bed, launcher: Launcher, hangs: usize) -> Result<Vec<Hang>> {
    let mut samples = Vec::new();
    let began = Instant::now();
    let is_over = |so_far: usize| so_far >= hangs || so_far >= LEAST.min(hangs) && began.elapsed() > BUDGET;
    while !is_over(samples.len()) {
        let new = one_job(bed, launcher, |new| is_over(samples.len() + new))?;
        ensure!(!new.is_empty(), "a job ended without a single hang being noticed");
        samples.extend(new);
    }
    Ok(samples)
}

/// Stops the last rank of each attempt once it is warm, until there are enough samples, the time is over, or the
/// launcher does not restart any more.
fn one_job(bed: &Bed, launcher: Launcher, is_enough: impl Fn(usize) -> bool) -> Result<Vec<Hang>> {
    let folder = paths::fresh(paths::target().join("bench/hang"))?;
    let of_nvrx = (launcher == Launcher::Nvrx).then_some(NVRX_SETTINGS);
    let mut command = bed.job(launcher, RANKS, &folder, of_nvrx.unwrap_or_default(), "hang.py");
    command.args(of_nvrx.map(|_| "nvrx")).env("BENCH_FOLDER", &folder);
    let mut running = Running::start(ends_with_us(command), &folder.join("launcher.log"))?;
    let mut journal = Follower::new(&folder);
    let (mut seconds, mut attempt) = (Vec::new(), 0);
    while !is_enough(seconds.len()) {
        let warm = running.wait_for("a warm rank", || {
            // An attempt may fail before it is warm.
            (attempt..attempt + 3).find_map(|number| {
                let pid = fs::read_to_string(folder.join(format!("warm.{number}"))).ok()?;
                Some((number, pid.trim().parse::<i32>().ok()?))
            })
        });
        let Ok((number, pid)) = warm else { break };
        attempt = number + 1;
        journal.poll();
        let from = journal.entries.len();
        let at = strike(pid, Signal::SIGSTOP)?;
        let noticed = running.wait_for("a verdict", || match launcher {
            Launcher::Nvrx => is_over(pid).then(journal::now),
            _ => journal.when(from, |fact| matches!(fact, Fact::RanksHung { .. })),
        })?;
        let took = noticed.saturating_sub(at) as f64 / 1e9;
        eprintln!("  {}: hang {}, noticed after {took:.2} s", launcher.name(), seconds.len() + 1);
        seconds.push(took);
    }
    drop(running);
    let limit = limit(&folder)?;
    Ok(seconds.into_iter().map(|noticed| Hang { noticed, limit }).collect())
}

/// The same program, which is asked to stop when this process is killed: stopped ranks would stay forever.
fn ends_with_us(command: std::process::Command) -> std::process::Command {
    if !command::exists("setpriv", "--version") {
        return command;
    }
    command::inside(cmd!("setpriv --pdeathsig TERM --"), &command)
}

/// The limit in seconds, from the steps of the first rank. The steps in which a rank was stopped have no end.
fn limit(folder: &Path) -> Result<f64> {
    let text = fs::read_to_string(folder.join("took.0"))?;
    let took: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    let q999 = Figure::at(0.999, "step", "s", &took);
    Ok((1.5 * q999.context("no step was made")?.value).max(2.0))
}
