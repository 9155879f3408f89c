//! Keys of accelerators, of the network between them, and of those who know of them: DCGM, NCCL, the cloud.

use std::path::PathBuf;

use mainstay_core::base::units::Period;
use mainstay_core::hang::nccl_ras::NcclLimits;
use mainstay_core::hardware::gpu::reset::ResetMode;
use mainstay_core::hardware::gpu::{DeviceLimits, ExpectedGpus};
use mainstay_core::hardware::tpu::TpuLimits;
use mainstay_core::host::cloud::CloudLimits;
use mainstay_core::host::fabric::{Expected, FabricLimits};
use mainstay_core::settings;
use serde::{Deserialize, Serialize};

use crate::source::cloud::USUAL_ADDRESS;

settings! {
    /// How GPUs are watched.
    pub struct GpuConfig {
        /// Whether the driver of NVIDIA's GPUs is asked (by NVML, in a process of its own).
        enabled: bool = true,
        /// NVIDIA's management library. Empty: libnvidia-ml.so.1, and only on hosts that have a GPU of NVIDIA, or that library
        /// in LD_LIBRARY_PATH.
        library: PathBuf = PathBuf::new(),
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
        /// Time from one reading of what changes slowly, or costs more to read, to the next: counters of NVLinks, ECC errors by
        /// place, limits, versions.
        details_interval: Period = Period::seconds(60),
        /// How long the driver may take for one GPU until it counts as hung.
        deadline: Period = Period::seconds(10),
    }
    sections {
        /// What the GPUs of this host should be like.
        expected: ExpectedGpus,
        /// When a GPU counts as degraded or unhealthy, and for how long.
        limits: DeviceLimits,
        /// Whether and how a GPU is reset: docs/reference/policy.md.
        reset: ResetConfig,
    }
}

settings! {
    /// How GPUs are reset.
    pub struct ResetConfig {
        /// Who may have an idle GPU reset: "off" (nobody), "ordered" (operators, by mainstay gpus reset), "automatic" (the
        /// agent too, where a GPU's recommended action is RESET_DEVICE).
        mode: ResetMode = ResetMode::Off,
        /// The program that resets: it is called with --gpu-reset -i and the GPU's UUID, as the agent's user, who has to be root.
        /// Empty: nvidia-smi, as it is found on PATH.
        program: PathBuf = PathBuf::new(),
        /// How long it may take; it is killed then.
        deadline: Period = Period::seconds(120),
        /// Programs, by the names of their processes, that may have the GPU open while it is reset.
        may_stay: Vec<String> = vec!["nvidia-persistenced".to_owned()],
    }
    sections {}
}

settings! {
    /// How TPUs are watched.
    pub struct TpuConfig {
        /// Whether TPUs are looked for.
        enabled: bool = true,
        /// Metrics services of libtpu to ask, like "localhost:8431". Empty: while a process holds a chip, the ports in its
        /// TPU_RUNTIME_METRICS_PORTS, else localhost:8431. Port 8353 must not be polled and is refused.
        endpoints: Vec<String> = Vec::new(),
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
        /// How long an answer of libtpu may take.
        deadline: Period = Period::seconds(2),
        /// Where libtpu writes its stall summaries (tpu_stall_summary_*.pb) and its driver's logs (tpu_driver.*.log.*).
        log_dir: PathBuf = PathBuf::from("/tmp/tpu_logs"),
    }
    sections {
        /// When a TPU counts as degraded.
        limits: TpuLimits,
    }
}

settings! {
    /// How announcements of the cloud are followed.
    pub struct CloudConfig {
        /// Whose metadata server is followed: "auto" (whose machine this is by its firmware; none on others), "google",
        /// "amazon", "azure" or "none".
        provider: CloudProvider = CloudProvider::Auto,
        /// Where the metadata server is, as "host:port". It is reached by its address, so that no name has to be resolved.
        metadata: String = USUAL_ADDRESS.to_owned(),
    }
    sections {
        /// When announcements count.
        limits: CloudLimits,
    }
}

/// Whose metadata server is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloudProvider {
    /// Whose machine this is by its firmware.
    Auto,
    /// Google Compute Engine's.
    Google,
    /// Amazon EC2's.
    Amazon,
    /// Microsoft Azure's.
    Azure,
    /// Nobody's.
    None,
}

settings! {
    /// How NCCL's RAS service is asked.
    pub struct NcclConfig {
        /// Where it listens, as "host:port" (NCCL_RAS_ADDR of the job). It is asked only while a job runs on this host.
        /// Not asked by default: NCCL 2.26.2 and 2.29.7 can end a job that is asked regularly.
        /// Empty: it is not asked.
        address: String = String::new(),
        /// Time from one question to the next; at least 5s. Each walks through all processes of the job.
        interval: Period = Period::seconds(60),
        /// How long an answer may take.
        deadline: Period = Period::seconds(15),
    }
    sections {
        /// When NCCL counts as degraded.
        limits: NcclLimits,
    }
}

settings! {
    /// How the network that training runs over is watched.
    pub struct FabricConfig {
        /// Whether it is watched.
        enabled: bool = true,
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
        /// Links that must be up: ports like "mlx5_0/1", interfaces like "eth0", each with "=400" where the rate in Gb/s
        /// matters. Empty: those that were once up for a while.
        expected_ports: Vec<String> = Vec::new(),
        /// What is not to be read: devices ("mlx5_8"), ports ("mlx5_8/1"), interfaces, or the beginning of names
        /// ("mlx5_bond*").
        exclude: Vec<String> = Vec::new(),
    }
    sections {
        /// When a link counts as degraded or unhealthy.
        limits: FabricLimits,
    }
}

impl FabricConfig {
    /// The links that must be up.
    pub fn expected(&self) -> Result<Vec<Expected>, String> {
        self.expected_ports.iter().map(|text| Expected::parse(text)).collect()
    }
}

settings! {
    /// How DCGM is asked.
    pub struct DcgmConfig {
        /// "auto": where its library and a GPU are and a host engine answers; "on": it must be there; "embedded": in a
        /// process of our own, where no host engine runs; "off".
        mode: DcgmMode = DcgmMode::Auto,
        /// The host engine.
        address: String = "localhost:5555".to_owned(),
        /// DCGM's library. Empty: libdcgm.so.4, else libdcgm.so.3.
        library: PathBuf = PathBuf::new(),
        /// A page of dcgm-exporter to read, like "http://localhost:9400/metrics". Empty: none.
        exporter: String = String::new(),
        /// Whether DCGM is asked to tell of uncorrected memory errors, PCIe and NVLink errors, XIDs and retired pages
        /// where nobody has set a policy. It tells and does nothing else; what others have set stays as it is.
        policies: bool = true,
        /// Time from one check to the next; at least 1s.
        interval: Period = Period::seconds(30),
        /// How long an answer may take.
        deadline: Period = Period::seconds(10),
    }
    sections {}
}

/// Whether DCGM is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DcgmMode {
    /// Where it answers.
    Auto,
    /// It must answer.
    On,
    /// By a host engine within our own probe.
    Embedded,
    /// Never.
    Off,
}
