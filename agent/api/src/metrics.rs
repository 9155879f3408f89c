//! The Prometheus metrics. Values are read from the newest snapshot at each scrape, so a job that is gone leaves no series.
//! A job's series have its name in two labels: `training_job`, and `job`, which Prometheus renames, for one version more.
//! Names and meanings are in `docs/reference/metrics.md`; a test compares them.

use std::collections::BTreeMap;

use mainstay_checkpoint::lag::LagReason;
use mainstay_checkpoint::owner;
use mainstay_checkpoint::tiers::{Tier, TierState};
use mainstay_health::hardware::gpu::GpuView;
use mainstay_health::hardware::tpu::metric as tpu;
use mainstay_model::health::HealthState;
use mainstay_model::pci::PciAddress;
use mainstay_model::policy::CauseKind;
use mainstay_model::time::Stamp;
use mainstay_model::verdict::FaultDomain;
use mainstay_progress::goodput::TimeCategory;
use mainstay_tier::peer::Service;
use mainstay_view::goodput::{Books, Charge, LAUNCHER_LOST, ORDER, STALL_BOUNDS};
use mainstay_view::node::{JobPhase, JobView, NodeView};
use metrics::{Histogram, Label, Unit, counter, describe_gauge, gauge, histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};

use super::{Mode, ReadSide, saving};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only increases, until the process restarts.
    Counter,
    /// Counts of values by upper bounds, which only increase.
    Histogram,
}

impl Kind {
    /// Its name in the formats.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        }
    }
}

/// A metric as it is documented.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

const BUILD_INFO: &str = "mainstay_build_info";
const NODE_STATE: &str = "mainstay_node_state";
const COMPONENT_STATE: &str = "mainstay_component_state";
const COMPONENT_READ_AGE: &str = "mainstay_component_read_age_seconds";
const GPU_TEMPERATURE: &str = "mainstay_gpu_temperature_celsius";
const GPU_POWER: &str = "mainstay_gpu_power_watts";
const GPU_UTILIZATION: &str = "mainstay_gpu_utilization_percent";
const GPU_UTILIZATION_RATIO: &str = "mainstay_gpu_utilization_ratio";
const GPU_MEMORY_USED: &str = "mainstay_gpu_memory_used_bytes";
const GPU_MEMORY_TOTAL: &str = "mainstay_gpu_memory_total_bytes";
const GPU_ECC: &str = "mainstay_gpu_ecc_errors";
const GPU_LINKS_UP: &str = "mainstay_gpu_nvlinks_up";
const GPU_LINKS_EXPECTED: &str = "mainstay_gpu_nvlinks_expected";
const GPU_PCIE_REPLAYS: &str = "mainstay_gpu_pcie_replays";
const GPU_PROCESSES: &str = "mainstay_gpu_processes";
const TPU_DUTY_CYCLE_RATIO: &str = "mainstay_tpu_duty_cycle_ratio";
const TPU_HBM_BANDWIDTH_RATIO: &str = "mainstay_tpu_hbm_bandwidth_ratio";
const JOB_INFO: &str = "mainstay_job_info";
const JOB_LEADER: &str = "mainstay_job_leader";
const JOB_PHASE: &str = "mainstay_job_phase";
const JOB_STEP: &str = "mainstay_job_step";
const JOB_PACE: &str = "mainstay_job_steps_per_second";
const JOB_ATTEMPT: &str = "mainstay_job_attempt";
const JOB_RESTARTS: &str = "mainstay_job_restarts_total";
const JOB_POLICY_TROUBLES: &str = "mainstay_job_policy_troubles_total";
const JOB_RESTARTS_BY_RUNG: &str = "mainstay_job_restarts_by_rung_total";
const JOB_FAILURES: &str = "mainstay_job_failures_total";
const JOB_FAILURES_BY_HOST: &str = "mainstay_job_failures_by_host_total";
const JOB_RESTART: &str = "mainstay_job_restart_seconds";
const JOB_DETECTION: &str = "mainstay_job_detection_seconds";
const JOB_SAVE_STALL: &str = "mainstay_job_save_stall_seconds";
const JOB_LOST_TIME: &str = "mainstay_job_lost_seconds_total";
const JOB_TIME: &str = "mainstay_job_time_seconds_total";
const JOB_LOST_STEPS: &str = "mainstay_job_lost_steps_total";
const JOB_HANG: &str = "mainstay_job_hang";
const JOB_FINDING: &str = "mainstay_job_finding";
const JOB_FINDING_COST: &str = "mainstay_job_finding_cost_ratio";
const JOB_SAVE_INTERVAL: &str = "mainstay_job_save_interval_seconds";
const JOB_SAVE_COST: &str = "mainstay_job_save_cost_ratio";
const JOB_COPIES_BEHIND: &str = "mainstay_job_copies_behind";
const JOB_RANK_STEP: &str = "mainstay_job_rank_step";
const JOB_RANK_HEARTBEAT_AGE: &str = "mainstay_job_rank_heartbeat_age_seconds";
const JOB_RANK_SELF_TIME: &str = "mainstay_job_rank_self_time_seconds";
const JOB_RANK_WAIT: &str = "mainstay_job_rank_wait_ratio";
const CHECKPOINT_AGE: &str = "mainstay_checkpoint_age_seconds";
const CHECKPOINT_STEP: &str = "mainstay_checkpoint_step";
const CHECKPOINT_BEHIND: &str = "mainstay_checkpoint_copies_behind_seconds";
const CHECKPOINT_SENT: &str = "mainstay_checkpoint_sent_bytes_total";
const CHECKPOINT_FAILURES: &str = "mainstay_checkpoint_send_failures_total";
const CHECKPOINT_DAMAGED: &str = "mainstay_checkpoint_damaged_total";
const CHECKPOINT_PAID: &str = "mainstay_checkpoint_replication_cost_seconds_total";
const CHECKPOINT_HELD: &str = "mainstay_checkpoint_replication_held_seconds_total";
const CHECKPOINT_DIVERGENCES: &str = "mainstay_checkpoint_unlike_total";
const RANK_STEP: &str = "mainstay_rank_step";
const RANK_HEARTBEAT_AGE: &str = "mainstay_rank_heartbeat_age_seconds";
const RANK_SELF_TIME: &str = "mainstay_rank_self_time_seconds";
const RANK_AGAINST_PEERS: &str = "mainstay_rank_self_time_ratio";
const RANK_WAIT: &str = "mainstay_rank_wait_ratio";
const JOURNAL_NEWEST: &str = "mainstay_journal_newest_cursor";
const JOURNAL_OLDEST: &str = "mainstay_journal_oldest_cursor";
const JOURNAL_WRITABLE: &str = "mainstay_journal_writable";
const PROCESS_RSS: &str = "process_resident_memory_bytes";
const PROCESS_CPU: &str = "process_cpu_seconds_total";
const PROCESS_START: &str = "process_start_time_seconds";

