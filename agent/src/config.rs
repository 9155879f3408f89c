//! Floor 5. Configuration: defaults, then the file, then `MAINSTAY_AGENT_*`, then flags; the later weigh more.
//!
//! One declaration of each key gives its type, default and documentation; the commented default file and
//! `docs/reference/configuration.md` are held to it. A wrong configuration is refused as a whole, with everything
//! that is wrong in it: where it stands, what it says and what would be right.

mod document;
mod error;
mod layers;
mod paths;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_core::cloud::CloudLimits;
use mainstay_core::device::{DeviceLimits, ExpectedGpus};
use mainstay_core::fabric::{Expected, FabricLimits};
use mainstay_core::host::{HostLimits, SystemLimits};
use mainstay_core::nccl_ras::NcclLimits;
use mainstay_core::parse::log::LogLimits;
use mainstay_core::preflight::deep::DeepLimits;
use mainstay_core::settings;
use mainstay_core::settings::{Bytes, Period};
use mainstay_core::tpu::TpuLimits;
use serde::{Deserialize, Serialize};

pub use document::{Key, environment_name, keys, reference_rows};
pub use error::{ConfigError, Origin, Problem};
pub use paths::Environment;

use layers::Layers;

use crate::source::cloud::USUAL_ADDRESS;
use crate::source::host::{Roots, SystemPlan};
use crate::source::journald::JOURNALD;
use crate::source::tpu::FORBIDDEN_PORT;
use crate::store::journal::Limits;

settings! {
    /// The agent's configuration.
    pub struct Config {
        /// Where the agent keeps its journal and other state. Empty: /var/lib/mainstay as root, else
        /// $XDG_STATE_HOME/mainstay or ~/.local/state/mainstay.
        state_dir: PathBuf = PathBuf::new(),
        /// The Unix socket on which the agent serves launchers and clients. Empty: /run/mainstay/agent.sock as root, else
        /// $XDG_RUNTIME_DIR/mainstay/agent.sock or /tmp/mainstay-<uid>/agent.sock.
        socket: PathBuf = PathBuf::new(),
        /// TCP address on which the gRPC API is served beside the socket, like "127.0.0.1:7130". Empty: none. The API has
        /// no authentication on TCP.
        #[serde(with = "none_is_empty")]
        listen: Option<SocketAddr> = None,
        /// TCP address on which HTTP (/metrics, /healthz, /readyz) is served, like "127.0.0.1:7131". Empty: none.
        #[serde(with = "none_is_empty")]
        http: Option<SocketAddr> = None,
        /// Users whose launchers may attach, beside root and the agent's own user: numeric ids.
        allow_uids: Vec<u32> = Vec::new(),
        /// Groups whose members' launchers may attach, beside the agent's own group: numeric ids.
        allow_gids: Vec<u32> = Vec::new(),
        /// How much is logged: "error", "warn", "info", "debug" or "trace".
        log: LogLevel = LogLevel::Info,
    }
    sections {
        /// The journal: docs/reference/journal.md.
        journal: JournalConfig,
        /// The components host.cpu, host.memory, host.disk and host.oom.
        host: HostConfig,
        /// What the kernel reports of the host and of GPUs: docs/reference/checks.md.
        kernel_log: KernelLogConfig,
        /// What XIDs, SXIDs and kernel lines mean, and from when they count.
        catalog: CatalogConfig,
        /// The components gpu and nvswitch.
        gpu: GpuConfig,
        /// The components tpu.runtime and tpu.0, tpu.1 and so on.
        tpu: TpuConfig,
        /// The component host.cloud.
        cloud: CloudConfig,
        /// The component nccl.
        nccl: NcclConfig,
        /// The components fabric and net: InfiniBand, RoCE and the Ethernet below them.
        fabric: FabricConfig,
        /// NVIDIA's DCGM, a second opinion on GPUs.
        dcgm: DcgmConfig,
        /// What NVIDIA's resiliency extension (NVRx) is told of the node.
        nvrx: NvrxConfig,
        /// Checks before a start, in docs/reference/cli.md: mainstay check.
        preflight: PreflightConfig,
        /// Who is told of failures, decisions and ends of jobs: docs/reference/policy.md.
        hooks: HooksConfig,
        /// Replicas of checkpoints on other hosts: docs/reference/checkpoint-peers.md.
        checkpoint: CheckpointConfig,
        /// What is done about failures of jobs: docs/reference/policy-file.md.
        policy: PolicyConfig,
    }
}

