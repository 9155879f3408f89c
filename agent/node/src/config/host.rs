//! Keys of the host itself, and of the checks before a start.

use std::path::PathBuf;

use mainstay_model::settings;
use mainstay_model::units::Period;

settings! {
    /// How the host is read.
    pub struct HostConfig {
        /// Time from one reading to the next; at least 1s.
        interval: Period = Period::seconds(5),
        /// File systems to watch, by any path on them, in addition to /, /run, /dev/shm, the state directory and the checkpoint
        /// directories of jobs.
        watch_paths: Vec<PathBuf> = Vec::new(),
        /// Where the host's procfs is mounted; in a container this may be another path.
        proc_root: PathBuf = PathBuf::from("/proc"),
        /// Where the host's sysfs is mounted.
        sys_root: PathBuf = PathBuf::from("/sys"),
    }
    sections {
        /// Processes, clocks, network mounts, services and the like: docs/reference/checks.md.
        system: SystemConfig,
    }
}

settings! {
    /// How the host's operating system is monitored.
    pub struct SystemConfig {
        /// Time from one reading to the next; at least 1s. Scans of all processes and checks of network file systems are three
        /// times as far apart.
        interval: Period = Period::seconds(10),
        /// Network file systems that are not checked, by their mount point or a directory above it.
        exclude_mounts: Vec<PathBuf> = Vec::new(),
        /// Additional types of network file systems, such as "fuse.myfs".
        file_systems: Vec<String> = Vec::new(),
        /// systemd services to watch. Services that are not installed are skipped.
        units: Vec<String> = DEFAULT_UNITS.iter().map(|unit| (*unit).to_owned()).collect(),
        /// Kernel modules that must be loaded.
        modules: Vec<String> = Vec::new(),
    }
    sections {}
}

/// Services that GPUs and their networks need, and those that start work on the host.
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
    sections {}
}

settings! {
    /// The catalog of messages of the kernel and the drivers.
    pub struct CatalogConfig {
        /// Files whose entries replace entries of the built-in catalog with the same id, or are added to it; later files take
        /// precedence. `mainstay explain` shows which file an entry came from.
        files: Vec<PathBuf> = Vec::new(),
    }
    sections {}
}

settings! {
    /// Checks before a start.
    pub struct PreflightConfig {
        /// Directories that active probes (--deep) write to and read back.
        paths: Vec<PathBuf> = Vec::new(),
    }
    sections {}
}

settings! {
    /// The interfaces for NVRx.
    pub struct NvrxConfig {
        /// The Unix socket on which NVRx's node health service is served, like "/run/nvhcd/nvhcd.sock", for
        /// ft_launcher --ft-node-health-check-endpoint. Every user may ask. Empty: none.
        health_socket: PathBuf = PathBuf::new(),
        /// Whether NVRx leaves out a node with an unknown state, in addition to an unhealthy one.
        fail_on_unknown: bool = false,
        /// The shared directory of ft_launcher --ft-segment-health-check-dir: while the node is unhealthy, it has a file that
        /// makes the Slurm jobs on the node leave their segment out. Empty: none.
        segment_health_dir: PathBuf = PathBuf::new(),
    }
    sections {}
}