/// The labels of a job's series.
const JOB_LABELS: &[&str] = &["job", "training_job"];

/// The labels of a GPU's series: those of dcgm-exporter, and `uuid` for one version more.
const GPU: &[&str] = &["Hostname", "UUID", "gpu", "pci_bus_id", "uuid"];

/// The labels of the quantiles over the ranks of a job that this host sees.
const QUANTILE_LABELS: &[&str] = &["job", "ranks_quantile", "training_job"];

/// The histograms with the upper bounds of their buckets, in seconds.
const HISTOGRAMS: [(&str, &[f64]); 3] = [
    (JOB_RESTART, &[0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0]),
    (JOB_DETECTION, &[0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 600.0]),
    (JOB_SAVE_STALL, &STALL_BOUNDS),
];

/// The ranks of a job up to which each rank has its own series, in a scrape that does not ask for them.
const MAX_RANKS_WITH_SERIES: u32 = 256;

/// The hosts of a job up to which each host has its series, also without a failure.
const MAX_HOSTS_WITH_SERIES: usize = 256;

/// The quantiles of the ranks of a job.
const QUANTILES: [(f64, &str); 4] = [(0.0, "0"), (0.5, "0.5"), (0.9, "0.9"), (1.0, "1")];

const fn gauge_of(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, help }
}

