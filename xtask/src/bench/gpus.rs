//! A host with eight simulated GPUs: the agent with a library that replaces NVML and a tree that replaces sysfs.
//! Measures the cost of monitoring them, and how long an error takes from a counter to the verdict.

use std::thread;

use fs_err::os::unix::fs::symlink;
use serde_json::{Value, json};

use super::kernel_log::Watched;
use super::prelude::*;

const GPUS: usize = 8;
const CARDS: usize = 8;

/// How long CPU time is counted: the slowest readings are made once a minute.
const WINDOW: Duration = Duration::from_secs(60);

/// Time between two readings of GPUs, the agent's default.
const INTERVAL: Duration = Duration::from_secs(10);

/// Files of a card's port that the agent reads, and their content.
const PORT: [(&str, &str); 13] = [
    ("link_layer", "InfiniBand\n"),
    ("state", "4: ACTIVE\n"),
    ("phys_state", "5: LinkUp\n"),
    ("rate", "400 Gb/sec (4X NDR)\n"),
    ("counters/link_downed", "0\n"),
    ("counters/symbol_error", "0\n"),
    ("counters/link_error_recovery", "0\n"),
    ("counters/local_link_integrity_errors", "0\n"),
    ("counters/excessive_buffer_overrun_errors", "0\n"),
    ("counters/port_rcv_errors", "0\n"),
    ("counters/port_xmit_discards", "0\n"),
    ("hw_counters/local_ack_timeout_err", "0\n"),
    ("hw_counters/roce_slow_restart", "0\n"),
];

/// What the agent costs with 8 GPUs, their 144 NVLinks and 8 cards, at the usual intervals.
pub fn weigh(bench: &mut Bench, _: &Bed) {
    let figures = Of::each([("agent.cpu_8_gpus", "% of a core"), ("agent.rss_8_gpus", "MiB")]);
    bench.measure(figures, "8 GPUs, 144 NVLinks, 8 cards (60 s)", || {
        Ok(vec![FakeHost::new("bench/gpus", GPUS)?.weigh()?])
    });
}

/// From an error in a counter of NVML to the verdict in the API's stream.
pub fn detect(bench: &mut Bench, _: &Bed) {
    let errors = bench.at_most(20, 3);
    bench.measure(
        Of::latency("detect.nvml_counter"),
        &format!("{errors} memory errors, a poll each"),
        || FakeHost::new("bench/nvml_counter", errors)?.verdicts(errors),
    );
}

/// The library with its script, and a sysfs with simulated cards; all other entries are this host's.
struct FakeHost {
    name: &'static str,
    folder: PathBuf,
    script: Value,
}

impl FakeHost {
    fn new(name: &'static str, gpus: usize) -> Result<FakeHost> {
        let folder = paths::fresh(paths::target().join(format!("{name}_host")))?;
        let library = paths::target().join("release/libfake_devices.so");
        fs::copy(&library, folder.join("libfake_devices.so"))?;
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
        let (new, place) = (self.folder.join("devices.new"), self.folder.join("devices.json"));
        fs::write(&new, self.script.to_string())?;
        Ok(fs::rename(new, place)?)
    }

    fn sys(&self) -> Result<()> {
        let sys = self.folder.join("sys");
        let cards = sys.join("class/infiniband");
        fs::create_dir_all(&cards)?;
        let same = |from: &str, to: &Path, but: &str| -> Result<()> {
            for entry in fs::read_dir(from)?.flatten().filter(|entry| entry.file_name() != but) {
                symlink(entry.path(), to.join(entry.file_name()))?;
            }
            Ok(())
        };
        same("/sys", &sys, "class")?;
        same("/sys/class", &sys.join("class"), "infiniband")?;
        for card in 0..CARDS {
            let device = cards.join(format!("mlx5_{card}"));
            let port = device.join("ports/1");
            fs::create_dir_all(port.join("counters"))?;
            fs::create_dir_all(port.join("hw_counters"))?;
            fs::write(device.join("node_guid"), format!("e8eb:d303:0072:{card:04}\n"))?;
            for (file, text) in PORT {
                fs::write(port.join(file), text)?;
            }
        }
        Ok(())
    }

    fn agent(&self) -> Result<Watched> {
        let (library, sys) = (self.folder.join("libfake_devices.so"), self.folder.join("sys"));
        let environment = [
            ("MAINSTAY_AGENT_GPU_LIBRARY", library.as_path()),
            ("MAINSTAY_AGENT_HOST_SYS_ROOT", sys.as_path()),
        ];
        Watched::with(self.name, &environment)
    }

    /// CPU of the agent and its children in percent of a core, and their memory in MiB.
    fn weigh(&self) -> Result<[f64; 2]> {
        let mut host = self.agent()?;
        host.wait_for(&format!("fabric.mlx5_{}/1", CARDS - 1), "HEALTHY")?;
        host.wait_until_learned()?;
        host.stop_listening();
        let family = || process::family(host.agent.pid());
        let before = process::cpu_seconds(family());
        let began = Instant::now();
        // The measurement is this span of time.
        thread::sleep(WINDOW);
        let percent = 100.0 * (process::cpu_seconds(family()) - before) / began.elapsed().as_secs_f64();
        let rss = family().into_iter().filter_map(process::memory_mib).map(|(rss, _)| rss).sum();
        Ok([percent, rss])
    }

    /// One GPU after the other has a memory error, somewhere between two readings.
    fn verdicts(mut self, gpus: usize) -> Result<Vec<f64>> {
        let mut host = self.agent()?;
        host.wait_until_learned()?;
        let mut samples = Vec::new();
        for index in 0..gpus {
            // All parts of the interval, in mixed order.
            thread::sleep(INTERVAL * u32::try_from(index * 7 % 10)? / 10);
            self.script["gpus"][index]["values"]["ecc_volatile"] = json!(1);
            let at = journal::now();
            self.write()?;
            let gpu = format!("gpu.{:04x}:{:02x}:00", index >> 7, (index & 0x7f) + 1);
            let known = host.wait_for(&gpu, "UNHEALTHY")?;
            samples.push(known.saturating_sub(at) as f64 / 1e6);
        }
        Ok(samples)
    }
}
