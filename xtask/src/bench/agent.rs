//! The cost of monitoring: memory and CPU of agent and launcher with 8 beating ranks, compared with NVRx's launcher
//! and monitors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::figure::{Figure, Report};
use super::launchers::{Bed, Launcher};
use super::peers::NVRX_NAME;
use super::process::{self, Running};
use crate::paths;
use crate::progress::Progress;

const RANKS: usize = 8;

/// How long CPU time is counted; memory is read at the end.
const WINDOW: Duration = Duration::from_secs(20);

/// Eight ranks of the peer each import PyTorch.
const LIMIT: Duration = Duration::from_secs(240);

/// Memory and CPU of some processes.
#[derive(Clone, Copy, Default)]
struct Weight {
    rss_mib: f64,
    pss_mib: f64,
    cpu_percent: f64,
}

/// Measures ours, and the peer if there is one.
pub fn measure(progress: &Progress, bed: &Bed, report: &mut Report) {
    if !report.wants(&[
        "agent.rss_8_ranks",
        "agent.cpu_8_ranks",
        "agent.launcher_rss_8_ranks",
        "agent.launcher_cpu_8_ranks",
    ]) {
        return;
    }
    let ours = match progress.step("agent with 8 beating ranks (20 s)", || ours(bed)) {
        Ok(ours) => ours,
        Err(error) => return report.part("agent", Err(error)),
    };
    report.add(figures(ours, None));
    let theirs = bed.peers.as_ref().and_then(|_| {
        let measured = progress.step("NVRx launcher and monitors with 8 beating ranks (20 s)", || nvrx(bed));
        measured.map_err(|error| eprintln!("{NVRX_NAME}: left out: {error:#}")).ok()
    });
    if theirs.is_some() {
        report.add(figures(ours, theirs));
    }
}

/// Figures of agent and launcher, the agent compared with the peer if that was measured.
fn figures((agent, launcher): (Weight, Weight), theirs: Option<Weight>) -> Vec<Figure> {
    let figure = |id: &str, unit: &str, value: f64, peer: Option<f64>| {
        let figure = Figure::median(id, unit, &[value])?;
        Some(match peer {
            Some(peer) => figure.beside(NVRX_NAME, &[peer]),
            None => figure,
        })
    };
    // The peer's processes share most of their pages: PSS counts each page once. Ours share nothing: RSS.
    let memory = theirs.map(|weight| weight.pss_mib);
    let cpu = theirs.map(|weight| weight.cpu_percent);
    let all = [
        figure("agent.rss_8_ranks", "MiB", agent.rss_mib, memory),
        figure("agent.cpu_8_ranks", "% of a core", agent.cpu_percent, cpu),
        figure("agent.launcher_rss_8_ranks", "MiB", launcher.rss_mib, None),
        figure("agent.launcher_cpu_8_ranks", "% of a core", launcher.cpu_percent, None),
    ];
    all.into_iter().flatten().collect()
}

/// The agent, and the launcher that reports to it.
fn ours(bed: &Bed) -> Result<(Weight, Weight)> {
    let folder = fresh("bench/agent")?;
    let socket = folder.join("agent.sock");
    let mut command = Command::new(paths::release_mainstay());
    command.arg("agent").arg("--socket").arg(&socket).arg("--state-dir").arg(folder.join("state"));
    let mut agent = Running::start(command, &folder.join("agent.log"))?;
    agent.wait_for("socket", Duration::from_secs(20), || socket.exists().then_some(()))?;

    let logs = folder.join("logs");
    let job = bed.job(Launcher::Mainstay, RANKS, &logs, "beating_rank.py")?;
    let environment = [("MAINSTAY_SOCKET", socket), ("BENCH_READY", folder.join("ready"))];
    let mut launcher = Running::start(with(job, &environment), &folder.join("launcher.log"))?;
    launcher.wait_for("first beats of all ranks", LIMIT, || ready(&folder))?;
    let weights = weigh(&[&[agent.pid()], &[launcher.pid()]])?;
    Ok((weights[0], weights[1]))
}

/// ft_launcher with its monitors; the ranks themselves are not counted.
fn nvrx(bed: &Bed) -> Result<Weight> {
    let folder = fresh("bench/agent_nvrx")?;
    let job = bed.job(Launcher::Nvrx, RANKS, &folder, "beating_rank.py")?;
    let environment = [("BENCH_READY", folder.join("ready")), ("BENCH_CLIENT", PathBuf::from("nvrx"))];
    let mut launcher = Running::start(with(job, &environment), &folder.join("launcher.log"))?;
    launcher.wait_for("first beats of all ranks", LIMIT, || ready(&folder))?;
    let watching: Vec<i32> = process::family(launcher.pid())
        .into_iter()
        .filter(|pid| {
            let line = process::command_line(*pid);
            // Ranks are the script itself; launcher and monitors carry ft_launcher in their command line.
            line.contains("ft_launcher") || !line.contains("beating_rank.py")
        })
        .collect();
    Ok(weigh(&[&watching])?[0])
}

/// Measures several groups of processes over the same window.
fn weigh(groups: &[&[i32]]) -> Result<Vec<Weight>> {
    let cpu = |group: &[i32]| group.iter().filter_map(|pid| process::cpu_seconds(*pid)).sum::<f64>();
    let before: Vec<f64> = groups.iter().map(|group| cpu(group)).collect();
    let began = Instant::now();
    // The measurement is this span of time.
    thread::sleep(WINDOW);
    let seconds = began.elapsed().as_secs_f64();
    let mut weights = Vec::new();
    for (group, before) in groups.iter().zip(before) {
        let mut weight = Weight { cpu_percent: 100.0 * (cpu(group) - before) / seconds, ..Weight::default() };
        for pid in *group {
            let of =
                |field| process::memory_mib(*pid, field).with_context(|| format!("process {pid} is gone"));
            weight.rss_mib += of("Rss")?;
            weight.pss_mib += of("Pss")?;
        }
        weights.push(weight);
    }
    Ok(weights)
}

fn with(mut command: Command, environment: &[(&str, PathBuf)]) -> Command {
    for (name, value) in environment {
        command.env(name, value);
    }
    command
}

fn ready(folder: &Path) -> Option<()> {
    (0..RANKS).all(|rank| folder.join(format!("ready.{rank}")).exists()).then_some(())
}

fn fresh(name: &str) -> Result<PathBuf> {
    let folder = paths::target().join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}