/// All metrics, in the order of the documentation.
pub const METRICS: &[Metric] = &[
    gauge_of(BUILD_INFO, &["mode", "version"], "Always 1; the labels name the program and its version."),
    gauge_of(NODE_STATE, &["state"], "1 for the current state of the node, 0 for the others."),
    gauge_of(
        COMPONENT_STATE,
        &["component", "state"],
        "1 for the current state of the component, 0 for the others.",
    ),
    gauge_of(COMPONENT_READ_AGE, &["component"], "Seconds since the component was last read successfully."),
    gauge_of(GPU_TEMPERATURE, GPU, "Temperature of the GPU, in degrees Celsius."),
    gauge_of(GPU_POWER, GPU, "Power draw of the GPU, in watts."),
    gauge_of(GPU_UTILIZATION, GPU, "Share of time in which the GPU was busy, in percent."),
    gauge_of(GPU_UTILIZATION_RATIO, GPU, "Share of time in which the GPU was busy, from 0 to 1."),
    gauge_of(GPU_MEMORY_USED, GPU, "GPU memory in use, in bytes."),
    gauge_of(GPU_MEMORY_TOTAL, GPU, "Total GPU memory, in bytes."),
    gauge_of(
        GPU_ECC,
        &["Hostname", "UUID", "gpu", "kind", "pci_bus_id", "uuid"],
        "Memory errors since the GPU's last reset, by kind: corrected, uncorrected.",
    ),
    gauge_of(GPU_LINKS_UP, GPU, "NVLinks that are up."),
    gauge_of(GPU_LINKS_EXPECTED, GPU, "NVLinks that should be up."),
    gauge_of(GPU_PCIE_REPLAYS, GPU, "PCIe packets replayed since the GPU's last reset."),
    gauge_of(GPU_PROCESSES, GPU, "Processes that use the GPU."),
    gauge_of(
        tpu::DUTY_CYCLE,
        &["component"],
        "Share of time in which the chip's TensorCores were busy, in percent.",
    ),
    gauge_of(
        TPU_DUTY_CYCLE_RATIO,
        &["component"],
        "Share of time in which the chip's TensorCores were busy, from 0 to 1.",
    ),
    gauge_of(tpu::HBM_USED, &["component"], "Memory of the TPU chip in use, in bytes."),
    gauge_of(tpu::HBM_TOTAL, &["component"], "Memory of the TPU chip, in bytes."),
    gauge_of(
        tpu::HBM_BANDWIDTH,
        &["component"],
        "Share of the TPU chip's memory bandwidth in use, in percent.",
    ),
    gauge_of(
        TPU_HBM_BANDWIDTH_RATIO,
        &["component"],
        "Share of the TPU chip's memory bandwidth in use, from 0 to 1.",
    ),
    gauge_of(
        JOB_INFO,
        &[
            "job",
            "namespace",
            "pod",
            "slurm_job_id",
            "slurm_job_name",
            "slurm_partition",
            "training_job",
            "uid",
            "user",
        ],
        "Always 1; the labels name whose job it is. Unknown ones are empty.",
    ),
    gauge_of(
        JOB_LEADER,
        JOB_LABELS,
        "1 on the host whose launcher decides for the job, 0 on its other hosts. Only this host has the job's counters.",
    ),
    gauge_of(
        JOB_PHASE,
        &["job", "phase", "training_job"],
        "1 for the current phase of the job, 0 for the others.",
    ),
    gauge_of(JOB_STEP, JOB_LABELS, "The newest step that all ranks are known to have completed."),
    gauge_of(JOB_PACE, JOB_LABELS, "Steps per second over the last minute."),
    gauge_of(JOB_ATTEMPT, JOB_LABELS, "The current attempt, from 0."),
    Metric { name: JOB_RESTARTS, kind: Kind::Counter, labels: JOB_LABELS, help: "Restarts so far." },
    Metric {
        name: JOB_RESTARTS_BY_RUNG,
        kind: Kind::Counter,
        labels: &["job", "rung", "training_job"],
        help: "Restarts so far by kind: in_process, respawn_ranks (only the lost ranks), in_job (all ranks).",
    },
    Metric {
        name: JOB_POLICY_TROUBLES,
        kind: Kind::Counter,
        labels: JOB_LABELS,
        help: "Decisions of the built-in policy because the job's policy file failed or was overruled.",
    },
    Metric {
        name: JOB_FAILURES,
        kind: Kind::Counter,
        labels: &["cause", "domain", "job", "training_job"],
        help: "Failures so far, by kind of cause and by fault domain: user, hardware, infrastructure, platform, unknown.",
    },
    Metric {
        name: JOB_FAILURES_BY_HOST,
        kind: Kind::Counter,
        labels: &["host", "job", "training_job"],
        help: "Failures so far that started on this host and were not the user's fault. A host may have no series before its first failure.",
    },
    Metric {
        name: JOB_RESTART,
        kind: Kind::Histogram,
        labels: JOB_LABELS,
        help: "Seconds from a failure, or the order of a restart, until all ranks had completed a step again.",
    },
    Metric {
        name: JOB_DETECTION,
        kind: Kind::Histogram,
        labels: JOB_LABELS,
        help: "Seconds from a failure to its detection; for a hang, from the last progress of any rank.",
    },
    Metric {
        name: JOB_SAVE_STALL,
        kind: Kind::Histogram,
        labels: JOB_LABELS,
        help: "Seconds for which a step was held up by sections named checkpoint: the mean of the saves between two entries of the journal, about 10 s.",
    },
    Metric {
        name: JOB_LOST_TIME,
        kind: Kind::Counter,
        labels: &["cause", "job", "training_job"],
        help: "Seconds of the job that are charged to failures, by kind of cause, order, launcher_lost: detection, restart, repeated steps.",
    },
    Metric {
        name: JOB_TIME,
        kind: Kind::Counter,
        labels: &["job", "state", "training_job"],
        help: "Seconds of the job by what they were spent on, from its first launch on. Training is counted with each entry of the journal, a failure once its verdict is known.",
    },
    Metric {
        name: JOB_LOST_STEPS,
        kind: Kind::Counter,
        labels: &["cause", "job", "training_job"],
        help: "Steps that were done again, by kind of what caused that: of a failure, order, launcher_lost.",
    },
    gauge_of(JOB_HANG, JOB_LABELS, "1 while ranks are alive and make no progress, 0 otherwise."),
    gauge_of(
        JOB_FINDING,
        &["job", "number", "training_job", "what"],
        "1 while the job has this finding: a problem in which no rank has failed.",
    ),
    gauge_of(
        JOB_FINDING_COST,
        &["job", "number", "training_job", "what"],
        "Share of the step time that the finding costs, from 0 to 1.",
    ),
    gauge_of(
        JOB_SAVE_INTERVAL,
        &["job", "tier", "training_job"],
        "Seconds between saves that cost least, from the measured cost of saves and failures, by tier: memory, disk, peer, durable.",
    ),
    gauge_of(
        JOB_SAVE_COST,
        &["interval", "job", "training_job"],
        "Share of wall-clock time spent on saves, repeated work and restores, by interval: advised, present.",
    ),
    gauge_of(
        JOB_COPIES_BEHIND,
        JOB_LABELS,
        "1 while saved steps wait for their copies on other hosts for more than a minute, 0 otherwise.",
    ),
    gauge_of(
        CHECKPOINT_AGE,
        &["run", "tier", "uid"],
        "Seconds since the newest step that is whole in the tier was sealed: memory, disk, peer, durable. For copies between launchers (peer): since the copies were reported.",
    ),
    gauge_of(CHECKPOINT_STEP, &["run", "tier", "uid"], "The newest step that is whole in the tier."),
    gauge_of(
        CHECKPOINT_BEHIND,
        &["reason", "run", "uid"],
        "Seconds for which a saved step has waited for its copies on peers while no step was copied, by reason: peer, slowdown, measurement, speed.",
    ),
    Metric {
        name: CHECKPOINT_SENT,
        kind: Kind::Counter,
        labels: &["to"],
        help: "Bytes of checkpoints that this agent has sent, by destination: peer, durable.",
    },
    Metric {
        name: CHECKPOINT_FAILURES,
        kind: Kind::Counter,
        labels: &["to"],
        help: "Failed attempts to send checkpoints, by destination: peer, durable.",
    },
    Metric {
        name: CHECKPOINT_PAID,
        kind: Kind::Counter,
        labels: &[],
        help: "Seconds of training that the replicas sent by this host have cost its jobs, from step times with and without replication.",
    },
    Metric {
        name: CHECKPOINT_HELD,
        kind: Kind::Counter,
        labels: &[],
        help: "Seconds for which replication has waited because its share of training time was used up, or for a measurement of that share.",
    },
    Metric {
        name: CHECKPOINT_DAMAGED,
        kind: Kind::Counter,
        labels: &[],
        help: "Damaged copies of checkpoints that were found, on this host or while fetching.",
    },
    Metric {
        name: CHECKPOINT_DIVERGENCES,
        kind: Kind::Counter,
        labels: &[],
        help: "Steps of which ranks saved different bytes although they declared the same content.",
    },
    gauge_of(
        JOB_RANK_STEP,
        QUANTILE_LABELS,
        "The last step that ranks completed: quantile 0 is the rank that is furthest behind.",
    ),
    gauge_of(
        JOB_RANK_HEARTBEAT_AGE,
        QUANTILE_LABELS,
        "Seconds since the ranks' last heartbeats: quantile 1 is the oldest.",
    ),
    gauge_of(
        JOB_RANK_SELF_TIME,
        QUANTILE_LABELS,
        "Step time without waiting for other ranks, in seconds: quantile 1 is the slowest rank.",
    ),
    gauge_of(
        JOB_RANK_WAIT,
        QUANTILE_LABELS,
        "Share of a step in which ranks wait for other ranks, from 0 to 1: quantile 0 is the rank that waits least.",
    ),
    gauge_of(RANK_STEP, &["job", "rank", "training_job"], "The last step that the rank completed."),
    gauge_of(
        RANK_HEARTBEAT_AGE,
        &["job", "rank", "training_job"],
        "Seconds since the rank's last heartbeat.",
    ),
    gauge_of(
        RANK_SELF_TIME,
        &["job", "rank", "training_job"],
        "Median time of the rank's last 16 steps without the time spent waiting for other ranks, in seconds.",
    ),
    gauge_of(
        RANK_AGAINST_PEERS,
        &["job", "rank", "training_job"],
        "The rank's self time relative to the median of its peers: 1.1 is 10 % slower.",
    ),
    gauge_of(
        RANK_WAIT,
        &["job", "rank", "training_job"],
        "Share of a step in which the rank waits for other ranks, from 0 to 1.",
    ),
    gauge_of(JOURNAL_NEWEST, &[], "The cursor of the newest event."),
    gauge_of(JOURNAL_OLDEST, &[], "The cursor of the oldest event that is kept."),
    gauge_of(JOURNAL_WRITABLE, &[], "1 while the journal is writable, 0 while events are kept in memory."),
    gauge_of(PROCESS_RSS, &[], "Resident memory of this process, in bytes."),
    Metric {
        name: PROCESS_CPU,
        kind: Kind::Counter,
        labels: &[],
        help: "CPU time used by this process, in seconds.",
    },
    gauge_of(PROCESS_START, &[], "When this process started, in seconds since the Unix epoch."),
];

