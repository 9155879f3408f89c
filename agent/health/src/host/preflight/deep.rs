//! Judges the measurements of active probes, made by a child process. Data that is read back different fails; slowness
//! only warns, since speeds differ between hosts.

use serde::{Deserialize, Serialize};

use super::{Check, CheckVerdict, Group};
use mainstay_model::health::{Evidence, RecommendedAction};
use mainstay_model::settings;
use mainstay_model::time::Span;
use mainstay_model::units::{Bytes, Period};

settings! {
    /// When mainstay check fails: memory that is not free, and measurements of active probes (--deep) that are too slow.
    pub struct DeepLimits {
        /// Memory in use from which an idle GPU is not free.
        gpu_memory_held: Bytes = Bytes(512 << 20),
        /// Write speed in bytes per second, with fsync, below which a file system is degraded.
        storage_write: Bytes = Bytes(10 << 20),
        /// Read speed in bytes per second below which a file system is degraded.
        storage_read: Bytes = Bytes(10 << 20),
        /// How long an fsync may take before a file system is degraded.
        storage_sync: Period = Period::seconds(10),
        /// Memory copy speed of all CPUs together, in bytes per second, below which host memory is degraded.
        memory: Bytes = Bytes(1 << 30),
        /// TCP speed to this host itself, in bytes per second, below which the network stack is degraded.
        loopback: Bytes = Bytes(100 << 20),
        /// TCP speed to a peer, in bytes per second, below which the path to it is degraded.
        peer: Bytes = Bytes(50 << 20),
        /// Memory copy speed of a GPU, in bytes per second, below which it is degraded.
        gpu_memory: Bytes = Bytes(50 << 30),
    }
    sections {}
}

/// What an active probe tests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// Host memory, by all CPUs.
    Memory,
    /// Every CPU.
    Cpu,
    /// TCP to this host itself.
    Loopback,
    /// TCP to another host.
    Peer(String),
    /// A directory.
    Storage(String),
    /// A GPU, by its PCI address with the function: `0000:3b:00.0`.
    Gpu(String),
}

/// The result of a probe, from its child process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probed {
    /// It ran, and all written data was read back intact.
    Done(Vec<Measured>),
    /// Computed data or data read back is wrong.
    Wrong(String),
    /// The device or service refused: an I/O error, a full or read-only file system.
    Refused(String),
    /// It could not be tested.
    Untried(String),
    /// There is nothing to test.
    Absent(String),
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// What was measured.
    pub what: What,
    /// The value, in bytes per second or in seconds.
    pub value: f64,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Bytes written per second, with fsync.
    Write,
    /// Bytes read per second.
    Read,
    /// Seconds for fsync.
    Sync,
    /// Bytes copied per second.
    Copy,
    /// Bytes per second, both directions.
    Stream,
    /// Round-trip time in seconds.
    RoundTrip,
    /// Seconds for one matrix product on the slowest CPU or GPU.
    Product,
    /// CPUs that took part.
    Cpus,
    /// 1 if the page cache was bypassed.
    Direct,
}

impl Probe {
    /// The name of its check.
    pub fn name(&self) -> String {
        match self {
            Probe::Memory => "deep.memory".to_owned(),
            Probe::Cpu => "deep.cpu".to_owned(),
            Probe::Loopback => "deep.loopback".to_owned(),
            Probe::Peer(peer) => format!("deep.peer:{peer}"),
            Probe::Storage(path) => format!("deep.storage:{path}"),
            Probe::Gpu(address) => format!("deep.gpu:{address}"),
        }
    }

    /// Its group.
    pub fn group(&self) -> Group {
        match self {
            Probe::Memory | Probe::Cpu => Group::Host,
            Probe::Loopback | Probe::Peer(_) => Group::Network,
            Probe::Storage(_) => Group::Storage,
            Probe::Gpu(_) => Group::Gpu,
        }
    }

    /// The recommended action if it fails: hardware that computes or stores wrong values must be replaced.
    fn remedy(&self) -> RecommendedAction {
        match self {
            Probe::Memory | Probe::Cpu => RecommendedAction::ReplaceNode,
            Probe::Gpu(_) => RecommendedAction::ResetDevice,
            Probe::Loopback | Probe::Peer(_) | Probe::Storage(_) => RecommendedAction::ContactSupport,
        }
    }

