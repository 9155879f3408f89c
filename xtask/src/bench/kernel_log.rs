//! The kernel log: from an XID's line to the verdict in the API's stream, and the cost of a storm of lines.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Stdio};

use serde_json::Value;

use super::agent;
use super::prelude::*;

/// Lines of the storm per second, and its duration.
const RATE: u64 = 100_000;
const SECONDS: u64 = 10;

/// XIDs within the storm, each of a different GPU.
const XIDS: u64 = 100;

/// Measures many XIDs, and one storm.
pub fn measure(bench: &mut Bench, _: &Bed) {
    let xids = bench.samples(1000, 100);
    bench.measure(Of::latency("detect.xid_kmsg"), &format!("{xids} XIDs"), || verdicts(xids));
    let figures = Of::each([("detect.kmsg_storm_cpu", "% of a core"), ("detect.kmsg_storm_xids_lost", "")]);
    bench.measure(figures, "100,000 lines a second for 10 s", || Ok(vec![storm()?]));
}

/// An agent that reads a pipe instead of the kernel log, and its events as they arrive.
pub struct Watched {
    pub agent: Running,
    events: Child,
    lines: BufReader<ChildStdout>,
    log: fs::File,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.stop_listening();
    }
}

impl Watched {
    /// With these variables for the agent.
    pub fn with(name: &str, environment: &[(&str, &Path)]) -> Result<Watched> {
        let folder = paths::fresh(paths::target().join(name))?;
        let pipe = folder.join("kmsg");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).context("making a pipe")?;
        let environment = [environment, &[("MAINSTAY_AGENT_KERNEL_LOG_PATH", pipe.as_path())]].concat();
        let (agent, socket) = agent::start(&folder, &environment)?;
        let program = paths::release_mainstay();
        let mut events = cmd!("{program} events --follow --json --socket {socket}");
        let mut events = events.stdout(Stdio::piped()).spawn().context("following the events")?;
        let lines = BufReader::new(events.stdout.take().context("the events have no output")?);
        let log = fs::OpenOptions::new().write(true).open(&pipe)?;
        Ok(Watched { agent, events, lines, log })
    }

    pub fn stop_listening(&mut self) {
        // It may have ended by itself.
        let _ = self.events.kill();
        let _ = self.events.wait();
    }

    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line).context("reading the events")?;
        ensure!(!line.is_empty(), "the events ended");
        serde_json::from_str(&line).with_context(|| format!("an event: {line}"))
    }

    /// Waits until a component has a state, and returns when that was reported.
    pub fn wait_for(&mut self, component: &str, state: &str) -> Result<u64> {
        loop {
            let attributes = &self.next()?["attributes"];
            if attributes["component.name"] == component && attributes["component.state"] == state {
                return Ok(journal::now());
            }
        }
    }

    /// Waits until the agent has learned which GPUs the host has.
    pub fn wait_until_learned(&mut self) -> Result<()> {
        while self.next()?["attributes"]["event"] != "gpu_learned" {}
        Ok(())
    }
}

fn without_gpus(name: &str) -> Result<Watched> {
    let mut host = Watched::with(name, &[("MAINSTAY_AGENT_GPU_ENABLED", Path::new("false"))])?;
    host.wait_for("host.kernel_log", "HEALTHY")?;
    Ok(host)
}

fn verdicts(xids: usize) -> Result<Vec<f64>> {
    let mut host = without_gpus("bench/xid_kmsg")?;
    let mut samples = Vec::new();
    for number in 0..xids {
        let gpu = gpu(number as u64);
        let line = format!("4,{number},0,-;NVRM: Xid (PCI:{gpu}): 48, pid=1, name=python, DBE\n");
        let at = journal::now();
        host.log.write_all(line.as_bytes())?;
        let known = host.wait_for(&format!("gpu.{gpu}"), "UNHEALTHY")?;
        samples.push(known.saturating_sub(at) as f64 / 1e6);
    }
    Ok(samples)
}

/// CPU of the agent in percent of a core, and the number of XIDs that it did not report.
fn storm() -> Result<[f64; 2]> {
    let mut host = without_gpus("bench/kmsg_storm")?;
    // The maximum for an unprivileged process: the kernel's own buffer is not smaller.
    let _ = nix::fcntl::fcntl(host.log.file(), nix::fcntl::FcntlArg::F_SETPIPE_SZ(1 << 20));
    let pid = host.agent.pid();
    let before = process::cpu_seconds([pid]);
    let began = Instant::now();
    let batch = RATE / 100;
    for tick in 0..SECONDS * 100 {
        let text: String = (0..batch).map(|place| storm_line(tick * batch + place)).collect();
        host.log.write_all(text.as_bytes())?;
        let due = Duration::from_millis((tick + 1) * 10);
        // Keeps the pace of the storm.
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }
    host.log.write_all(b"NVRM: Xid (PCI:ffff:ff:1f): 79, the last\n")?;
    let mut seen = 0;
    loop {
        let event = host.next()?;
        let line = event["attributes"]["line"].as_str().unwrap_or_default();
        if line.contains("the last") {
            break;
        }
        seen += u64::from(line.contains("the storm's own"));
    }
    let percent = 100.0 * (process::cpu_seconds([pid]) - before) / began.elapsed().as_secs_f64();
    Ok([percent, XIDS.saturating_sub(seen) as f64])
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
