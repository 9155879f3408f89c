//! What each component of a host is, and where its checks are documented.

/// One component, or all components whose names start with a prefix.
pub(super) struct ComponentHelp {
    /// Its name, or the prefix of the names (with `*` at the end).
    name: &'static str,
    pub(super) what: &'static str,
    /// The document and its section.
    pub(super) documented: (&'static str, &'static str),
}

const CHECKS: &str = "docs/reference/checks.md";
const CONFIGURATION: &str = "docs/reference/configuration.md";

const LOG: (&str, &str) = (CHECKS, "The kernel log");
const KERNEL_LINES_HELP: (&str, &str) = (CHECKS, "The host");
const SYSTEM: (&str, &str) = (CHECKS, "The operating system");
const LOAD: (&str, &str) = (CONFIGURATION, "How the host is judged");
const NVML: (&str, &str) = (CHECKS, "GPUs by the driver: NVML");

/// The longest match counts.
pub(super) const COMPONENTS: [ComponentHelp; 38] = [
    known(
        "gpu.*",
        "A GPU, named by its PCI address: readings of the driver and reports in the kernel log.",
        NVML,
    ),
    known("gpu.driver", "The NVIDIA driver, and the number of GPUs that it lists.", NVML),
    known(
        "gpu.power",
        "The power brake of the node or the rack, which slows down several GPUs at once.",
        NVML,
    ),
    known("nvlink.*", "An NVLink of a GPU that has or had a fault.", NVML),
    known(
        "nvswitch.*",
        "An NVSwitch, by its entries in the kernel log.",
        (CHECKS, "Switches: `nvswitch.<PCI address>`"),
    ),
    known("host.kernel_log", "Whether the kernel log can be read.", LOG),
    known("host.gpu", "Kernel log entries about a GPU that do not name the GPU.", KERNEL_LINES_HELP),
    known("host.pcie", "PCIe errors in the kernel log.", KERNEL_LINES_HELP),
    known("host.hardware", "Memory, CPU and temperature errors in the kernel log.", KERNEL_LINES_HELP),
    known("host.kernel", "The kernel: stuck tasks and kernel faults.", KERNEL_LINES_HELP),
    known("host.storage", "Local disks and file systems, by the kernel log.", KERNEL_LINES_HELP),
    known("host.network_storage", "Network file systems, by the kernel log.", KERNEL_LINES_HELP),
    known("host.network_card", "Network cards, by the kernel log.", KERNEL_LINES_HELP),
    known("host.cpu", "CPU load, and the CPU time that other virtual machines took (steal).", LOAD),
    known("host.memory", "Memory pressure: whether processes wait for memory.", LOAD),
    known("host.disk", "Free space of the file systems that jobs and the agent use.", LOAD),
    known("host.oom", "OOM kills.", LOAD),
    known("host.processes", "Stuck processes, zombies, and the number of processes.", SYSTEM),
    known("host.tasks", "The number of tasks and its limit.", SYSTEM),
    known("host.files", "The number of open files and its limit.", SYSTEM),
    known("host.clock", "Whether the clock is correct and synchronized.", SYSTEM),
    known("host.boot", "How often the host was booted.", SYSTEM),
    known("host.mounts", "Whether network file systems answer.", SYSTEM),
    known("host.services", "systemd services that training needs.", SYSTEM),
    known("host.chassis", "Power supplies, fans and sensors, by the management controller.", SYSTEM),
    known("host.modules", "Kernel modules and devices that training needs.", SYSTEM),
    known("host.memory_errors", "Errors of memory modules, by the kernel's EDAC counters.", SYSTEM),
    known("host.cpu_speed", "Whether heat or a setting slows the CPUs down.", SYSTEM),
    known(
        "host.pcie_switches",
        "Whether PCIe switches forward traffic between GPUs and network cards directly.",
        SYSTEM,
    ),
    known("host.cloud", "Announcements of the cloud for this machine.", (CHECKS, "The cloud: `host.cloud`")),
    known("tpu.*", "A TPU chip of this host.", (CHECKS, "TPUs")),
    known("tpu.runtime", "libtpu's metrics service in the process that holds the chips.", (CHECKS, "TPUs")),
    known("nccl", "The communicators of the job, by NCCL's own RAS service.", (CHECKS, "NCCL: `nccl`")),
    known("fabric", "Whether all expected network links exist.", (CHECKS, "The network")),
    known("fabric.*", "A port of a network card (InfiniBand, RoCE).", (CHECKS, "The network")),
    known("net.*", "An Ethernet interface that the agent watches.", (CHECKS, "The network")),
    known("dcgm", "NVIDIA's DCGM, a second opinion on GPUs.", (CHECKS, "DCGM: `dcgm`, `dcgm.exporter`")),
    known(
        "dcgm.*",
        "DCGM's reports of GPUs whose PCI address is unknown, and its exporter.",
        (CHECKS, "DCGM: `dcgm`, `dcgm.exporter`"),
    ),
];

