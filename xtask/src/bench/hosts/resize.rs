//! A job that goes on without a lost host and takes it back: from the loss to steps of all ranks that are left, less what is
//! waited for the host on purpose; and from the decision to take a host back to steps of all ranks with it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::network::Network;
use super::{folder, of_host};
use crate::bench::events::Events;
use crate::bench::figure::{Figure, Report};
use crate::bench::launchers::{Bed, script_path};
use crate::bench::process::Running;
use crate::demo::activate;
use crate::journal::Follower;
use crate::paths;
use crate::progress::Progress;

const IDS: [&str; 2] = ["hosts.shrink_added", "hosts.grow_added"];

/// Hosts with one rank each.
const HOSTS: usize = 3;

/// Steps of all ranks before and after.
const SETTLE_STEPS: usize = 50;

/// How long the job waits for the lost host, and how long it runs before it takes one back, seconds.
const PAUSE: f64 = 1.0;

/// A job that needs longer than this has hung.
const LIMIT: Duration = Duration::from_secs(120);

/// Seconds.
struct Resized {
    shrink: f64,
    grow: f64,
}

/// Measures so many jobs, of which each loses a host and gets it back.
pub fn measure(story: &Progress, bed: &Bed, jobs: usize, report: &mut Report) {
    let mut measured: Vec<Resized> = Vec::new();
    for job in 1..=jobs {
        if !report.wants(&IDS) {
            return;
        }
        match story
            .step(&format!("hosts.shrink_added, hosts.grow_added: job {job} of {jobs}"), || resized(bed))
        {
            Ok(one) => measured.push(one),
            Err(error) => return report.part(IDS[0], Err(error)),
        }
        let figure = |id: &str, of: fn(&Resized) -> f64| {
            Figure::median(id, "s", &measured.iter().map(of).collect::<Vec<f64>>())
        };
        report.add([figure(IDS[0], |of| of.shrink), figure(IDS[1], |of| of.grow)].into_iter().flatten());
    }
}

fn resized(bed: &Bed) -> Result<Resized> {
    let runtime = std::env::temp_dir().join(format!("mainstay-bench-hosts-{}", std::process::id()));
    let measured = in_folder(bed, &folder("resize")?, &runtime);
    let _ = fs::remove_dir_all(&runtime);
    measured
}

fn in_folder(bed: &Bed, folder: &Path, runtime: &Path) -> Result<Resized> {
    let network = Network::new(HOSTS + 1)?;
    let endpoint = network.endpoints(1, 29_400)?;
    let path = folder.join("events.jsonl");
    let conf = format!("shrink_after={PAUSE},grow_after={PAUSE},last_call_timeout=60");
    let start = |host: usize| -> Result<Running> {
        let logs = of_host(folder, host)?;
        let mut command = Command::new(paths::release_mainstay());
        command.args(["run", "--no-agent", "--nnodes", &format!("1:{HOSTS}"), "--rdzv-id", "bench"]);
        command.args(["--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint, "--rdzv-conf", &conf]);
        command.arg("--log-dir").arg(&logs).arg("--runtime-dir").arg(runtime.join(host.to_string()));
        activate(&mut command, &bed.venv);
        command.arg(script_path("hosts_rank.py")).env("BENCH_EVENTS", &path);
        Running::start(network.on(host, command), &logs.join("launcher.log"))
    };
    let mut launchers = Vec::new();
    for host in 0..HOSTS {
        let mut launcher = start(host)?;
        let log = launcher.log.clone();
        let joins = if host == 0 { "this host leads the job" } else { "joining the job; its leader is" };
        let joined = || fs::read_to_string(&log).is_ok_and(|text| text.contains(joins)).then_some(());
        launcher.wait_for("its part in the job", LIMIT, joined)?;
        launchers.push(launcher);
    }
    let mut journal = Follower::new(&folder.join("host-0"));
    let mut seen = |what: &str, launcher: &mut Running| {
        launcher.wait_for(what, LIMIT, || {
            journal.poll().ok()?;
            journal.entries.iter().find(|entry| entry.is_event(what)).map(|entry| entry.mono)
        })
    };
    let mut all = Events::of(path.clone(), HOSTS);
    launchers[0].wait_for("steps of all ranks", LIMIT, || all.stepping(0, &BTreeSet::new(), SETTLE_STEPS))?;
    let lost = launchers.pop().context("the last host")?;
    let old: BTreeSet<i32> = all.all.iter().map(|event| event.pid).collect();
    kill(Pid::from_raw(lost.pid()), Signal::SIGKILL).context("killing a launcher")?;
    let mut left = Events::of(path.clone(), HOSTS - 1);
    launchers[0].wait_for("steps without the host", LIMIT, || left.stepping(0, &old, SETTLE_STEPS))?;
    let stepping = left.last_first_step(0, &old).context("no steps")?;
    let known = seen("host_lost", &mut launchers[0])?;
    let shrink = stepping.saturating_sub(known) as f64 / 1e9 - PAUSE;

    let old: BTreeSet<i32> = left.all.iter().map(|event| event.pid).collect();
    launchers.push(start(HOSTS)?);
    let mut all = Events::of(path, HOSTS);
    launchers[0].wait_for("steps with the host", LIMIT, || all.stepping(0, &old, 1))?;
    let stepping = all.last_first_step(0, &old).context("no steps")?;
    let decided = seen("world_grows", &mut launchers[0])?;
    Ok(Resized { shrink, grow: stepping.saturating_sub(decided) as f64 / 1e9 })
}
