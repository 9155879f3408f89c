//! A host with eight simulated GPUs: the agent with a library that replaces NVML and a tree that replaces sysfs.
//! Measures the cost of monitoring them, and how long an error takes from a counter to the verdict.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::figure::{Figure, Report};
use super::kernel_log::Bed;
use super::process;
use crate::journal;
use crate::paths;
use crate::progress::Progress;

const GPUS: usize = 8;
const CARDS: usize = 8;

/// How long CPU time is counted: the slowest readings are made once a minute.
const WINDOW: Duration = Duration::from_secs(60);

/// Time between two readings of GPUs, the agent's default.
const INTERVAL: Duration = Duration::from_secs(10);

/// Counters of a card that the agent reads.
const COUNTERS: [&str; 9] = [
    "counters/link_downed",
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/roce_slow_restart",
];

/// What the agent costs with 8 GPUs, their 144 NVLinks and 8 cards, at the usual intervals.
pub fn weigh(progress: &Progress, report: &mut Report) {
    if !report.wants(&["agent.cpu_8_gpus", "agent.rss_8_gpus"]) {
        return;
    }
    let measured = progress.step("agent.cpu_8_gpus: 8 GPUs, 144 NVLinks, 8 cards (60 s)", || {
        let host = FakeHost::new("bench/gpus", GPUS)?;
        host.weigh()
    });
    let figures = measured.map(|(cpu, rss)| {
        let cpu = Figure::median("agent.cpu_8_gpus", "% of a core", &[cpu]);
        cpu.into_iter().chain(Figure::median("agent.rss_8_gpus", "MiB", &[rss])).collect()
    });
    report.part("agent.cpu_8_gpus", figures);
}

/// From an error in a counter of NVML to the verdict in the API's stream.
pub fn detect(progress: &Progress, errors: usize, report: &mut Report) {
    if !report.wants(&["detect.nvml_counter", "detect.nvml_counter_p99"]) {
        return;
    }
    let measured = progress
        .step(&format!("detect.nvml_counter: {errors} memory errors, a poll each"), || {
            FakeHost::new("bench/nvml_counter", errors)?.verdicts()
        });
    let figures = measured.map(|samples| {
        let p99 = Figure::p99("detect.nvml_counter_p99", "ms", &samples);
        p99.into_iter().chain(Figure::median("detect.nvml_counter", "ms", &samples)).collect()
    });
    report.part("detect.nvml_counter", figures);
}

/// The library with its script, and a sysfs with simulated cards; all other entries are this host's.
struct FakeHost {
    name: &'static str,
    folder: PathBuf,
    script: Value,
}

impl FakeHost {
    fn new(name: &'static str, gpus: usize) -> Result<FakeHost> {
        let folder = paths::target().join(format!("{name}_host"));
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("emptying {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let library = paths::target().join("release/libfake_devices.so");
        fs::copy(&library, folder.join("libfake_devices.so"))
            .with_context(|| format!("copying {}", library.display()))?;
        let gpu = |index: usize| {
            json!({
                "uuid": format!("GPU-{index}"),
                "pci": format!("0000{:04X}:{:02X}:00.0", index >> 7, (index & 0x7f) + 1),
                "values": {"nvlink5": 0, "utilization": 99},
                "processes": [[4711 + index, 70_000_000_000_u64]],
            })
        };
        let script = json!({"driver": "570.86.15", "gpus": (0..gpus).map(gpu).collect::<Vec<Value>>()});
        let host = FakeHost { name, folder, script };
        host.write()?;
        host.sys()?;
        Ok(host)
    }

    fn write(&self) -> Result<()> {
        let (beside, place) = (self.folder.join("devices.new"), self.folder.join("devices.json"));
        fs::write(&beside, self.script.to_string()).context("writing the script")?;
        fs::rename(beside, place).context("putting the script in its place")
    }

    fn sys(&self) -> Result<()> {
        let sys = self.folder.join("sys");
        fs::create_dir_all(sys.join("class/infiniband"))?;
        let same = |from: &str, to: &Path, but: &str| -> Result<()> {
            for entry in fs::read_dir(from)?.flatten().filter(|entry| entry.file_name() != but) {
                symlink(entry.path(), to.join(entry.file_name()))?;
            }
            Ok(())
        };
        same("/sys", &sys, "class")?;
        same("/sys/class", &sys.join("class"), "infiniband")?;
        for card in 0..CARDS {
            let device = sys.join(format!("class/infiniband/mlx5_{card}"));
            let port = device.join("ports/1");
            fs::create_dir_all(port.join("counters"))?;
            fs::create_dir_all(port.join("hw_counters"))?;
            fs::write(device.join("node_guid"), format!("e8eb:d303:0072:{card:04}\n"))?;
            for (file, text) in [
                ("link_layer", "InfiniBand\n"),
                ("state", "4: ACTIVE\n"),
                ("phys_state", "5: LinkUp\n"),
                ("rate", "400 Gb/sec (4X NDR)\n"),
            ] {
                fs::write(port.join(file), text)?;
            }
            for counter in COUNTERS {
                fs::write(port.join(counter), "0\n")?;
            }
        }
        Ok(())
    }

    fn agent(&self) -> Result<Bed> {
        let library = self.folder.join("libfake_devices.so");
        let sys = self.folder.join("sys");
        Bed::with(
            self.name,
            &[("MAINSTAY_AGENT_GPU_LIBRARY", library.as_path()), ("MAINSTAY_AGENT_HOST_SYS_ROOT", &sys)],
        )
    }

    /// CPU of the agent and its children in percent of a core, and their memory in MiB.
    fn weigh(&self) -> Result<(f64, f64)> {
        let mut bed = self.agent()?;
        bed.wait_for(&["fabric.mlx5_7/1", "HEALTHY"])?;
        bed.wait_for(&["gpu_learned"])?;
        bed.stop_listening();
        let pid = bed.pid();
        let family = || process::family(pid);
        let cpu = || family().into_iter().filter_map(process::cpu_seconds).sum::<f64>();
        let before = cpu();
        let began = Instant::now();
        // The measurement is this span of time.
        thread::sleep(WINDOW);
        let percent = 100.0 * (cpu() - before) / began.elapsed().as_secs_f64();
        let rss = family().into_iter().filter_map(|pid| process::memory_mib(pid, "Rss")).sum();
        Ok((percent, rss))
    }

    /// One GPU after the other has a memory error, somewhere between two readings.
    fn verdicts(mut self) -> Result<Vec<f64>> {
        let mut bed = self.agent()?;
        bed.wait_for(&["gpu_learned"])?;
        let count = self.script["gpus"].as_array().map_or(0, Vec::len);
        let mut samples = Vec::new();
        for index in 0..count {
            // All parts of the interval, in mixed order.
            thread::sleep(INTERVAL * u32::try_from(index * 7 % 10)? / 10);
            self.script["gpus"][index]["values"]["ecc_volatile"] = json!(1);
            let at = journal::now();
            self.write()?;
            let gpu = format!("gpu.{:04x}:{:02x}:00", index >> 7, (index & 0x7f) + 1);
            let known = bed.wait_for(&[&gpu, "UNHEALTHY"])?;
            samples.push(known.saturating_sub(at) as f64 / 1e6);
        }
        if samples.is_empty() {
            bail!("no GPU had an error");
        }
        Ok(samples)
    }
}
