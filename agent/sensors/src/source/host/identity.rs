//! The host's identity, read once.

use sysinfo::System;

/// The host's name and system. Unknown values are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostIdentity {
    /// Its host name.
    pub host_name: Option<String>,
    /// The kernel's version: `6.8.0-45-generic`.
    pub kernel: Option<String>,
    /// The distribution: `Linux (Debian GNU/Linux 12)`.
    pub os: Option<String>,
    /// The CPU's architecture: `x86_64`.
    pub architecture: String,
}

/// Reads the host's identity, but no processes and no disks.
pub fn identify() -> HostIdentity {
    // The host name of a pod is the pod's; manifests set this variable from `spec.nodeName`.
    let node_name = std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
    HostIdentity {
        host_name: node_name.or_else(|| System::host_name().ok()),
        kernel: System::kernel_version().ok(),
        os: System::long_os_version().ok(),
        architecture: System::cpu_arch(),
    }
}