    /// The limit of a measurement: a minimum or a maximum.
    fn limit(&self, what: What, limits: &DeepLimits) -> Option<Limit> {
        let least = |bytes: Bytes| Some(Limit::AtLeast(bytes.0 as f64));
        match (self, what) {
            (Probe::Storage(_), What::Write) => least(limits.storage_write),
            (Probe::Storage(_), What::Read) => least(limits.storage_read),
            (Probe::Storage(_), What::Sync) => Some(Limit::AtMost(limits.storage_sync.0.as_seconds())),
            (Probe::Memory, What::Copy) => least(limits.memory),
            (Probe::Loopback, What::Stream) => least(limits.loopback),
            (Probe::Peer(_), What::Stream) => least(limits.peer),
            (Probe::Gpu(_), What::Copy) => least(limits.gpu_memory),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

impl Limit {
    fn is_kept(self, value: f64) -> bool {
        match self {
            Limit::AtLeast(least) => value >= least,
            Limit::AtMost(most) => value <= most,
        }
    }

    fn value(self) -> f64 {
        let (Limit::AtLeast(value) | Limit::AtMost(value)) = self;
        value
    }
}

/// The check for a probe's result.
pub fn judge(probe: &Probe, probed: Probed, limits: &DeepLimits, took: Span, deadline: Span) -> Check {
    let check = |verdict, reason: String| Check {
        took: Some(took),
        deadline: Some(deadline),
        ..Check::new(&probe.name(), probe.group(), verdict, reason)
    };
    match probed {
        Probed::Done(measured) => judge_speed(probe, &measured, limits, check),
        Probed::Wrong(what) => Check { action: probe.remedy(), ..check(CheckVerdict::Fail, what) },
        Probed::Refused(why) => {
            Check { action: RecommendedAction::ContactSupport, ..check(CheckVerdict::Fail, why) }
        }
        Probed::Untried(why) => check(CheckVerdict::Unknown, why),
        Probed::Absent(why) => check(CheckVerdict::Skipped, why),
    }
}

fn judge_speed(
    probe: &Probe,
    measured: &[Measured],
    limits: &DeepLimits,
    check: impl Fn(CheckVerdict, String) -> Check,
) -> Check {
    let text =
        |measured: &Measured| format!("{} {}", describe(measured.what), value(measured.what, measured.value));
    let slow: Vec<String> = measured
        .iter()
        .filter_map(|measured| {
            let limit = probe.limit(measured.what, limits)?;
            let beyond = || format!("{} (limit {})", text(measured), value(measured.what, limit.value()));
            // NaN is within no limit.
            (!limit.is_kept(measured.value)).then(beyond)
        })
        .collect();
    let evidence = measured.iter().map(|measured| Evidence {
        source: probe.name(),
        reading: text(measured),
        limit: probe.limit(measured.what, limits).map(|limit| value(measured.what, limit.value())),
        ..Evidence::default()
    });
    let evidence = evidence.collect();
    if slow.is_empty() {
        let all: Vec<String> = measured.iter().map(text).collect();
        Check { evidence, ..check(CheckVerdict::Pass, all.join(", ")) }
    } else {
        Check { evidence, ..check(CheckVerdict::Warn, format!("slow: {}", slow.join(", "))) }
    }
}

fn describe(what: What) -> &'static str {
    match what {
        What::Write => "written",
        What::Read => "read",
        What::Sync => "fsync",
        What::Copy => "copied",
        What::Stream => "streamed",
        What::RoundTrip => "round trip",
        What::Product => "matrix product",
        What::Cpus => "CPUs",
        What::Direct => "past the page cache",
    }
}

fn value(what: What, value: f64) -> String {
    match what {
        // No speed exceeds u64; the cast saturates.
        What::Write | What::Read | What::Copy | What::Stream => {
            format!("{}/s", Bytes(value as u64).rounded())
        }
        What::Sync | What::RoundTrip | What::Product if value < 0.01 => format!("{:.0} µs", value * 1e6),
        What::Sync | What::RoundTrip | What::Product => Span((value * 1e9) as u64).to_string(),
        What::Cpus => format!("{value:.0}"),
        What::Direct => (if value > 0.0 { "yes" } else { "no" }).to_owned(),
    }
}
