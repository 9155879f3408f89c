//! From the SIGSTOP of a rank to the verdict that it hangs. Ours is measured by the launcher's journal, NVRx's by
//! the end of the rank, which its monitor kills as soon as it considers it hung. In seconds beyond the limit: two
//! seconds, or one and a half times the step time that only one step in a thousand exceeds, whichever is longer;
//! below zero is sooner.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::figure::{Figure, Report};
use super::launchers::{Bed, Launcher};
use super::process::Running;
use crate::journal::{self, Follower};
use crate::paths;
use crate::progress::Progress;

const RANKS: usize = 4;

/// Starting, importing and the warm-up.
const WARM_WITHIN: Duration = Duration::from_secs(120);

/// If there is no verdict after this time, none is counted.
const LIMIT: Duration = Duration::from_secs(120);

/// Each launcher is measured for at most this time, with as many hangs as fit: a restart under NVRx takes a quarter
/// of a minute, and both together must finish within six.
const BUDGET: Duration = Duration::from_secs(160);

/// Fewer hangs are no measurement.
const LEAST: usize = 5;

/// The tightest settings of NVRx that do not kill healthy ranks here: a heartbeat every 50 ms, and a monitor that
/// polls twice a second.
const NVRX_SETTINGS: [&str; 3] = [
    "--ft-param-workload_check_interval=0.5",
    "--ft-param-rank_heartbeat_timeout=1",
    "--ft-param-initial_rank_heartbeat_timeout=60",
];

/// Measures so many hangs under each launcher.
pub fn measure(progress: &Progress, bed: &Bed, hangs: usize, report: &mut Report) {
    if !report.wants(&["detect.hang", "detect.hang_p95"]) {
        return;
    }
    let ours = progress
        .step(&format!("detect.hang_p95: {hangs} stopped ranks"), || detect(bed, Launcher::Mainstay, hangs));
    if let Ok(ours) = &ours {
        report.add(figures(ours, None));
    }
    let theirs = bed.peers.as_ref().map(|_| {
        let what = format!("detect.hang_p95: the same under {}", Launcher::Nvrx.name());
        progress.step(&what, || detect(bed, Launcher::Nvrx, hangs))
    });
    let theirs = match theirs {
        Some(Ok(samples)) => Some(samples),
        Some(Err(error)) => {
            eprintln!("detect.hang_p95: {} left out: {error:#}", Launcher::Nvrx.name());
            None
        }
        None => None,
    };
    let figures = ours.map(|ours| figures(&ours, theirs.as_ref()));
    report.part("detect.hang_p95", figures);
}

/// Our figures, compared with theirs if they were measured.
fn figures(ours: &Samples, theirs: Option<&Samples>) -> Vec<Figure> {
    let p95 = Figure::p95("detect.hang_p95", "s over the limit", &ours.beyond);
    let p95 = p95.map(|figure| match theirs {
        Some(theirs) => figure.beside_at(Launcher::Nvrx.name(), &theirs.beyond, 0.95),
        None => figure,
    });
    let seconds = Figure::median("detect.hang", "s", &ours.seconds);
    let seconds = seconds.map(|figure| match theirs {
        Some(theirs) => figure.beside(Launcher::Nvrx.name(), &theirs.seconds),
        None => figure,
    });
    p95.into_iter().chain(seconds).collect()
}

#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    /// The same minus the limit.
    beyond: Vec<f64>,
}

fn detect(bed: &Bed, launcher: Launcher, hangs: usize) -> Result<Samples> {
    let folder = paths::target().join("bench/hang").join(format!("{launcher:?}").to_lowercase());
    let mut samples = Samples::default();
    let mut jobs = 0;
    let began = Instant::now();
    let over = |so_far: usize| so_far >= LEAST.min(hangs) && began.elapsed() > BUDGET;
    while samples.seconds.len() < hangs && !over(samples.seconds.len()) {
        let before = samples.seconds.len();
        let job = folder.join(format!("job_{jobs}"));
        if job.exists() {
            fs::remove_dir_all(&job).with_context(|| format!("emptying {}", job.display()))?;
        }
        fs::create_dir_all(&job).with_context(|| format!("creating {}", job.display()))?;
        one_job(bed, launcher, &job, hangs, &over, &mut samples)?;
        jobs += 1;
        if samples.seconds.len() == before {
            bail!("a job ended without a single hang being noticed");
        }
    }
    Ok(samples)
}

