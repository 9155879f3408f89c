//! The kernel log: from an XID's line to the verdict in the API's stream, and the cost of a storm of lines.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::figure::{Figure, Report};
use super::process::{self, Running};
use crate::journal;
use crate::paths;
use crate::progress::Progress;

/// Lines of the storm per second, and its duration.
const RATE: u64 = 100_000;
const SECONDS: u64 = 10;

/// XIDs within the storm, each of a different GPU.
const XIDS: u64 = 100;

const LIMIT: Duration = Duration::from_secs(30);

/// Measures so many XIDs, and one storm.
pub fn measure(progress: &Progress, xids: usize, report: &mut Report) {
    if report.wants(&["detect.xid_kmsg", "detect.xid_kmsg_p99"]) {
        let samples = progress.step(&format!("detect.xid_kmsg: {xids} XIDs"), || verdicts(xids));
        let figures = samples.map(|samples| {
            let p99 = Figure::p99("detect.xid_kmsg_p99", "ms", &samples);
            p99.into_iter().chain(Figure::median("detect.xid_kmsg", "ms", &samples)).collect()
        });
        report.part("detect.xid_kmsg", figures);
    }
    if !report.wants(&["detect.kmsg_storm_cpu", "detect.kmsg_storm_xids_lost"]) {
        return;
    }
    let storm = progress.step("detect.kmsg_storm_cpu: 100,000 lines a second for 10 s", storm);
    let figures = storm.map(|(cpu, lost)| {
        let cpu = Figure::median("detect.kmsg_storm_cpu", "% of a core", &[cpu]);
        cpu.into_iter().chain(Figure::median("detect.kmsg_storm_xids_lost", "", &[lost])).collect()
    });
    report.part("detect.kmsg_storm_cpu", figures);
}

/// An agent that reads a pipe instead of the kernel log, and its events as they arrive.
pub(super) struct Bed {
    agent: Running,
    events: Child,
    lines: BufReader<std::process::ChildStdout>,
    log: fs::File,
}

impl Drop for Bed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.events.kill();
        let _ = self.events.wait();
    }
}

impl Bed {
    /// The agent's process.
    pub(super) fn pid(&self) -> i32 {
        self.agent.pid()
    }

    /// Stops following the events.
    pub(super) fn stop_listening(&mut self) {
        // It may have ended by itself.
        let _ = self.events.kill();
        let _ = self.events.wait();
    }

    fn new(name: &str) -> Result<Bed> {
        Bed::with(name, &[("MAINSTAY_AGENT_GPU_ENABLED", Path::new("false"))])
    }

    /// With these variables for the agent.
    pub(super) fn with(name: &str, environment: &[(&str, &Path)]) -> Result<Bed> {
        let folder = fresh(name)?;
        let (socket, pipe) = (folder.join("agent.sock"), folder.join("kmsg"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).context("making a pipe")?;
        let mut command = Command::new(paths::release_mainstay());
        command.arg("agent").arg("--socket").arg(&socket).arg("--state-dir").arg(folder.join("state"));
        command.env("MAINSTAY_AGENT_KERNEL_LOG_PATH", &pipe);
        command.envs(environment.iter().copied());
        let mut agent = Running::start(command, &folder.join("agent.log"))?;
        agent.wait_for("socket", LIMIT, || socket.exists().then_some(()))?;
        let mut events = Command::new(paths::release_mainstay())
            .args(["events", "--follow", "--json", "--socket"])
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .context("following the events")?;
        let stdout = events.stdout.take().context("the events have no output")?;
        let log = OpenOptions::new().write(true).open(&pipe).context("opening the pipe")?;
        Ok(Bed { agent, events, lines: BufReader::new(stdout), log })
    }

    /// Waits for the event that contains all these words, and returns when it arrived.
    pub(super) fn wait_for(&mut self, words: &[&str]) -> Result<u64> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.lines.read_line(&mut line).context("reading the events")? == 0 {
                bail!("the events ended before {words:?}");
            }
            if words.iter().all(|word| line.contains(word)) {
                return Ok(journal::now());
            }
        }
    }
}

fn verdicts(xids: usize) -> Result<Vec<f64>> {
    let mut bed = Bed::new("bench/xid_kmsg")?;
    bed.wait_for(&["host.kernel_log is HEALTHY"])?;
    let mut samples = Vec::new();
    for number in 0..xids {
        let gpu = gpu(number as u64);
        let line = format!("4,{number},0,-;NVRM: Xid (PCI:{gpu}): 48, pid=1, name=python, DBE\n");
        let at = journal::now();
        bed.log.write_all(line.as_bytes()).context("writing an XID")?;
        let known = bed.wait_for(&[&format!("gpu.{gpu} is UNHEALTHY")])?;
        samples.push(known.saturating_sub(at) as f64 / 1e6);
    }
    Ok(samples)
}

/// CPU of the agent in percent of a core, and the number of XIDs that it did not report.
fn storm() -> Result<(f64, f64)> {
    let mut bed = Bed::new("bench/kmsg_storm")?;
    bed.wait_for(&["host.kernel_log is HEALTHY"])?;
    // The maximum for an unprivileged process: the kernel's own buffer is not smaller.
    let _ = nix::fcntl::fcntl(&bed.log, nix::fcntl::FcntlArg::F_SETPIPE_SZ(1 << 20));
    let pid = bed.agent.pid();
    let cpu = || process::cpu_seconds(pid).with_context(|| format!("process {pid} is gone"));
    let before = cpu()?;
    let began = Instant::now();
    let batch = RATE / 100;
    for tick in 0..SECONDS * 100 {
        let mut text = String::new();
        for place in 0..batch {
            text.push_str(&storm_line(tick * batch + place));
        }
        bed.log.write_all(text.as_bytes()).context("writing the storm")?;
        let due = Duration::from_millis((tick + 1) * 10);
        // Keeps the pace of the storm.
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }
    bed.log.write_all(b"NVRM: Xid (PCI:ffff:ff:1f): 79, the last\n").context("writing the last line")?;
    let mut seen = 0;
    let mut line = String::new();
    while !line.contains("the last") {
        line.clear();
        if bed.lines.read_line(&mut line).context("reading the events")? == 0 {
            bail!("the events ended within the storm");
        }
        seen += u64::from(line.contains("the storm's own"));
    }
    let percent = 100.0 * (cpu()? - before) / began.elapsed().as_secs_f64();
    Ok((percent, XIDS.saturating_sub(seen) as f64))
}

/// Errors that were corrected, chatter, and now and then an XID.
fn storm_line(number: u64) -> String {
    let every = RATE * SECONDS / XIDS;
    let message = match number {
        number if number % every == every / 2 => {
            format!("NVRM: Xid (PCI:{}): 48, pid=1, name=a, the storm's own", gpu(number / every))
        }
        number if number % 2 == 0 => {
            "pcieport 0000:16:00.0: AER: Corrected error received: 0000:17:00.0".to_owned()
        }
        _ => "mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:803:(pid 33): ACCESS_REG(0x805) op_mod(0x1) failed"
            .to_owned(),
    };
    format!("4,{number},{number},-;{message}\n")
}

fn gpu(number: u64) -> String {
    format!("{:04x}:{:02x}:00", number >> 8, number & 0xff)
}

fn fresh(name: &str) -> Result<PathBuf> {
    let folder = paths::target().join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}