/// The form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus' text format.
    Text,
    /// OpenMetrics, which Prometheus asks for.
    OpenMetrics,
}

impl Format {
    /// The form that a caller accepts: the one with the higher weight, and the text if it does not say.
    pub(super) fn accepted(accept: &str) -> Format {
        let weight = |of: &str| {
            let weights = accept.split(',').filter_map(|one| {
                let mut parts = one.split(';').map(str::trim);
                parts.next().filter(|kind| kind.eq_ignore_ascii_case(of))?;
                let given = parts.find_map(|part| part.strip_prefix("q="));
                Some(given.map_or(1.0, |given| given.parse().unwrap_or(0.0)))
            });
            weights.fold(0.0, f64::max)
        };
        let wanted = weight("application/openmetrics-text");
        if wanted > 0.0 && wanted >= weight("text/plain") { Format::OpenMetrics } else { Format::Text }
    }

    /// The `Content-Type` of the page.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// What a scrape asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scrape {
    pub(super) format: Format,
    /// The series of each rank, also in a large job.
    pub(super) all_ranks: bool,
}

/// The page for one scrape.
pub(super) fn render(read: &ReadSide, now: Stamp, scrape: Scrape) -> String {
    let recorder = recorder();
    let handle = recorder.handle();
    with_local_recorder(&recorder, || {
        describe();
        let view = read.snapshots.view();
        about(read);
        node(&view, now);
        view.gpus.iter().for_each(|shown| gpu(shown, read));
        view.jobs.values().for_each(|shown| job(shown, read, now, scrape.all_ranks));
        checkpoints(read, now);
        gauge!(JOURNAL_NEWEST).set(read.snapshots.newest() as f64);
        gauge!(JOURNAL_OLDEST).set(read.snapshots.oldest() as f64);
        gauge!(JOURNAL_WRITABLE).set(flag(read.snapshots.journal_error().is_none()));
        process();
    });
    page(&handle.render(), scrape.format)
}

