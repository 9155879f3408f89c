//! The cost of monitoring: memory and CPU of agent and launcher with 8 beating ranks, compared with NVRx's
//! launcher and monitors.

use std::thread;

use super::prelude::*;

const RANKS: usize = 8;

/// How long CPU time is counted; memory is read at the end.
const WINDOW: Duration = Duration::from_secs(20);

/// Measures ours, and the peer if there is one: memory in MiB and CPU in percent of a core, of the agent or all
/// processes of a peer, and of our launcher.
pub fn measure(bench: &mut Bench, bed: &Bed) {
    let mut comparison = Comparison::of(Of::each([
        ("agent.rss_8_ranks", "MiB"),
        ("agent.cpu_8_ranks", "% of a core"),
        ("agent.launcher_rss_8_ranks", "MiB"),
        ("agent.launcher_cpu_8_ranks", "% of a core"),
    ]));
    bench.take(&mut comparison, None, "agent with 8 beating ranks (20 s)", || ours(bed));
    if bed.peers.is_some() {
        let what = "NVRx launcher and monitors with 8 beating ranks (20 s)";
        bench.take(&mut comparison, Some(NVRX_NAME), what, || nvrx(bed));
    }
}

/// An agent in a folder, and its socket.
pub fn start(folder: &Path, environment: &[(&str, &Path)]) -> Result<(Running, PathBuf)> {
    let (program, socket, state) =
        (paths::release_mainstay(), folder.join("agent.sock"), folder.join("state"));
    let mut command = cmd!("{program} agent --socket {socket} --state-dir {state}");
    command.envs(environment.iter().copied());
    let mut agent = Running::start(command, &folder.join("agent.log"))?;
    agent.wait_for_file(&socket)?;
    Ok((agent, socket))
}

fn ours(bed: &Bed) -> Result<Vec<[f64; 4]>> {
    let folder = paths::fresh(paths::target().join("bench/agent"))?;
    let (agent, socket) = start(&folder, &[])?;
    let mut job = bed.job(Launcher::Mainstay, RANKS, &folder.join("logs"), "", "beating_rank.py");
    job.env("MAINSTAY_SOCKET", socket).env("BENCH_READY", folder.join("ready"));
    let mut launcher = Running::start(job, &folder.join("launcher.log"))?;
    launcher.wait_for("first beats of all ranks", || ready(&folder))?;
    // They share no pages: all of them count.
    let weights = weigh(&[&[agent.pid()], &[launcher.pid()]], |(rss, _)| rss)?;
    Ok(vec![[weights[0].0, weights[0].1, weights[1].0, weights[1].1]])
}

/// ft_launcher with its monitors; the ranks themselves are not counted.
fn nvrx(bed: &Bed) -> Result<Vec<[f64; 4]>> {
    let folder = paths::fresh(paths::target().join("bench/agent_nvrx"))?;
    let mut job = bed.job(Launcher::Nvrx, RANKS, &folder, "", "beating_rank.py");
    job.env("BENCH_READY", folder.join("ready")).env("BENCH_CLIENT", "nvrx");
    let mut launcher = Running::start(job, &folder.join("launcher.log"))?;
    launcher.wait_for("first beats of all ranks", || ready(&folder))?;
    // Ranks are the script itself; launcher and monitors carry ft_launcher in their command line.
    let is_watching = |pid: &i32| {
        let line = procfs::process::Process::new(*pid).and_then(|process| process.cmdline());
        let line = line.unwrap_or_default().join(" ");
        line.contains("ft_launcher") || !line.contains("beating_rank.py")
    };
    let watching: Vec<i32> = process::family(launcher.pid()).into_iter().filter(is_watching).collect();
    // They share most of their pages: each page counts once.
    let (memory, cpu) = weigh(&[&watching], |(_, pss)| pss)?[0];
    Ok(vec![[memory, cpu, f64::NAN, f64::NAN]])
}

/// Measures several groups of processes over the same window.
fn weigh(groups: &[&[i32]], memory: fn((f64, f64)) -> f64) -> Result<Vec<(f64, f64)>> {
    let cpu = |group: &[i32]| process::cpu_seconds(group.iter().copied());
    let before: Vec<f64> = groups.iter().map(|group| cpu(group)).collect();
    let began = Instant::now();
    // The measurement is this span of time.
    thread::sleep(WINDOW);
    let seconds = began.elapsed().as_secs_f64();
    let weight = |(group, before): (&&[i32], f64)| {
        let percent = 100.0 * (cpu(group) - before) / seconds;
        let of = |pid: &i32| process::memory_mib(*pid).map(memory);
        let mib: Option<f64> = group.iter().map(of).sum();
        Ok((mib.context("a process is gone")?, percent))
    };
    groups.iter().zip(before).map(weight).collect()
}

fn ready(folder: &Path) -> Option<()> {
    (0..RANKS).all(|rank| folder.join(format!("ready.{rank}")).exists()).then_some(())
}