/// Stops the last rank of each attempt once it is warm, until there are enough samples, the time is over, or the
/// launcher does not restart any more.
fn one_job(
    bed: &Bed,
    launcher: Launcher,
    folder: &Path,
    hangs: usize,
    over: &dyn Fn(usize) -> bool,
    samples: &mut Samples,
) -> Result<()> {
    let mut command = bed.job(launcher, RANKS, folder, "hang.py")?;
    if launcher == Launcher::Nvrx {
        // Options come before the script, which is the last argument so far.
        let mut tighter = std::process::Command::new(command.get_program());
        let mut arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        let script = arguments.pop().context("the job has no script")?;
        arguments.retain(|argument| !argument.to_string_lossy().contains("heartbeat_timeout"));
        tighter.args(arguments).args(NVRX_SETTINGS).arg(script).arg("nvrx");
        tighter.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        tighter.current_dir(paths::target());
        command = tighter;
    }
    command.env("BENCH_FOLDER", folder);
    let mut running = Running::start(ends_with_us(command), &folder.join("launcher.log"))?;
    let mut journal = Follower::new(folder);
    let (mut seconds, mut attempt) = (Vec::new(), 0);
    let so_far = |seconds: &[f64]| samples.seconds.len() + seconds.len();
    while so_far(&seconds) < hangs && !over(so_far(&seconds)) {
        let warm = running.wait_for("a warm rank", WARM_WITHIN, || {
            // An attempt may fail before it is warm.
            (attempt..attempt + 3).find_map(|number| {
                let pid = fs::read_to_string(folder.join(format!("warm.{number}"))).ok()?;
                Some((number, pid.trim().parse::<i32>().ok()?))
            })
        });
        let Ok((number, pid)) = warm else { break };
        attempt = number + 1;
        journal.poll()?;
        let from = journal.entries.len();
        let at = journal::now();
        kill(Pid::from_raw(pid), Signal::SIGSTOP).with_context(|| format!("stopping {pid}"))?;
        let noticed = running.wait_for("a verdict", LIMIT, || match launcher {
            Launcher::Nvrx => is_gone(pid).then(journal::now),
            Launcher::Mainstay | Launcher::Torchrun => {
                journal.poll().ok()?;
                journal.entries[from..].iter().find(|entry| entry.ranks_hung()).map(|entry| entry.mono)
            }
        })?;
        seconds.push(noticed.saturating_sub(at) as f64 / 1e9);
        let (of, took) = (so_far(&seconds), seconds.last().copied().unwrap_or_default());
        eprintln!("  {}: hang {of} of {hangs}, noticed after {took:.2} s", launcher.name());
    }
    drop(running);
    let limit = limit(folder)?;
    samples.beyond.extend(seconds.iter().map(|seconds| seconds - limit));
    samples.seconds.extend(seconds);
    Ok(())
}

/// The same program, which is asked to stop when this process is killed: stopped ranks would stay forever.
fn ends_with_us(command: std::process::Command) -> std::process::Command {
    let known = std::process::Command::new("setpriv").arg("--version").output();
    if known.is_err() {
        return command;
    }
    let mut tied = std::process::Command::new("setpriv");
    tied.args(["--pdeathsig", "TERM", "--"]).arg(command.get_program()).args(command.get_args());
    tied.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    tied.current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
    tied
}

/// Dead, though perhaps not reaped yet.
fn is_gone(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
    })
}

/// The limit in seconds, from the steps of the first rank. The steps in which a rank was stopped have no end.
fn limit(folder: &Path) -> Result<f64> {
    let text = fs::read_to_string(folder.join("took.0")).context("reading what the steps took")?;
    let took: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    let q999 = Figure::quantile_of(&took, 0.999).context("no step was made")?;
    Ok((1.5 * q999).max(2.0))
}