fn recorder() -> PrometheusRecorder {
    let with_bounds = |builder: PrometheusBuilder, (name, bounds): (&str, &[f64])| {
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
    };
    let builder = HISTOGRAMS.into_iter().try_fold(PrometheusBuilder::new(), with_bounds);
    // Only an empty list of bounds is an error.
    builder.unwrap_or_default().build_recorder()
}

fn describe() {
    for metric in METRICS {
        describe_gauge!(metric.name, Unit::Count, metric.help);
    }
}

/// The page in its form, with the declared types: the exporter's counters are whole numbers, so a counter with fractions
/// is a gauge to it. In OpenMetrics a counter's family has no `_total`.
fn page(rendered: &str, format: Format) -> String {
    let mut page = String::with_capacity(rendered.len() + 8);
    for line in rendered.lines().filter(|line| !line.is_empty()) {
        let mut words = line.splitn(4, ' ');
        let comment = (words.next(), words.next(), words.next(), words.next());
        let (Some("#"), Some(what), Some(name), Some(rest)) = comment else {
            page.push_str(line);
            page.push('\n');
            continue;
        };
        let kind = METRICS.iter().find(|metric| metric.name == name).map(|metric| metric.kind);
        let rest = match (what, kind) {
            ("TYPE", Some(kind)) => kind.as_str(),
            _ => rest,
        };
        let family = match (format, kind) {
            (Format::OpenMetrics, Some(Kind::Counter)) => name.trim_end_matches("_total"),
            _ => name,
        };
        page.extend(["# ", what, " ", family, " ", rest, "\n"]);
    }
    if format == Format::OpenMetrics {
        page.push_str("# EOF\n");
    }
    page
}

fn about(read: &ReadSide) {
    let mode = match read.about.mode {
        Mode::Agent => "agent",
        Mode::Launcher => "launcher",
    };
    gauge!(BUILD_INFO, "mode" => mode, "version" => read.about.version.clone()).set(1.0);
    gauge!(PROCESS_START).set(read.about.started.wall.0 as f64 / 1e9);
}

fn node(view: &NodeView, now: Stamp) {
    for (state, label) in STATES {
        gauge!(NODE_STATE, "state" => label).set(flag(view.state() == state));
        for component in view.components.values() {
            gauge!(COMPONENT_STATE, "component" => component.name.clone(), "state" => label)
                .set(flag(component.state == state));
        }
    }
    for component in view.components.values() {
        for reading in &component.gauges {
            gauge!(reading.metric, "component" => component.name.clone()).set(reading.value);
            let twin = match reading.metric {
                tpu::DUTY_CYCLE => TPU_DUTY_CYCLE_RATIO,
                tpu::HBM_BANDWIDTH => TPU_HBM_BANDWIDTH_RATIO,
                _ => continue,
            };
            gauge!(twin, "component" => component.name.clone()).set(reading.value / 100.0);
        }
        // A reading of an earlier boot has no age.
        if let Some(at) = component.read_at.filter(|at| *at <= now.mono) {
            gauge!(COMPONENT_READ_AGE, "component" => component.name.clone())
                .set(now.mono.since(at).as_seconds());
        }
    }
}

