//! The files of the catalog. The build script and the program share their names.

/// The signature files, in the order in which they are read.
pub const NAMES: [&str; 22] = [
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
