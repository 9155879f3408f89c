//! Configuration: defaults, then the file, then `MAINSTAY_AGENT_*`, then flags; later ones take
//! precedence.
//!
//! One declaration of each key gives its type, default and documentation; tests compare the commented default file
//! and `docs/reference/configuration.md` with it. A wrong configuration is refused as a whole. The error lists
//! every problem: its place, the wrong value and what would be right.

mod checks;
mod devices;
mod document;
mod error;
mod files;
mod former;
mod host;
mod jobs;
mod layers;
mod limits;
mod none_is_empty;
mod paths;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_model::settings;
use mainstay_model::units::Period;
use serde::{Deserialize, Serialize};

pub use devices::{
    CloudConfig, CloudProvider, DcgmConfig, DcgmMode, FabricConfig, GpuConfig, NcclConfig, ResetConfig,
    TpuConfig,
};
pub use document::{Key, environment_name, keys, reference_rows};
pub use error::{ConfigError, Origin, Problem};
pub use files::{CacheConfig, CacheTable, WatchConfig, WatchTable};
pub use host::{CatalogConfig, HostConfig, KernelLogConfig, NvrxConfig, PreflightConfig, SystemConfig};
pub use jobs::{CheckpointConfig, HooksConfig, JournalConfig, PolicyConfig};
pub use limits::Limits;
pub use paths::Environment;

use layers::Layers;

use mainstay_journal::store::journal::Limits as JournalLimits;
use mainstay_sensors::source::host::{Roots, SystemPlan};

/// Size limit of a segment of the journal.
const MAX_SEGMENT_BYTES: u64 = 4 << 20;

settings! {
    /// The agent's configuration.
    pub struct Config {
        /// Where the agent keeps its journal and other state. Empty: $STATE_DIRECTORY, which systemd sets
        /// (/var/lib/mainstay in the shipped unit); without it /var/lib/mainstay as root, else
        /// $XDG_STATE_HOME/mainstay or ~/.local/state/mainstay.
        state_dir: PathBuf = PathBuf::new(),
        /// The Unix socket on which the agent serves launchers and clients. Empty: $RUNTIME_DIRECTORY/agent.sock, which
        /// systemd sets (/run/mainstay/agent.sock in the shipped unit); without it /run/mainstay/agent.sock as root, else
        /// $XDG_RUNTIME_DIR/mainstay/agent.sock or /tmp/mainstay-<uid>/agent.sock.
        socket: PathBuf = PathBuf::new(),
        /// TCP address on which the gRPC API is served in addition to the socket, such as "127.0.0.1:7130". Empty: none. Other
        /// than loopback it needs tls, or plain_tcp.
        #[serde(with = "none_is_empty")]
        listen: Option<SocketAddr> = None,
        /// TCP address on which HTTP is served (/metrics, /healthz, /readyz, the page at /, JSON in /v1), such as "127.0.0.1:7131". Empty: none.
        /// Other than loopback it needs tls, or plain_tcp.
        #[serde(with = "none_is_empty")]
        http: Option<SocketAddr> = None,
        /// The directory for TLS on listen and http, with PEM files as `mainstay certs` and cert-manager make them: tls.crt (the
        /// certificate and the intermediate ones), tls.key (without a password; only its owner may read it) and ca.crt (one of its
        /// certificates must have signed a caller's). Replaced files are read again. Empty: no TLS.
        tls: PathBuf = PathBuf::new(),
        /// Whether listen and http may be other addresses than loopback without TLS: everyone who reaches them can read health,
        /// metrics and numbers of jobs. For networks that admit only callers you trust.
        plain_tcp: bool = false,
        /// The only group that may connect to the socket: a numeric id. Empty (-1): every user may.
        socket_gid: i64 = -1,
        /// Operators in addition to root and the agent's own user: numeric ids. They may delete and collect checkpoints of all
        /// users, and acknowledge, silence and reset components.
        operator_uids: Vec<u32> = Vec::new(),
        /// Groups whose members are operators: numeric ids.
        operator_gids: Vec<u32> = Vec::new(),
        /// Users whose launchers may attach, in addition to root and the agent's own user and group: numeric ids. They see and
        /// change their own runs. If neither users nor groups are named, every user's may.
        allow_uids: Vec<u32> = Vec::new(),
        /// Groups whose members' launchers may attach: numeric ids. See allow_uids.
        allow_gids: Vec<u32> = Vec::new(),
        /// Who may read the output, command lines and paths of jobs: "owner" (the job's user and operators, on the Unix socket)
        /// or "everyone" who can connect. All else is for everyone who can connect.
        job_texts: JobTexts = JobTexts::Owner,
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
        /// What the agent reports about the node to NVIDIA's resiliency extension (NVRx).
        nvrx: NvrxConfig,
        /// Checks before a start, in docs/reference/cli.md: mainstay check.
        preflight: PreflightConfig,
        /// Who receives failures, decisions and ends of jobs: docs/reference/policy.md.
        hooks: HooksConfig,
        /// Replicas of checkpoints on other hosts: docs/reference/checkpoint-peers.md.
        checkpoint: CheckpointConfig,
        /// What is done about failures of jobs: docs/reference/policy-file.md.
        policy: PolicyConfig,
        /// When checks call a component degraded or unhealthy: overrides of any check's limits, by its name.
        limits: Limits,
    }
}

