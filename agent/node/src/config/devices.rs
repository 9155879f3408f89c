//! Keys of accelerators, of the network between them, and of their sources: DCGM, NCCL, the cloud.

use std::path::PathBuf;

use mainstay_health::hardware::gpu::ExpectedGpus;
use mainstay_health::hardware::gpu::reset::ResetMode;
use mainstay_health::host::fabric::Expected;
use mainstay_model::settings;
use mainstay_model::units::Period;
use serde::{Deserialize, Serialize};

use mainstay_sensors::source::cloud::USUAL_ADDRESS;

settings! {
    /// How GPUs are monitored.
    pub struct GpuConfig {
        /// Whether NVIDIA's GPU driver is read (by NVML, in a child process).
        enabled: bool = true,
        /// NVIDIA's management library. Empty: libnvidia-ml.so.1, and only on hosts that have an NVIDIA GPU, or that library in
        /// LD_LIBRARY_PATH.
        library: PathBuf = PathBuf::new(),
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
    }
    sections {
        /// What the GPUs of this host should be like.
        expected: ExpectedGpus,
        /// Whether and how a GPU is reset: docs/reference/policy.md.
        reset: ResetConfig,
    }
}

settings! {
    /// How GPUs are reset.
    pub struct ResetConfig {
        /// Who may reset an idle GPU: "off" (no one), "ordered" (operators, with mainstay gpus reset), "automatic" (also the
        /// agent, where a GPU's recommended action is RESET_DEVICE).
        mode: ResetMode = ResetMode::Off,
        /// The program that resets a GPU: it is run with --gpu-reset -i and the GPU's UUID, as the agent's user, which must be
        /// root. Empty: nvidia-smi from PATH.
        program: PathBuf = PathBuf::new(),
        /// How long a reset may take; the program is killed after that.
        deadline: Period = Period::seconds(120),
        /// Programs, by the names of their processes, that may have the GPU open while it is reset.
        may_stay: Vec<String> = vec!["nvidia-persistenced".to_owned()],
    }
    sections {}
}

settings! {
    /// How TPUs are monitored.
    pub struct TpuConfig {
        /// Whether the agent monitors TPUs.
        enabled: bool = true,
        /// Metrics services of libtpu to ask, like "localhost:8431". Empty: while a process holds a chip, the ports in its
        /// TPU_RUNTIME_METRICS_PORTS, else localhost:8431. Port 8353 must not be polled and is refused.
        endpoints: Vec<String> = Vec::new(),
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
        /// Where libtpu writes its stall summaries (tpu_stall_summary_*.pb) and its driver's logs (tpu_driver.*.log.*).
        log_dir: PathBuf = PathBuf::from("/tmp/tpu_logs"),
    }
    sections {}
}

settings! {
    /// How announcements of the cloud are read.
    pub struct CloudConfig {
        /// Whose metadata server is read: "auto" (the provider named by the firmware, if any), "google", "amazon", "azure" or
        /// "none".
        provider: CloudProvider = CloudProvider::Auto,
        /// The metadata server, as "host:port". The default is an IP address, so that no name has to be resolved.
        metadata: String = USUAL_ADDRESS.to_owned(),
    }
    sections {}
}

/// Whose metadata server is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloudProvider {
    /// The provider that the firmware names.
    Auto,
    /// Google Compute Engine's.
    Google,
    /// Amazon EC2's.
    Amazon,
    /// Microsoft Azure's.
    Azure,
    /// None.
    None,
}

settings! {
    /// How NCCL's RAS service is queried.
    pub struct NcclConfig {
        /// Address of the RAS service, as "host:port" (NCCL_RAS_ADDR of the job). It is queried only while a job runs on this
        /// host. Empty (default): it is not queried, since regular queries can end a job with NCCL 2.26.2 and 2.29.7.
        address: String = String::new(),
        /// Time from one query to the next; at least 5s. Each query visits all processes of the job.
        interval: Period = Period::seconds(60),
    }
    sections {}
}

settings! {
    /// How the training network is monitored.
    pub struct FabricConfig {
        /// Whether the agent monitors the network.
        enabled: bool = true,
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
        /// Links that must be up: ports such as "mlx5_0/1", interfaces such as "eth0", each with "=400" where the rate in Gb/s
        /// matters. Empty: the links that the agent has learned.
        expected_ports: Vec<String> = Vec::new(),
        /// What the agent does not read: devices ("mlx5_8"), ports ("mlx5_8/1"), interfaces, or prefixes of names
        /// ("mlx5_bond*").
        exclude: Vec<String> = Vec::new(),
    }
    sections {}
}

impl FabricConfig {
    /// The links that must be up.
    pub fn expected(&self) -> Result<Vec<Expected>, String> {
        self.expected_ports.iter().map(|text| Expected::parse(text)).collect()
    }
}

settings! {
    /// How DCGM is used.
    pub struct DcgmConfig {
        /// "auto": used where its library and a GPU are present and a host engine answers; "on": required; "embedded": in a
        /// child process of the agent, where no host engine runs; "off".
        mode: DcgmMode = DcgmMode::Auto,
        /// Address of the host engine.
        address: String = "localhost:5555".to_owned(),
        /// DCGM's library. Empty: libdcgm.so.4, else libdcgm.so.3.
        library: PathBuf = PathBuf::new(),
        /// A page of dcgm-exporter to read, such as "http://localhost:9400/metrics". Empty: none.
        exporter: String = String::new(),
        /// Whether the agent sets DCGM policies for uncorrected memory errors, PCIe and NVLink errors, XIDs and retired pages
        /// where no policy is set. The policies only report; existing policies stay unchanged.
        policies: bool = true,
        /// Time from one check to the next; at least 1s.
        interval: Period = Period::seconds(30),
    }
    sections {}
}

/// Whether DCGM is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DcgmMode {
    /// If it answers.
    Auto,
    /// It must answer.
    On,
    /// In a host engine inside the agent's child process.
    Embedded,
    /// Never.
    Off,
}