const fn known(
    name: &'static str,
    what: &'static str,
    documented: (&'static str, &'static str),
) -> ComponentHelp {
    ComponentHelp { name, what, documented }
}

impl ComponentHelp {
    /// Its name, or the prefix of the names (with `*` at the end).
    #[cfg(test)]
    pub(super) fn name(&self) -> &'static str {
        self.name
    }
}

/// The description of a component with that name.
pub(super) fn find(component: &str) -> Option<&'static ComponentHelp> {
    let fits = |known: &&ComponentHelp| match known.name.strip_suffix('*') {
        Some(beginning) => component.starts_with(beginning),
        None => component == known.name,
    };
    COMPONENTS.iter().filter(fits).max_by_key(|known| (!known.name.ends_with('*'), known.name.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_component_is_documented_in_its_section() {
        let documents = [
            (CHECKS, include_str!("../../../../docs/reference/checks.md")),
            (CONFIGURATION, include_str!("../../../../docs/reference/configuration.md")),
        ];
        for known in &COMPONENTS {
            let (document, section) = known.documented;
            let text = documents.iter().find(|(name, _)| *name == document).unwrap().1;
            let is_heading =
                |line: &str| line.trim_start_matches('#').trim() == section && line.starts_with('#');
            assert!(text.lines().any(is_heading), "{}: {document} has no section {section:?}", known.name);
        }
    }

    #[test]
    fn every_component_that_the_reference_names_is_known() {
        let reference = include_str!("../../../../docs/reference/checks.md");
        let mut count = 0;
        for name in reference.split('`').skip(1).step_by(2) {
            let name = name.split('<').next().unwrap_or(name);
            // Keys of the configuration start in the same way.
            let is_key = name.matches('.').count() > 1
                || [
                    "interval",
                    "library",
                    "exporter",
                    "mode",
                    "address",
                    "policies",
                    "exclude",
                    "endpoints",
                    "log_dir",
                    "metadata",
                    "provider",
                    "expected_ports",
                    "json",
                    "sys_root",
                ]
                .iter()
                .any(|key| name.ends_with(&format!(".{key}")));
            let is_component = ["host.", "gpu.", "nvlink.", "nvswitch.", "tpu.", "fabric.", "net.", "dcgm."]
                .iter()
                .any(|of| name.starts_with(of));
            if is_component && !is_key {
                count += 1;
                assert!(find(name).is_some(), "{name}");
            }
        }
        assert!(count > 20, "{count}");
    }

    #[test]
    fn the_nearest_name_counts() {
        assert!(find("gpu.driver").unwrap().what.contains("NVIDIA driver"));
        assert!(find("gpu.0000:3b:00").unwrap().what.contains("PCI address"));
        assert!(find("tpu.runtime").unwrap().what.contains("metrics service"));
        assert!(find("fabric").unwrap().what.contains("network links"));
        assert!(find("fabric.mlx5_0/1").unwrap().what.contains("port"));
        assert!(find("something").is_none());
    }
}
