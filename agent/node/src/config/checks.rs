//! Checks that involve several values of a configuration, or more than their types.

use std::collections::BTreeSet;
use std::path::Path;

use mainstay_checkpoint::parity::{NoParity, Parity};
use mainstay_model::units::Period;

use super::{CheckpointConfig, Config, Limits};
use crate::hook::{HookFormat, KINDS, UNIX};
use mainstay_sensors::source::journald::JOURNALD;
use mainstay_sensors::source::tpu::FORBIDDEN_PORT;

/// The problems found: the key, and how its value should be.
#[derive(Debug, Default)]
struct Wrong(Vec<(&'static str, String)>);

impl Wrong {
    fn must(&mut self, right: bool, key: &'static str, problem: &str) {
        if !right {
            self.0.push((key, problem.to_owned()));
        }
    }
}

impl Config {
    /// Checks what no single value shows: returns each wrong key and what is wrong with it.
    pub(super) fn check(&self) -> Vec<(&'static str, String)> {
        let mut wrong = Wrong::default();
        self.check_places(&mut wrong);
        self.check_tcp(&mut wrong);
        self.check_host(&mut wrong);
        self.check_devices(&mut wrong);
        self.check_counts(&mut wrong);
        self.check_jobs(&mut wrong);
        self.check_checkpoints(&mut wrong);
        wrong.0
    }

    /// Listeners of the network.
    fn check_tcp(&self, wrong: &mut Wrong) {
        wrong.must(is_absolute(&self.tls), "tls", "it must be an absolute path");
        let is_tls = !self.tls.as_os_str().is_empty();
        for (key, address) in [("listen", self.listen), ("http", self.http)] {
            let is_open = address.is_some_and(|address| !address.ip().to_canonical().is_loopback());
            wrong.must(
                !is_open || is_tls || self.plain_tcp,
                key,
                "without TLS it must be a loopback address, such as 127.0.0.1: set tls to a directory \
                 (`mainstay certs init /etc/mainstay/certs` and `mainstay certs issue /etc/mainstay/certs HOST` make one), \
                 or plain_tcp = true if everyone who reaches it may read",
            );
        }
    }

    /// Directories, sockets and files.
    fn check_places(&self, wrong: &mut Wrong) {
        wrong.must(is_absolute(&self.state_dir), "state_dir", "it must be an absolute path");
        wrong.must(is_absolute(&self.socket), "socket", "it must be an absolute path");
        // sun_path of sockaddr_un, with its terminating zero.
        wrong.must(self.socket.as_os_str().len() < 108, "socket", "the kernel allows at most 107 bytes");
        wrong.must(
            self.preflight.paths.iter().all(|path| path.is_absolute()),
            "preflight.paths",
            "all must be absolute paths",
        );
        wrong.must(
            is_absolute(&self.nvrx.health_socket),
            "nvrx.health_socket",
            "it must be an absolute path",
        );
        wrong.must(
            self.nvrx.health_socket.as_os_str().len() < 108,
            "nvrx.health_socket",
            "the kernel allows at most 107 bytes",
        );
        wrong.must(
            is_absolute(&self.nvrx.segment_health_dir),
            "nvrx.segment_health_dir",
            "it must be an absolute path",
        );
        wrong.must(
            is_absolute(&self.kernel_log.path) || self.kernel_log.path == Path::new(JOURNALD),
            "kernel_log.path",
            "it must be an absolute path or journald",
        );
        wrong.must(
            self.catalog.files.iter().all(|path| path.is_absolute()),
            "catalog.files",
            "all must be absolute paths",
        );
    }

    /// The host and its operating system.
    fn check_host(&self, wrong: &mut Wrong) {
        wrong.must(
            self.host.watch_paths.iter().all(|path| path.is_absolute()),
            "host.watch_paths",
            "all must be absolute paths",
        );
        wrong.must(self.host.interval >= Period::seconds(1), "host.interval", "it must be at least 1s");
        wrong.must(
            self.host.system.interval >= Period::seconds(1),
            "host.system.interval",
            "it must be at least 1s",
        );
        wrong.must(
            (1..=10).contains(&self.limits.host.cpu_speed.hot_minutes),
            "limits.host.cpu_speed.hot_minutes",
            "it must be from 1 to 10",
        );
        for (key, milder, worse, problem) in [
            (
                "limits.host.files.unhealthy",
                self.limits.host.files.degraded,
                self.limits.host.files.unhealthy,
                "it must be from limits.host.files.degraded to 100",
            ),
            (
                "limits.host.memory.unhealthy_pressure",
                self.limits.host.memory.degraded_pressure,
                self.limits.host.memory.unhealthy_pressure,
                "it must be from limits.host.memory.degraded_pressure to 100",
            ),
            (
                "limits.host.disk.degraded_free",
                self.limits.host.disk.unhealthy_free,
                self.limits.host.disk.degraded_free,
                "it must be from limits.host.disk.unhealthy_free to 100",
            ),
        ] {
            wrong.must(milder <= worse, key, problem);
        }
        let load = self.limits.host.cpu.load_per_cpu;
        wrong.must(load > 0.0 && load.is_finite(), "limits.host.cpu.load_per_cpu", "it must be above 0");
    }

    /// Accelerators, the network, the cloud.
    fn check_devices(&self, wrong: &mut Wrong) {
        wrong.must(is_absolute(&self.gpu.library), "gpu.library", "it must be an absolute path");
        let program = &self.gpu.reset.program;
        wrong.must(is_absolute(program), "gpu.reset.program", "it must be an absolute path");
        wrong.must(is_absolute(&self.dcgm.library), "dcgm.library", "it must be an absolute path");
        wrong.must(self.dcgm.interval >= Period::seconds(1), "dcgm.interval", "it must be at least 1s");
        wrong.must(
            self.dcgm.exporter.is_empty() || self.dcgm.exporter.starts_with("http://"),
            "dcgm.exporter",
            "it must begin with http://",
        );
        wrong.must(self.gpu.interval >= Period::seconds(1), "gpu.interval", "it must be at least 1s");
        wrong.must(
            matches!(self.gpu.expected.mig.as_str(), "" | "on" | "off"),
            "gpu.expected.mig",
            "it must be \"on\", \"off\" or empty",
        );
        for (key, number) in [
            ("limits.gpu.nvlink_error_rate", self.limits.gpu.nvlink_error_rate),
            ("limits.gpu.pcie_replays", self.limits.gpu.pcie_replays),
        ] {
            wrong.must(number > 0.0 && number.is_finite(), key, "it must be above 0");
        }
        wrong.must(self.tpu.interval >= Period::seconds(1), "tpu.interval", "it must be at least 1s");
        wrong.must(is_absolute(&self.tpu.log_dir), "tpu.log_dir", "it must be an absolute path");
        wrong.must(
            self.tpu.endpoints.iter().all(|endpoint| port_of(endpoint).is_some()),
            "tpu.endpoints",
            "each must be a host and a port, like \"localhost:8431\"",
        );
        wrong.must(
            !self.tpu.endpoints.iter().any(|endpoint| port_of(endpoint) == Some(FORBIDDEN_PORT)),
            "tpu.endpoints",
            "port 8353 must not be polled: that races with resets of the device",
        );
        wrong.must(port_of(&self.cloud.metadata).is_some(), "cloud.metadata", "it must be a host and a port");
        wrong.must(
            self.nccl.address.is_empty() || port_of(&self.nccl.address).is_some(),
            "nccl.address",
            "it must be a host and a port, like \"localhost:28028\"",
        );
        wrong.must(self.nccl.interval >= Period::seconds(5), "nccl.interval", "it must be at least 5s");
        wrong.must(self.fabric.interval >= Period::seconds(1), "fabric.interval", "it must be at least 1s");
        if let Err(problem) = self.fabric.expected() {
            wrong.must(false, "fabric.expected_ports", &problem);
        }
    }

    /// Counts are at least 1.
    fn check_counts(&self, wrong: &mut Wrong) {
        let Limits { host, fabric, .. } = &self.limits;
        for (key, number) in [
            ("limits.host.memory_errors.corrected_errors", host.memory_errors.corrected_errors),
            ("limits.host.boot.boots", host.boot.boots),
            ("limits.host.services.restarts", host.services.restarts),
            ("limits.fabric.flaps", fabric.flaps),
            ("limits.fabric.learn_after", fabric.learn_after.into()),
        ] {
            wrong.must(number >= 1, key, "it must be at least 1");
        }
    }

    /// The journal, and hooks.
    fn check_jobs(&self, wrong: &mut Wrong) {
        wrong.must(self.journal.max_size.0 >= 16 << 10, "journal.max_size", "it must be at least 16KiB");
        wrong.must(
            self.hooks.on.iter().all(|kind| KINDS.contains(&kind.as_str())),
            "hooks.on",
            "it can have \"verdict\", \"decision\", \"job_ended\", \"finding\" and \"health\"",
        );
        let starts = |with: &[&str]| {
            self.hooks.webhooks.iter().all(|address| with.iter().any(|with| address.starts_with(with)))
        };
        let is_nvsentinel = self.hooks.format.strategy().is_some();
        wrong.must(
            is_nvsentinel || starts(&["http://", "https://"]),
            "hooks.webhooks",
            "they must begin with https:// or http://; for others use a command",
        );
        wrong.must(
            !is_nvsentinel || starts(&[UNIX]),
            "hooks.webhooks",
            "they must begin with unix:///, like \"unix:///var/run/nvsentinel.sock\", since hooks.format is for NVSentinel",
        );
        wrong.must(
            !is_nvsentinel || self.hooks.on.iter().any(|kind| kind == "health"),
            "hooks.on",
            "it must have \"health\", since NVSentinel receives nothing else",
        );
        wrong.must(is_absolute(&self.hooks.authorities), "hooks.authorities", "it must be an absolute path");
        wrong.must(
            self.hooks.format != HookFormat::PagerDuty
                || self.hooks.webhooks.iter().all(|of| of.contains('#')),
            "hooks.webhooks",
            "each must end with # and the integration key, since hooks.format is \"pagerduty\"",
        );
        wrong.must(self.hooks.deadline.0.0 > 0, "hooks.deadline", "it must be above 0");
    }

    /// Replicas of checkpoints.
    fn check_checkpoints(&self, wrong: &mut Wrong) {
        let keys = &self.checkpoint;
        wrong.must(is_absolute(&keys.store), "checkpoint.store", "it must be an absolute path");
        wrong.must(is_absolute(&keys.token_file), "checkpoint.token_file", "it must be an absolute path");
        wrong.must(is_absolute(&keys.tls), "checkpoint.tls", "it must be an absolute path");
        let is_tls = !keys.tls.as_os_str().is_empty();
        wrong.must(
            keys.listen.is_none() || is_tls || !keys.token_file.as_os_str().is_empty(),
            "checkpoint.token_file",
            "it (or checkpoint.tls) must be set where checkpoint.listen is: no other host may read and write checkpoints",
        );
        wrong.must(
            keys.peers.iter().chain(&keys.avoid).all(|peer| port_of(peer).is_some()),
            "checkpoint.peers",
            "each must be a host and a port, like \"node7:7140\"",
        );
        let anywhere = keys.listen.is_some_and(|address| address.ip().is_unspecified());
        wrong.must(
            !anywhere || !keys.name.is_empty(),
            "checkpoint.name",
            "it must be set where checkpoint.listen is every address",
        );
        wrong.must(keys.redundancy <= 8, "checkpoint.redundancy", "it must be from 0 to 8");
        parity(keys, wrong);
        wrong.must(keys.keep >= 1, "checkpoint.keep", "it must be at least 1");
        wrong.must(
            keys.durable.is_empty() || keys.durable.contains("://"),
            "checkpoint.durable",
            "it must be a URL, like \"file:///shared/directory\" or \"s3://bucket/prefix\"",
        );
        wrong.must(keys.durable_every >= 1, "checkpoint.durable_every", "it must be at least 1");
        wrong.must(keys.durable_keep >= 1, "checkpoint.durable_keep", "it must be at least 1");
        wrong.must(keys.slowdown_percent <= 100, "checkpoint.slowdown_percent", "it must be from 0 to 100");
        wrong.must(keys.interval.0.0 >= 100_000_000, "checkpoint.interval", "it must be at least 100ms");
        let files = keys.watch.is_empty() && keys.replicator.is_empty() && keys.cache.is_empty();
        wrong.must(
            files || keys.listen.is_some() || !keys.durable.is_empty(),
            "checkpoint.listen",
            "it, or checkpoint.durable, must be set if checkpoint.watch, replicator or cache is: otherwise nothing is replicated",
        );
        wrong.must(
            keys.replicator.iter().all(|path| path.is_absolute()),
            "checkpoint.replicator",
            "each must be absolute",
        );
    }
}

/// Pieces need as many other hosts as there are pieces.
fn parity(keys: &CheckpointConfig, wrong: &mut Wrong) {
    let key = "checkpoint.parity";
    if keys.parity.is_empty() {
        return;
    }
    let parity: Parity = match keys.parity.parse() {
        Ok(parity) => parity,
        Err(error) => return wrong.must(false, key, &NoParity::to_string(&error)),
    };
    let me = if keys.name.is_empty() {
        keys.listen.map_or_else(String::new, |at| at.to_string())
    } else {
        keys.name.clone()
    };
    let others = keys.peers.iter().filter(|peer| **peer != me).collect::<BTreeSet<_>>().len();
    wrong.must(
        others >= parity.pieces() as usize,
        key,
        &format!(
            "{parity} needs {} hosts in addition to this one, and checkpoint.peers has {others}",
            parity.pieces()
        ),
    );
    wrong.must(
        keys.redundancy <= parity.parity + 1,
        "checkpoint.redundancy",
        &format!(
            "with checkpoint.parity {parity} at most {} hosts may be lost: it must not be more",
            parity.parity + 1
        ),
    );
}

fn is_absolute(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.is_absolute()
}

/// The port of a `host:port`.
fn port_of(endpoint: &str) -> Option<u16> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let port = port.parse().ok()?;
    (!host.is_empty() && !host.contains('/') && port != 0).then_some(port)
}