settings! {
    /// How much of the journal is kept.
    pub struct JournalConfig {
        /// All segments together; the oldest are deleted beyond it.
        max_size: Bytes = Bytes(64 << 20),
        /// A segment that would grow beyond this is followed by a new one. At most half of max_size.
        segment_size: Bytes = Bytes(4 << 20),
    }
    sections {}
}

settings! {
    /// How the host is read.
    pub struct HostConfig {
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(5),
        /// File systems to watch, by any path on them, beside /, /run, /dev/shm, the state directory and the checkpoint
        /// directories of jobs.
        watch_paths: Vec<PathBuf> = Vec::new(),
        /// Where the host's procfs is mounted; another place in a container that has it there.
        proc_root: PathBuf = PathBuf::from("/proc"),
        /// Where the host's sysfs is mounted.
        sys_root: PathBuf = PathBuf::from("/sys"),
        /// The host's table of file systems.
        fstab: PathBuf = PathBuf::from("/etc/fstab"),
    }
    sections {
        /// When the host counts as degraded or unhealthy.
        limits: HostLimits,
        /// Processes, clocks, network mounts, services and the like: docs/reference/checks.md.
        system: SystemConfig,
    }
}

settings! {
    /// How the host's operating system is watched.
    pub struct SystemConfig {
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(10),
        /// Least time between two looks through all processes. There are fewer where there are very many processes, and
        /// on an idle host.
        scan_interval: Period = Period::seconds(30),
        /// Time from one question to a network file system to the next.
        mounts_interval: Period = Period::seconds(30),
        /// Network file systems that are not asked, by where they are mounted or a directory above that.
        exclude_mounts: Vec<PathBuf> = Vec::new(),
        /// Types of network file systems beside those that are known, like "fuse.myfs".
        file_systems: Vec<String> = Vec::new(),
        /// Services of systemd that matter. Those that are not installed are passed over.
        units: Vec<String> = DEFAULT_UNITS.iter().map(|unit| (*unit).to_owned()).collect(),
        /// The program that tells of services. Empty: systemctl, where systemd runs.
        systemctl: PathBuf = PathBuf::new(),
        /// The program that asks the host's management controller for power supplies and fans. Empty: ipmitool, where it is and
        /// the kernel has such a controller.
        ipmitool: PathBuf = PathBuf::new(),
        /// Kernel modules that must be loaded.
        modules: Vec<String> = Vec::new(),
    }
    sections {
        /// When the operating system counts as degraded or unhealthy.
        limits: SystemLimits,
    }
}

/// Services that GPUs and their networks need, and those by which work comes to the host.
const DEFAULT_UNITS: [&str; 11] = [
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
    "nvidia-imex.service",
    "nvidia-dcgm.service",
    "openibd.service",
    "opensm.service",
    "containerd.service",
    "crio.service",
    "docker.service",
    "kubelet.service",
    "slurmd.service",
];

settings! {
    /// How the kernel log is read.
    pub struct KernelLogConfig {
        /// The kernel log: /dev/kmsg, or a file or pipe in its place; "journald": systemd's journal. Empty: it is not read.
        path: PathBuf = PathBuf::from("/dev/kmsg"),
    }
    sections {
        /// What a storm of lines may cost.
        limits: LogLimits,
    }
}

settings! {
    /// The catalogue of what the kernel and the drivers say.
    pub struct CatalogConfig {
        /// Files whose entries replace those of the compiled-in catalogue that have the same id, or are added to it; the later
        /// weigh more. `mainstay explain` shows where an entry came from.
        files: Vec<PathBuf> = Vec::new(),
    }
    sections {}
}

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
    }
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