/// A GPU in trouble has no series: its readings are not reliable.
fn gpu(gpu: &GpuView, read: &ReadSide) {
    let Some(reading) = gpu.reading.as_ref().filter(|reading| reading.trouble.is_none()) else { return };
    let uuid = reading.identity.as_ref().map(|identity| identity.uuid.clone()).unwrap_or_default();
    let PciAddress { domain, bus, device } = gpu.address;
    let labels = vec![
        Label::new("Hostname", read.about.hostname.clone()),
        Label::new("UUID", uuid.clone()),
        Label::new("gpu", reading.index.to_string()),
        // As the driver and dcgm-exporter write it.
        Label::new("pci_bus_id", format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
        Label::new("uuid", uuid),
    ];
    let set = |name: &'static str, value: Option<f64>| {
        if let Some(value) = value {
            gauge!(name, labels.iter()).set(value);
        }
    };
    set(GPU_TEMPERATURE, reading.temperature.value().map(|degrees| f64::from(*degrees)));
    set(GPU_POWER, reading.power.value().map(|milliwatts| f64::from(*milliwatts) / 1000.0));
    let utilization = reading.utilization.value().map(|percent| f64::from(*percent));
    set(GPU_UTILIZATION, utilization);
    set(GPU_UTILIZATION_RATIO, utilization.map(|percent| percent / 100.0));
    set(GPU_MEMORY_USED, reading.memory.value().map(|(used, _)| *used as f64));
    set(GPU_MEMORY_TOTAL, reading.memory.value().map(|(_, total)| *total as f64));
    set(GPU_LINKS_UP, gpu.links.map(|(up, _)| f64::from(up)));
    set(GPU_LINKS_EXPECTED, gpu.links.map(|(_, expected)| f64::from(expected)));
    set(GPU_PCIE_REPLAYS, reading.pcie_replays.value().map(|count| f64::from(*count)));
    set(GPU_PROCESSES, reading.processes.value().map(|processes| processes.len() as f64));
    for (kind, count) in [("corrected", &reading.ecc_corrected), ("uncorrected", &reading.ecc_volatile)] {
        if let Some(count) = count.value() {
            gauge!(GPU_ECC, with(&labels, &[("kind", kind)]).iter()).set(*count as f64);
        }
    }
}

/// These labels and further ones.
fn with(labels: &[Label], further: &[(&'static str, &str)]) -> Vec<Label> {
    let further = further.iter().map(|(name, value)| Label::new(*name, (*value).to_owned()));
    labels.iter().cloned().chain(further).collect()
}

const STATES: [(HealthState, &str); 4] = [
    (HealthState::Healthy, "HEALTHY"),
    (HealthState::Degraded, "DEGRADED"),
    (HealthState::Unhealthy, "UNHEALTHY"),
    (HealthState::Unknown, "UNKNOWN"),
];

/// The labels and the values of one job.
struct JobSeries {
    labels: Vec<Label>,
}

impl JobSeries {
    fn gauge(&self, name: &'static str, further: &[(&'static str, &str)], value: impl Into<Option<f64>>) {
        if let Some(value) = value.into() {
            gauge!(name, with(&self.labels, further).iter()).set(value);
        }
    }

    fn histogram(&self, name: &'static str) -> Histogram {
        histogram!(name, self.labels.iter())
    }

    fn counter(&self, name: &'static str, further: &[(&'static str, &str)], value: u32) {
        counter!(name, with(&self.labels, further).iter()).absolute(value.into());
    }
}

fn job(job: &JobView, read: &ReadSide, now: Stamp, all_ranks: bool) {
    let id = &job.id.0;
    let series =
        JobSeries { labels: vec![Label::new("job", id.clone()), Label::new("training_job", id.clone())] };
    let (owner, uid) = (&job.spec.owner, job.spec.uid.to_string());
    let whose = [
        ("namespace", &*owner.namespace),
        ("pod", &*owner.pod),
        ("slurm_job_id", &*owner.slurm_job_id),
        ("slurm_job_name", &*owner.slurm_job_name),
        ("slurm_partition", &*owner.slurm_partition),
        ("uid", &*uid),
        ("user", &*owner.user),
    ];
    series.gauge(JOB_INFO, &whose, 1.0);
    series.gauge(JOB_LEADER, &[], flag(job.leads));
    let current = job.phase.name();
    for phase in PHASES {
        series.gauge(JOB_PHASE, &[("phase", phase)], flag(phase == current));
    }
    series.gauge(JOB_ATTEMPT, &[], f64::from(job.attempt.0));
    if job.leads {
        counters(job, read, &series);
    }
    series.gauge(JOB_STEP, &[], job.step.map(|step| step as f64));
    // The heartbeats of an ended job grow older forever and must not cause an alert.
    if matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost) {
        return;
    }
    series.gauge(JOB_HANG, &[], flag(job.hang.is_some()));
    let pace = read.pace.steps_per_second(&job.id, now.mono).filter(|_| job.phase == JobPhase::Running);
    series.gauge(JOB_PACE, &[], pace);
    for (tier, every) in saving::by_tier(job, read.checkpoints.as_deref()) {
        series.gauge(JOB_SAVE_INTERVAL, &[("tier", tier.as_str())], every);
    }
    if let Some(saving) = &job.saving {
        series.gauge(JOB_SAVE_COST, &[("interval", "advised")], saving.cost);
        series.gauge(JOB_SAVE_COST, &[("interval", "present")], saving.cost_was);
    }
    for finding in job.findings.values() {
        let number = finding.finding.to_string();
        let which = [("number", &*number), ("what", finding.what.as_str())];
        series.gauge(JOB_FINDING, &which, 1.0);
        series.gauge(JOB_FINDING_COST, &which, finding.cost_percent.map(|cost| cost / 100.0));
    }
    if job.leads {
        copies(job, read, now, &series);
    }
    ranks(job, now, &series, all_ranks || job.spec.world_size <= MAX_RANKS_WITH_SERIES);
}

