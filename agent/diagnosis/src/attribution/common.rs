//! Definitions that the build script and the program share.

/// The names of the classes, in the order of [`super::class::Class::ALL`].
pub const CLASS_NAMES: [&str; CLASSES] = [
    "user_code",
    "user_config",
    "data",
    "hardware_gpu",
    "hardware_host",
    "fabric",
    "storage",
    "host_resource",
    "preemption",
    "software_platform",
    "unknown",
];

/// How many classes there are.
pub const CLASSES: usize = 11;

/// Words that indicate structure rather than a signature.
pub const STRUCTURE: [&str; 15] = [
    "file \"",
    "error:",
    "exception:",
    "error\n",
    "exception\n",
    "interrupt",
    "exception group",
    "timeout:",
    "(local_rank:",
    "exception ignored in",
    "traceback (most recent",
    "loss",
    "it/s",
    "s/it",
    "xid",
];

/// The meaning of an XID's signature.
pub fn xid_meaning(code: u32, meaning: &str) -> String {
    format!("XID {code}: {meaning}")
}

/// A kernel log line with an XID.
pub fn xid_example(code: u32) -> String {
    format!("NVRM: Xid (PCI:0000:af:00): {code}, pid=1234, name=python")
}

/// The signature files, in the order in which they are read.
pub const FILE_NAMES: [&str; 22] = [
    "xid.toml",
    "gpu.toml",
    "cuda.toml",
    "nccl.toml",
    "fabric.toml",
    "torch.toml",
    "torch_ops.toml",
    "jax.toml",
    "frameworks.toml",
    "libraries.toml",
    "python.toml",
    "platform.toml",
    "data.toml",
    "storage.toml",
    "host.toml",
    "scheduler.toml",
    "slurm.toml",
    "kubernetes.toml",
    "remote.toml",
    "process.toml",
    "families.toml",
    "vocabulary.toml",
];