settings! {
    /// How NCCL's RAS service is asked.
    pub struct NcclConfig {
        /// Where it listens, as "host:port" (NCCL_RAS_ADDR of the job). It is asked only while a job runs on this host.
        /// Empty: it is not asked.
        address: String = "localhost:28028".to_owned(),
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

settings! {
    /// Checks before a start.
    pub struct PreflightConfig {
        /// Directories that active probes (--deep) write to and read back.
        paths: Vec<PathBuf> = Vec::new(),
        /// GPU memory in use from which a GPU that nobody works on is not free.
        gpu_memory_held: Bytes = Bytes(512 << 20),
    }
    sections {
        /// What active probes do, and what they call slow.
        deep: DeepLimits,
    }
}

/// What hooks can be told of.
const HOOKS_TELL: [&str; 3] = ["verdict", "decision", "job_ended"];

settings! {
    /// What is done about failures of jobs.
    pub struct PolicyConfig {
        /// A policy in Starlark for jobs of this host that name none (`mainstay run --policy`). Empty: the built-in policy.
        file: PathBuf = PathBuf::new(),
    }
    sections {}
}

settings! {
    /// Commands and webhooks that are told of jobs.
    pub struct HooksConfig {
        /// Shell commands, run as the agent's user; each gets the journal's entry as JSON on standard input.
        commands: Vec<String> = Vec::new(),
        /// Addresses like "http://host:port/path" to which the entry is posted.
        webhooks: Vec<String> = Vec::new(),
        /// Of what they are told: "verdict", "decision", "job_ended".
        on: Vec<String> = vec!["verdict".to_owned(), "decision".to_owned(), "job_ended".to_owned()],
        /// How long one try may take; a command is killed then.
        deadline: Period = Period::seconds(10),
        /// How often it is tried: a second after the first time, then two, four and so on.
        tries: u32 = 3,
    }
    sections {}
}

settings! {
    /// How checkpoints are replicated.
    pub struct CheckpointConfig {
        /// TCP address on which other agents reach this one, like "10.0.0.7:7140". Empty: no checkpoint is replicated.
        #[serde(with = "none_is_empty")]
        listen: Option<SocketAddr> = None,
        /// All agents that keep replicas for each other, as "host:port"; the same list on each host, this one included.
        peers: Vec<String> = Vec::new(),
        /// Which of peers is this agent. Empty: what listen says.
        name: String = String::new(),
        /// What fails together with this host: a rack, a power feed, an NVLink domain. Empty: only itself.
        domain: String = String::new(),
        /// Peers that keep this host's replicas only if no other can: neighbours in the pipeline.
        avoid: Vec<String> = Vec::new(),
        /// How many replicas each shard gets beside the copy of its own host.
        redundancy: u32 = 1,
        /// Whole steps of a run of which replicas are kept at least.
        keep: u32 = 2,
        /// Where replicas for others are kept: on a tmpfs for memory, else on a disk. Empty: replicas in the state directory.
        store: PathBuf = PathBuf::new(),
        /// Bytes of replicas at most.
        quota: Bytes = Bytes(64 << 30),
        /// The file with the secret that all agents of peers share; only its owner may read it.
        token_file: PathBuf = PathBuf::new(),
        /// Bytes a second for all that is sent to be kept by others; 0B: no limit. Restores are not limited.
        rate_limit: Bytes = Bytes(1 << 30),
        /// Connections for one shard, 1 to 4.
        streams: u32 = 2,
        /// Time from one look at directories and peers to the next; at least 100ms.
        interval: Period = Period::seconds(1),
        /// How long a peer may take to go on before another one is taken.
        stall: Period = Period::seconds(10),
        /// Storage that outlives the hosts, the same on each: "file:///shared/directory", "s3://bucket/prefix", "gs://bucket" or
        /// "az://container"; credentials come from the environment. Empty: none.
        durable: String = String::new(),
        /// The first step in so many training steps goes into durable storage; 1: each that can be kept up with.
        durable_every: u64 = 1,
        /// Whole steps of a run that are kept in durable storage; the newest is never deleted.
        durable_keep: u32 = 3,
        /// Bytes a second that this host sends to durable storage; 0B: no limit.
        durable_bandwidth: Bytes = Bytes(0),
    }
    sections {}
}

impl CheckpointConfig {
    /// What is wrong with it: the key, and how it should be.
    fn check(&self) -> Vec<(&'static str, &'static str)> {
        let mut wrong = Vec::new();
        let mut must = |right: bool, key, problem| {
            if !right {
                wrong.push((key, problem));
            }
        };
        let absolute = |path: &Path| path.as_os_str().is_empty() || path.is_absolute();
        must(absolute(&self.store), "checkpoint.store", "it must be an absolute path");
        must(absolute(&self.token_file), "checkpoint.token_file", "it must be an absolute path");
        must(
            self.listen.is_none() || !self.token_file.as_os_str().is_empty(),
            "checkpoint.token_file",
            "it must be set where checkpoint.listen is: nobody else may read and write checkpoints",
        );
        must(
            self.peers.iter().chain(&self.avoid).all(|peer| port_of(peer).is_some()),
            "checkpoint.peers",
            "each must be a host and a port, like \"node7:7140\"",
        );
        let anywhere = self.listen.is_some_and(|address| address.ip().is_unspecified());
        must(
            !anywhere || !self.name.is_empty(),
            "checkpoint.name",
            "it must be set where checkpoint.listen is every address",
        );
        must(self.redundancy <= 8, "checkpoint.redundancy", "it must be from 0 to 8");
        must(self.keep >= 1, "checkpoint.keep", "it must be at least 1");
        must(
            self.durable.is_empty() || self.durable.contains("://"),
            "checkpoint.durable",
            "it must be a URL, like \"file:///shared/directory\" or \"s3://bucket/prefix\"",
        );
        must(self.durable_every >= 1, "checkpoint.durable_every", "it must be at least 1");
        must(self.durable_keep >= 1, "checkpoint.durable_keep", "it must be at least 1");
        must((1..=4).contains(&self.streams), "checkpoint.streams", "it must be from 1 to 4");
        must(self.interval.0.0 >= 100_000_000, "checkpoint.interval", "it must be at least 100ms");
        wrong
    }
}

settings! {
    /// The doors for NVRx.
    pub struct NvrxConfig {
        /// The Unix socket on which NVRx's node health service is served, like "/run/nvhcd/nvhcd.sock", for
        /// ft_launcher --ft-node-health-check-endpoint. Every user may ask. Empty: none.
        health_socket: PathBuf = PathBuf::new(),
        /// Whether NVRx leaves out a node of which something cannot be told, beside one that is unhealthy.
        fail_on_unknown: bool = false,
        /// The shared directory of ft_launcher --ft-segment-health-check-dir: while the node is unhealthy, the Slurm jobs on
        /// it find a file there that leaves their segment out. Empty: none.
        segment_health_dir: PathBuf = PathBuf::new(),
    }
    sections {}
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What went wrong.
    Error,
    /// And what may go wrong.
    Warn,
    /// And what an operator wants to know.
    Info,
    /// And what a developer wants to know.
    Debug,
    /// Everything.
    Trace,
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> tracing::Level {
        match level {
            LogLevel::Error => tracing::Level::ERROR,
            LogLevel::Warn => tracing::Level::WARN,
            LogLevel::Info => tracing::Level::INFO,
            LogLevel::Debug => tracing::Level::DEBUG,
            LogLevel::Trace => tracing::Level::TRACE,
        }
    }
}

impl Config {
    /// The configuration from its file, the environment and `overrides` (keys as in `journal.max_size`, with their
    /// values as text), in rising weight.
    ///
    /// Without `file`, `MAINSTAY_AGENT_CONFIG` names it; without that, it is `environment.default_file` if it
    /// exists. State directory and socket are filled in where they are left to their rules.
    pub fn load(
        file: Option<&Path>,
        environment: &Environment,
        overrides: &[(String, String)],
    ) -> Result<Config, ConfigError> {
        let mut layers = Layers::new()?;
        if let Some((path, text)) = environment.config_file(file)? {
            layers.add_file(&path, &text);
        }
        layers.add_environment(&environment.variables);
        layers.add_overrides(overrides);
        let mut config = layers.finish(Config::check)?;
        environment.fill_in(&mut config);
        Ok(config)
    }

    /// The default configuration as a file with every key explained. Values stand in comments, so that a file that
    /// starts from it follows later defaults where nobody chose otherwise.
    pub fn commented_default() -> String {
        document::commented_default()
    }

    /// The journal's limits in the store's terms.
    pub fn journal_limits(&self) -> Limits {
        Limits { segment_bytes: self.journal.segment_size.0, total_bytes: self.journal.max_size.0 }
    }

    /// Where the host is read, in the source's terms.
    pub fn host_roots(&self) -> Roots {
        let HostConfig { proc_root, sys_root, fstab, .. } = &self.host;
        Roots { proc: proc_root.clone(), sys: sys_root.clone(), fstab: fstab.clone() }
    }

    /// How the operating system is read, by the probes of `program`.
    pub fn system_plan(&self, program: PathBuf) -> SystemPlan {
        let system = &self.host.system;
        let time = |period: Period| Duration::from_nanos(period.0.0);
        let named = |program: &PathBuf| (!program.as_os_str().is_empty()).then(|| program.clone());
        SystemPlan {
            roots: self.host_roots(),
            program,
            scan_every: time(system.scan_interval),
            ask_mounts_every: time(system.mounts_interval),
            mount_deadline: time(system.limits.mounts.deadline),
            exclude_mounts: system.exclude_mounts.clone(),
            file_systems: system.file_systems.clone(),
            systemctl: named(&system.systemctl),
            ipmitool: named(&system.ipmitool),
            units: system.units.clone(),
            modules: system.modules.clone(),
        }
    }

    /// Where the journal is.
    pub fn journal_dir(&self) -> PathBuf {
        self.state_dir.join("journal")
    }

    /// What no single value shows to be wrong: the key and what is wrong with it.
    fn check(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        let mut must = |right: bool, key, problem: &str| {
            if !right {
                problems.push((key, problem.to_owned()));
            }
        };
        let absolute = |path: &Path| path.as_os_str().is_empty() || path.is_absolute();
        must(absolute(&self.state_dir), "state_dir", "it must be an absolute path");
        must(absolute(&self.socket), "socket", "it must be an absolute path");
        // sun_path of sockaddr_un, with its terminating zero.
        must(self.socket.as_os_str().len() < 108, "socket", "the kernel allows at most 107 bytes");
        must(
            self.host.watch_paths.iter().all(|path| path.is_absolute()),
            "host.watch_paths",
            "all must be absolute paths",
        );
        must(
            self.journal.segment_size.0 <= self.journal.max_size.0 / 2,
            "journal.segment_size",
            "it must be at most half of journal.max_size",
        );
        must(self.journal.segment_size.0 >= 4096, "journal.segment_size", "it must be at least 4KiB");
        must(
            self.hooks.on.iter().all(|kind| HOOKS_TELL.contains(&kind.as_str())),
            "hooks.on",
            "it can have \"verdict\", \"decision\" and \"job_ended\"",
        );
        must(
            self.hooks.webhooks.iter().all(|address| address.starts_with("http://")),
            "hooks.webhooks",
            "they must begin with http://; for others use a command with curl",
        );
        must((1..=20).contains(&self.hooks.tries), "hooks.tries", "it must be between 1 and 20");
        must(self.hooks.deadline.0.0 > 0, "hooks.deadline", "it must be longer than nothing");
        must(
            absolute(&self.kernel_log.path) || self.kernel_log.path == Path::new(JOURNALD),
            "kernel_log.path",
            "it must be an absolute path or journald",
        );
        must(
            self.catalog.files.iter().all(|path| path.is_absolute()),
            "catalog.files",
            "all must be absolute paths",
        );
        must(absolute(&self.gpu.library), "gpu.library", "it must be an absolute path");
        must(absolute(&self.dcgm.library), "dcgm.library", "it must be an absolute path");
        must(self.dcgm.interval >= Period::seconds(1), "dcgm.interval", "it must be at least 1s");
        must(
            self.dcgm.exporter.is_empty() || self.dcgm.exporter.starts_with("http://"),
            "dcgm.exporter",
            "it must begin with http://",
        );
        must(
            self.preflight.paths.iter().all(|path| path.is_absolute()),
            "preflight.paths",
            "all must be absolute paths",
        );
        must(absolute(&self.nvrx.health_socket), "nvrx.health_socket", "it must be an absolute path");
        must(
            self.nvrx.health_socket.as_os_str().len() < 108,
            "nvrx.health_socket",
            "the kernel allows at most 107 bytes",
        );
        must(
            absolute(&self.nvrx.segment_health_dir),
            "nvrx.segment_health_dir",
            "it must be an absolute path",
        );
        must(self.gpu.interval >= Period::seconds(1), "gpu.interval", "it must be at least 1s");
        must(
            matches!(self.gpu.expected.mig.as_str(), "" | "on" | "off"),
            "gpu.expected.mig",
            "it must be \"on\", \"off\" or empty",
        );
        for (key, number) in [
            ("gpu.limits.nvlink_error_rate", self.gpu.limits.nvlink_error_rate),
            ("gpu.limits.pcie_replays", self.gpu.limits.pcie_replays),
        ] {
            must(number > 0.0 && number.is_finite(), key, "it must be above 0");
        }
        must(self.host.interval >= Period::seconds(1), "host.interval", "it must be at least 1s");
        must(
            self.host.system.interval >= Period::seconds(1),
            "host.system.interval",
            "it must be at least 1s",
        );
        must(self.tpu.interval >= Period::seconds(1), "tpu.interval", "it must be at least 1s");
        must(absolute(&self.tpu.log_dir), "tpu.log_dir", "it must be an absolute path");
        must(
            self.tpu.endpoints.iter().all(|endpoint| port_of(endpoint).is_some()),
            "tpu.endpoints",
            "each must be a host and a port, like \"localhost:8431\"",
        );
        must(
            !self.tpu.endpoints.iter().any(|endpoint| port_of(endpoint) == Some(FORBIDDEN_PORT)),
            "tpu.endpoints",
            "port 8353 must not be polled: that races with resets of the device",
        );
        must(port_of(&self.cloud.metadata).is_some(), "cloud.metadata", "it must be a host and a port");
        must(
            self.nccl.address.is_empty() || port_of(&self.nccl.address).is_some(),
            "nccl.address",
            "it must be a host and a port, like \"localhost:28028\"",
        );
        must(self.nccl.interval >= Period::seconds(5), "nccl.interval", "it must be at least 5s");
        must(self.fabric.interval >= Period::seconds(1), "fabric.interval", "it must be at least 1s");
        if let Err(problem) = self.fabric.expected() {
            must(false, "fabric.expected_ports", &problem);
        }
        // Nothing can be seen less than once.
        for (key, number) in [
            ("host.limits.worsen_after", u64::from(self.host.limits.worsen_after)),
            ("host.limits.recover_after", u64::from(self.host.limits.recover_after)),
            ("host.system.limits.corrected_errors", self.host.system.limits.corrected_errors),
            (
                "host.system.limits.processes.stuck_looks",
                self.host.system.limits.processes.stuck_looks.into(),
            ),
            ("host.system.limits.boot.boots", self.host.system.limits.boot.boots),
            ("host.system.limits.mounts.recover_after", self.host.system.limits.mounts.recover_after.into()),
            (
                "host.system.limits.services.failed_looks",
                self.host.system.limits.services.failed_looks.into(),
            ),
            ("host.system.limits.services.restarts", self.host.system.limits.services.restarts),
            ("kernel_log.limits.burst", self.kernel_log.limits.burst.into()),
            ("fabric.limits.flaps", self.fabric.limits.flaps),
            ("fabric.limits.learn_after", self.fabric.limits.learn_after.into()),
            ("fabric.limits.missing_after", self.fabric.limits.missing_after.into()),
            ("fabric.limits.slow_after", self.fabric.limits.slow_after.into()),
        ] {
            must(number >= 1, key, "it must be at least 1");
        }
        must(
            (1..=10).contains(&self.host.system.limits.speed.hot_minutes),
            "host.system.limits.speed.hot_minutes",
            "it must be from 1 to 10",
        );
        for (key, milder, worse, wrong) in [
            (
                "host.system.limits.tables.unhealthy",
                self.host.system.limits.tables.degraded,
                self.host.system.limits.tables.unhealthy,
                "it must be from host.system.limits.tables.degraded to 100",
            ),
            (
                "host.limits.memory.unhealthy_pressure",
                self.host.limits.memory.degraded_pressure,
                self.host.limits.memory.unhealthy_pressure,
                "it must be from host.limits.memory.degraded_pressure to 100",
            ),
            (
                "host.limits.disk.degraded_free",
                self.host.limits.disk.unhealthy_free,
                self.host.limits.disk.degraded_free,
                "it must be from host.limits.disk.unhealthy_free to 100",
            ),
        ] {
            must(milder <= worse, key, wrong);
        }
        for (key, problem) in self.checkpoint.check() {
            must(false, key, problem);
        }
        let load = self.host.limits.cpu.load_per_cpu;
        must(load > 0.0 && load.is_finite(), "host.limits.cpu.load_per_cpu", "it must be above 0");
        problems
    }
}

/// The port of a `host:port`.
fn port_of(endpoint: &str) -> Option<u16> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let port = port.parse().ok()?;
    (!host.is_empty() && !host.contains('/') && port != 0).then_some(port)
}

/// Addresses that may be left out are written as empty text: TOML has no null.
mod none_is_empty {
    use std::net::SocketAddr;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(address: &Option<SocketAddr>, s: S) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => s.collect_str(address),
            None => s.serialize_str(""),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
        let text = String::deserialize(d)?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|_| {
            D::Error::custom(format!(
                "{text:?} is no address: write an IP address and a port, like \"127.0.0.1:7130\" or \"[::1]:7130\""
            ))
        })
    }
}