/// The counters begin at 0 with the job: `increase()` does not see the first value of a series.
fn counters(job: &JobView, read: &ReadSide, series: &JobSeries) {
    series.counter(JOB_RESTARTS, &[], job.restarts);
    series.counter(JOB_POLICY_TROUBLES, &[], job.policy_troubles);
    let of_all = job.restarts.saturating_sub(job.restarts_in_process + job.restarts_of_some);
    books(&job.books, series);
    durations(&job.books, series);
    by_host(job, read, series);
    let by_rung = [
        ("in_process", job.restarts_in_process),
        ("respawn_ranks", job.restarts_of_some),
        ("in_job", of_all),
    ];
    for (rung, count) in by_rung {
        series.counter(JOB_RESTARTS_BY_RUNG, &[("rung", rung)], count);
    }
    for cause in CauseKind::ALL {
        for domain in FaultDomain::ALL.map(FaultDomain::name) {
            let count = job.failures.get(&(cause, domain)).copied().unwrap_or_default();
            series.counter(JOB_FAILURES, &[("cause", cause.as_str()), ("domain", domain)], count);
        }
    }
}

/// With fractions; [`page`] writes their type.
fn books(books: &Books, of: &JobSeries) {
    for state in TimeCategory::ALL {
        let times = books.settled().iter().filter(|((of, _), _)| *of == state);
        let seconds: f64 = times.map(|(_, booked)| booked.span.as_seconds()).sum();
        // The sum of no numbers is -0.
        of.gauge(JOB_TIME, &[("state", state.as_str())], seconds.abs());
    }
    let caused = |charge: Charge| charge.and_then(|index| books.causes.get(index)).map(|cause| cause.kind);
    for kind in CauseKind::ALL.into_iter().map(CauseKind::as_str).chain([ORDER, LAUNCHER_LOST]) {
        let times = books.settled().iter().filter(|((_, charge), _)| caused(*charge) == Some(kind));
        let seconds: f64 = times.map(|(_, booked)| booked.span.as_seconds()).sum();
        of.gauge(JOB_LOST_TIME, &[("cause", kind)], seconds.abs());
        let steps = books.lost_steps.iter().filter(|(charge, _)| caused(**charge) == Some(kind));
        let steps: u64 = steps.map(|(_, steps)| *steps).sum();
        of.gauge(JOB_LOST_STEPS, &[("cause", kind)], steps as f64);
    }
}

fn durations(books: &Books, of: &JobSeries) {
    let (restart, detection) = (of.histogram(JOB_RESTART), of.histogram(JOB_DETECTION));
    for cause in &books.causes {
        if cause.incident.is_some() {
            detection.record(cause.detected_after.as_seconds());
        }
        if let Some(took) = cause.recovered_after.filter(|_| cause.incident.is_some() || cause.kind == ORDER)
        {
            restart.record(took.as_seconds());
        }
    }
    let stall = of.histogram(JOB_SAVE_STALL);
    for stalls in books.stalls.iter().filter(|stalls| stalls.saves > 0) {
        let saves = usize::try_from(stalls.saves).unwrap_or(usize::MAX);
        stall.record_many(stalls.total.as_seconds() / stalls.saves as f64, saves);
    }
}

/// Failures by the host where they started. The journal of this host may not have the others.
fn by_host(job: &JobView, read: &ReadSide, series: &JobSeries) {
    let mut counts: BTreeMap<&String, u32> = match job.hosts.len() {
        0 => [(&read.about.hostname, 0)].into(),
        1..=MAX_HOSTS_WITH_SERIES => job.hosts.iter().map(|host| (host, 0)).collect(),
        _ => BTreeMap::new(),
    };
    for (host, count) in &job.failures_by_host {
        *counts.entry(host.as_ref().unwrap_or(&read.about.hostname)).or_default() += count;
    }
    for (host, count) in counts {
        series.counter(JOB_FAILURES_BY_HOST, &[("host", host)], count);
    }
}

/// The copies that the launchers of a job keep for each other. An agent that knows the run has its own series.
fn copies(job: &JobView, read: &ReadSide, now: Stamp, series: &JobSeries) {
    let Some((copied, at)) = job.copied else {
        return series.gauge(JOB_COPIES_BEHIND, &[], job.copies_behind.is_some().then_some(1.0));
    };
    series.gauge(JOB_COPIES_BEHIND, &[], flag(job.copies_behind.is_some()));
    let run = if job.spec.run.is_empty() { &job.id.0 } else { &job.spec.run };
    let is_known = |known: &TierState| owner::name(&known.run) == run && known.tier == Tier::Peer;
    if read.checkpoints.iter().any(|checkpoints| checkpoints.tiers().iter().any(is_known)) {
        return;
    }
    let labels =
        [("run", run.clone()), ("tier", Tier::Peer.as_str().to_owned()), ("uid", job.spec.uid.to_string())];
    let age = (now.wall.0 - at.wall.0).max(0);
    gauge!(CHECKPOINT_AGE, &labels).set(age as f64 / 1e9);
    gauge!(CHECKPOINT_STEP, &labels).set(copied.step as f64);
}