/// Who may read what the programs of jobs wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobTexts {
    /// The job's user, and operators.
    Owner,
    /// Everyone who can connect.
    Everyone,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Errors.
    Error,
    /// Also what may go wrong.
    Warn,
    /// Also what an operator wants to know.
    Info,
    /// Also what a developer wants to know.
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
    /// Loads the configuration from its file, the environment and `overrides` (keys such as `journal.max_size`,
    /// with their values as text), in rising precedence.
    ///
    /// Without `file`, `MAINSTAY_AGENT_CONFIG` names it; without that, it is `agent.toml` in
    /// `CONFIGURATION_DIRECTORY`, which systemd sets, or `environment.default_file`, if one of them exists. State
    /// directory and socket are filled in where they are empty.
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

    /// The default configuration as a file with every key explained. Values are commented out, so a file that
    /// starts from it follows later defaults wherever the user did not choose a value.
    pub fn commented_default() -> String {
        document::commented_default()
    }

    /// The journal's limits as the store's type.
    pub fn journal_limits(&self) -> JournalLimits {
        let total_bytes = self.journal.max_size.0;
        JournalLimits { segment_bytes: (total_bytes / 4).min(MAX_SEGMENT_BYTES), total_bytes }
    }

    /// Where the host is read, as the source's type.
    pub fn host_roots(&self) -> Roots {
        let HostConfig { proc_root, sys_root, .. } = &self.host;
        // In a container, the host's own is below the root of its first process.
        let own = proc_root == Path::new("/proc");
        let fstab = if own { "/etc/fstab".into() } else { proc_root.join("1/root/etc/fstab") };
        Roots { proc: proc_root.clone(), sys: sys_root.clone(), fstab }
    }

    /// How the operating system is read, with probes that run `program`.
    pub fn system_plan(&self, program: PathBuf) -> SystemPlan {
        let system = &self.host.system;
        let time = |period: Period| Duration::from_nanos(period.0.0);
        let every = time(system.interval).saturating_mul(3);
        SystemPlan {
            roots: self.host_roots(),
            program,
            scan_every: every,
            ask_mounts_every: every,
            mount_deadline: time(self.limits.host.mounts.deadline),
            exclude_mounts: system.exclude_mounts.clone(),
            file_systems: system.file_systems.clone(),
            systemctl: None,
            ipmitool: None,
            units: system.units.clone(),
            modules: system.modules.clone(),
        }
    }

    /// Where the journal is.
    pub fn journal_dir(&self) -> PathBuf {
        self.state_dir.join("journal")
    }
}
