//! Keys of earlier versions: what replaces each.

use super::Key;

/// What replaces a key that no longer exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Instead {
    /// Another key.
    Key(String),
    /// A value that cannot be configured.
    Fixed(&'static str),
}

/// Keys that have moved: the beginning of their former names, and of their names now.
const MOVED: [(&str, &str); 20] = [
    ("host.limits.", "limits.host."),
    ("host.system.limits.corrected_errors", "limits.host.memory_errors.corrected_errors"),
    ("host.system.limits.redirecting_switches", "limits.host.pcie_switches.redirecting_switches"),
    ("host.system.limits.tables.", "limits.host.files."),
    ("host.system.limits.speed.", "limits.host.cpu_speed."),
    ("host.system.limits.", "limits.host."),
    ("gpu.limits.", "limits.gpu."),
    ("gpu.deadline", "limits.gpu.deadline"),
    ("tpu.limits.", "limits.tpu."),
    ("cloud.limits.", "limits.host.cloud."),
    ("nccl.limits.", "limits.nccl."),
    ("fabric.limits.", "limits.fabric."),
    ("preflight.deep.", "limits.preflight."),
    ("preflight.gpu_memory_held", "limits.preflight.gpu_memory_held"),
    ("tls_certificate", "tls"),
    ("tls_key", "tls"),
    ("tls_authorities", "tls"),
    ("checkpoint.tls_certificate", "checkpoint.tls"),
    ("checkpoint.tls_key", "checkpoint.tls"),
    ("checkpoint.tls_authorities", "checkpoint.tls"),
];

/// Keys that have become constants, and their values.
const FIXED: [(&str, &str); 54] = [
    ("journal.segment_size", "4MiB, and at most a quarter of journal.max_size"),
    ("host.fstab", "/etc/fstab, or with another host.proc_root 1/root/etc/fstab in it"),
    ("host.limits.worsen_after", "3"),
    ("host.limits.recover_after", "6"),
    ("host.limits.margin", "10"),
    ("host.system.scan_interval", "three times host.system.interval"),
    ("host.system.mounts_interval", "three times host.system.interval"),
    ("host.system.systemctl", "systemctl from PATH"),
    ("host.system.ipmitool", "ipmitool from PATH"),
    ("host.system.limits.sensor_looks", "2"),
    ("host.system.limits.processes.stuck_looks", "3"),
    ("host.system.limits.processes.zombie_share", "20"),
    ("host.system.limits.clock.jump_window", "10m"),
    ("host.system.limits.clock.boot_grace", "10m"),
    ("host.system.limits.mounts.recover_after", "2"),
    ("host.system.limits.services.failed_looks", "2"),
    ("kernel_log.limits.burst", "20"),
    ("kernel_log.limits.every", "10s"),
    ("gpu.details_interval", "1m"),
    ("gpu.limits.echo_window", "1m"),
    ("gpu.limits.passing", "10m"),
    ("gpu.limits.repeats_window", "1d"),
    ("gpu.limits.unknown_codes", "3"),
    ("gpu.limits.worsen_after", "3"),
    ("gpu.limits.recover_after", "3"),
    ("gpu.limits.taken_back_below", "50"),
    ("gpu.limits.cooler_by", "3"),
    ("gpu.limits.stale_after", "1m"),
    ("gpu.limits.pcie_load", "50"),
    ("gpu.limits.sibling_readings", "30"),
    ("gpu.limits.nvlink_window", "5m"),
    ("gpu.limits.nvlink_failed_for", "1h"),
    ("gpu.limits.unhealed_after", "1h"),
    ("gpu.limits.remembered", "7d"),
    ("gpu.limits.link_burst", "1m"),
    ("gpu.limits.event_window", "5s"),
    ("gpu.limits.line_wait", "1s"),
    ("gpu.limits.fabric_grace", "5m"),
    ("tpu.deadline", "2s"),
    ("tpu.limits.driver_trouble", "10m"),
    ("cloud.limits.silent_for", "2m"),
    ("nccl.deadline", "15s"),
    ("nccl.limits.forget_after", "5m"),
    ("fabric.limits.missing_after", "3"),
    ("fabric.limits.slow_after", "3"),
    ("fabric.limits.together", "30s"),
    ("fabric.limits.errors.damage_window", "1h"),
    ("fabric.limits.errors.recovery_window", "10m"),
    ("fabric.limits.errors.packet_window", "5m"),
    ("dcgm.deadline", "10s"),
    ("preflight.deep.storage_size", "64MiB"),
    ("hooks.tries", "3"),
    ("checkpoint.streams", "2"),
    ("checkpoint.stall", "10s"),
];

/// All keys that no longer exist, each with what replaces it.
pub(super) fn former(keys: &[Key]) -> Vec<(String, Instead)> {
    let moved = MOVED.iter().flat_map(|(before, now)| {
        let moved_key = |key: &Key| {
            let rest = key.name.strip_prefix(now)?;
            let part = before.ends_with('.') || rest.is_empty();
            part.then(|| (format!("{before}{rest}"), Instead::Key(key.name.clone())))
        };
        keys.iter().filter_map(moved_key).collect::<Vec<_>>()
    });
    let fixed = FIXED.iter().map(|(name, value)| ((*name).to_owned(), Instead::Fixed(value)));
    fixed.chain(moved).collect()
}