/// The ranks that this host sees: their quantiles, and in a job that is not large each of them.
fn ranks(job: &JobView, now: Stamp, series: &JobSeries, each: bool) {
    let mut values: [(&'static str, Vec<f64>); 4] =
        [JOB_RANK_STEP, JOB_RANK_SELF_TIME, JOB_RANK_WAIT, JOB_RANK_HEARTBEAT_AGE]
            .map(|name| (name, Vec::new()));
    for rank in job.ranks.values() {
        let Some(beat) = &rank.beat else { continue };
        let age = (beat.at.0 > 0).then(|| now.mono.since(beat.at).as_seconds());
        let of_rank = [
            (RANK_STEP, beat.step.map(|step| step as f64)),
            (RANK_SELF_TIME, beat.pace.self_time.map(|own| own.as_seconds())),
            (RANK_WAIT, beat.pace.wait_share),
            (RANK_HEARTBEAT_AGE, age),
        ];
        for ((_, all), (_, value)) in values.iter_mut().zip(&of_rank) {
            all.extend(value);
        }
        if each {
            let number = rank.rank.0.to_string();
            let which = [("rank", &*number)];
            of_rank.into_iter().for_each(|(name, value)| series.gauge(name, &which, value));
            series.gauge(RANK_AGAINST_PEERS, &which, beat.pace.against_peers);
        }
    }
    for (name, mut all) in values {
        all.sort_by(f64::total_cmp);
        for (quantile, word) in QUANTILES {
            let place = (quantile * all.len().saturating_sub(1) as f64).round() as usize;
            series.gauge(name, &[("ranks_quantile", word)], all.get(place).copied());
        }
    }
}

fn checkpoints(read: &ReadSide, now: Stamp) {
    let seconds = now.wall.0 / 1_000_000_000;
    if let Some(checkpoints) = &read.checkpoints {
        let counts = checkpoints.counts();
        counter!(CHECKPOINT_SENT, "to" => "peer").absolute(counts.bytes_sent);
        counter!(CHECKPOINT_FAILURES, "to" => "peer").absolute(counts.failures);
        counter!(CHECKPOINT_DAMAGED).absolute(counts.damaged);
        let overhead = checkpoints.overhead();
        counter!(CHECKPOINT_PAID).absolute(overhead.paid.as_secs());
        counter!(CHECKPOINT_HELD).absolute(overhead.held.as_secs());
        counter!(CHECKPOINT_DIVERGENCES).absolute(counts.divergences);
        lags(checkpoints);
        if let Some(durable) = checkpoints.durable_figures() {
            counter!(CHECKPOINT_SENT, "to" => "durable").absolute(durable.bytes_sent);
            counter!(CHECKPOINT_FAILURES, "to" => "durable").absolute(durable.failures);
        }
    }
    for state in read.checkpoints.iter().flat_map(|checkpoints| checkpoints.tiers()) {
        let tier = state.tier.as_str();
        // Empty for runs without a user: caches, and directories from the configuration.
        let uid = owner::owner(&state.run).map_or_else(String::new, |uid| uid.to_string());
        let run = owner::name(&state.run).to_owned();
        gauge!(CHECKPOINT_AGE, "run" => run.clone(), "uid" => uid.clone(), "tier" => tier)
            .set(state.age_s(seconds) as f64);
        gauge!(CHECKPOINT_STEP, "run" => run, "uid" => uid, "tier" => tier).set(state.step as f64);
    }
}

/// Whether replicas keep up. Reasons that do not apply are 0.
fn lags(checkpoints: &Service) {
    for lag in checkpoints.lags() {
        let uid = owner::owner(&lag.copies.run).map_or_else(String::new, |uid| uid.to_string());
        let run = owner::name(&lag.copies.run).to_owned();
        for reason in LagReason::ALL {
            let waits = if reason == lag.reason { lag.copies.seconds() } else { 0 };
            gauge!(CHECKPOINT_BEHIND, "run" => run.clone(), "uid" => uid.clone(), "reason" => reason.as_str())
                .set(waits as f64);
        }
    }
}

const PHASES: [&str; 6] = ["STARTING", "RUNNING", "RECOVERING", "STOPPING", "ENDED", "LOST"];

/// This process itself. Where /proc cannot be read the series are absent, not zero.
fn process() {
    let Ok(stat) = procfs::process::Process::myself().and_then(|myself| myself.stat()) else { return };
    gauge!(PROCESS_RSS).set((stat.rss * procfs::page_size()) as f64);
    let ticks = stat.utime + stat.stime;
    // With fractions; [`page`] writes its type.
    gauge!(PROCESS_CPU).set(ticks as f64 / procfs::ticks_per_second() as f64);
}

fn flag(yes: bool) -> f64 {
    if yes { 1.0 } else { 0.0 }
}
