//! The Prometheus metrics. Values are read from the newest snapshot at each scrape, so a job that is gone leaves no series.
//! Names and meanings are in `docs/reference/metrics.md`; a test compares them.

use mainstay_checkpoint::lag::LagReason;
use mainstay_checkpoint::owner;
use mainstay_health::hardware::gpu::GpuView;
use mainstay_health::hardware::tpu::metric as tpu;
use mainstay_model::health::HealthState;
use mainstay_model::time::Stamp;
use mainstay_tier::peer::Service;
use mainstay_view::node::{JobPhase, JobView, NodeView};
use metrics::{Unit, counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusBuilder;

use super::{Mode, ReadSide, saving};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only increases, until the process restarts.
    Counter,
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
const GPU_MEMORY_USED: &str = "mainstay_gpu_memory_used_bytes";
const GPU_MEMORY_TOTAL: &str = "mainstay_gpu_memory_total_bytes";
const GPU_ECC: &str = "mainstay_gpu_ecc_errors";
const GPU_LINKS_UP: &str = "mainstay_gpu_nvlinks_up";
const GPU_LINKS_EXPECTED: &str = "mainstay_gpu_nvlinks_expected";
const GPU_PCIE_REPLAYS: &str = "mainstay_gpu_pcie_replays";
const GPU_PROCESSES: &str = "mainstay_gpu_processes";
const JOB_PHASE: &str = "mainstay_job_phase";
const JOB_STEP: &str = "mainstay_job_step";
const JOB_PACE: &str = "mainstay_job_steps_per_second";
const JOB_ATTEMPT: &str = "mainstay_job_attempt";
const JOB_RESTARTS: &str = "mainstay_job_restarts_total";
const JOB_POLICY_TROUBLES: &str = "mainstay_job_policy_troubles_total";
const JOB_RESTARTS_BY_RUNG: &str = "mainstay_job_restarts_by_rung_total";
const JOB_FAILURES: &str = "mainstay_job_failures_total";
const JOB_HANG: &str = "mainstay_job_hang";
const JOB_FINDING: &str = "mainstay_job_finding";
const JOB_FINDING_COST: &str = "mainstay_job_finding_cost_ratio";
const JOB_SAVE_INTERVAL: &str = "mainstay_job_save_interval_seconds";
const JOB_SAVE_COST: &str = "mainstay_job_save_cost_ratio";
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
    gauge_of(GPU_TEMPERATURE, &["gpu", "uuid"], "Temperature of the GPU, in degrees Celsius."),
    gauge_of(GPU_POWER, &["gpu", "uuid"], "Power draw of the GPU, in watts."),
    gauge_of(GPU_UTILIZATION, &["gpu", "uuid"], "Share of time in which the GPU was busy, in percent."),
    gauge_of(GPU_MEMORY_USED, &["gpu", "uuid"], "GPU memory in use, in bytes."),
    gauge_of(GPU_MEMORY_TOTAL, &["gpu", "uuid"], "Total GPU memory, in bytes."),
    gauge_of(
        GPU_ECC,
        &["gpu", "kind", "uuid"],
        "Memory errors since the GPU's last reset, by kind: corrected, uncorrected.",
    ),
    gauge_of(GPU_LINKS_UP, &["gpu", "uuid"], "NVLinks that are up."),
    gauge_of(GPU_LINKS_EXPECTED, &["gpu", "uuid"], "NVLinks that should be up."),
    gauge_of(GPU_PCIE_REPLAYS, &["gpu", "uuid"], "PCIe packets replayed since the GPU's last reset."),
    gauge_of(GPU_PROCESSES, &["gpu", "uuid"], "Processes that use the GPU."),
    gauge_of(
        tpu::DUTY_CYCLE,
        &["component"],
        "Share of time in which the chip's TensorCores were busy, in percent.",
    ),
    gauge_of(tpu::HBM_USED, &["component"], "Memory of the TPU chip in use, in bytes."),
    gauge_of(tpu::HBM_TOTAL, &["component"], "Memory of the TPU chip, in bytes."),
    gauge_of(
        tpu::HBM_BANDWIDTH,
        &["component"],
        "Share of the TPU chip's memory bandwidth in use, in percent.",
    ),
    gauge_of(JOB_PHASE, &["job", "phase"], "1 for the current phase of the job, 0 for the others."),
    gauge_of(JOB_STEP, &["job"], "The newest step that all ranks are known to have completed."),
    gauge_of(JOB_PACE, &["job"], "Steps per second over the last minute."),
    gauge_of(JOB_ATTEMPT, &["job"], "The current attempt, from 0."),
    Metric { name: JOB_RESTARTS, kind: Kind::Counter, labels: &["job"], help: "Restarts so far." },
    Metric {
        name: JOB_RESTARTS_BY_RUNG,
        kind: Kind::Counter,
        labels: &["job", "rung"],
        help: "Restarts so far by kind: in_process, respawn_ranks (only the lost ranks), in_job (all ranks).",
    },
    Metric {
        name: JOB_POLICY_TROUBLES,
        kind: Kind::Counter,
        labels: &["job"],
        help: "Decisions of the built-in policy because the job's policy file failed or was overruled.",
    },
    Metric {
        name: JOB_FAILURES,
        kind: Kind::Counter,
        labels: &["cause", "domain", "job"],
        help: "Failures so far, by kind of cause and by fault domain: user, hardware, infrastructure, platform, unknown.",
    },
    gauge_of(JOB_HANG, &["job"], "1 while ranks are alive and make no progress, 0 otherwise."),
    gauge_of(
        JOB_FINDING,
        &["job", "number", "what"],
        "1 while the job has this finding: a problem in which no rank has failed.",
    ),
    gauge_of(
        JOB_FINDING_COST,
        &["job", "number", "what"],
        "Share of the step time that the finding costs, from 0 to 1.",
    ),
    gauge_of(
        JOB_SAVE_INTERVAL,
        &["job", "tier"],
        "Seconds between saves that cost least, from the measured cost of saves and failures, by tier: memory, disk, peer, durable.",
    ),
    gauge_of(
        JOB_SAVE_COST,
        &["interval", "job"],
        "Share of wall-clock time spent on saves, repeated work and restores, by interval: advised, present.",
    ),
    gauge_of(
        CHECKPOINT_AGE,
        &["run", "tier", "uid"],
        "Seconds since the newest step that is whole in the tier was sealed: memory, disk, peer, durable.",
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
    gauge_of(RANK_STEP, &["job", "rank"], "The last step that the rank completed."),
    gauge_of(RANK_HEARTBEAT_AGE, &["job", "rank"], "Seconds since the rank's last heartbeat."),
    gauge_of(
        RANK_SELF_TIME,
        &["job", "rank"],
        "Median time of the rank's last 16 steps without the time spent waiting for other ranks, in seconds.",
    ),
    gauge_of(
        RANK_AGAINST_PEERS,
        &["job", "rank"],
        "The rank's self time relative to the median of its peers: 1.1 is 10 % slower.",
    ),
    gauge_of(
        RANK_WAIT,
        &["job", "rank"],
        "Share of a step in which the rank waits for other ranks, from 0 to 1.",
    ),
    gauge_of(JOURNAL_NEWEST, &[], "The cursor of the newest event."),
    gauge_of(JOURNAL_OLDEST, &[], "The cursor of the oldest event that is kept."),
    gauge_of(JOURNAL_WRITABLE, &[], "1 while the journal is writable, 0 while events are kept in memory."),
    gauge_of(PROCESS_RSS, &[], "Resident memory of this process, in bytes."),
    gauge_of(
        PROCESS_CPU,
        &[],
        "CPU time used by this process, in seconds. It only increases; its type is gauge because it has fractions.",
    ),
    gauge_of(PROCESS_START, &[], "When this process started, in seconds since the Unix epoch."),
];

/// The page for one scrape.
pub(super) fn render(read: &ReadSide, now: Stamp) -> String {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    with_local_recorder(&recorder, || {
        describe();
        let view = read.snapshots.view();
        about(read);
        node(&view, now);
        view.gpus.iter().for_each(gpu);
        view.jobs.values().for_each(|of| job(of, read, now));
        checkpoints(read, now);
        gauge!(JOURNAL_NEWEST).set(read.snapshots.newest() as f64);
        gauge!(JOURNAL_OLDEST).set(read.snapshots.oldest() as f64);
        gauge!(JOURNAL_WRITABLE).set(flag(read.snapshots.journal_error().is_none()));
        process();
    });
    handle.render()
}

fn describe() {
    for metric in METRICS {
        match metric.kind {
            Kind::Gauge => describe_gauge!(metric.name, Unit::Count, metric.help),
            Kind::Counter => describe_counter!(metric.name, Unit::Count, metric.help),
        }
    }
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
        }
        // A reading of an earlier boot has no age.
        if let Some(at) = component.read_at.filter(|at| *at <= now.mono) {
            gauge!(COMPONENT_READ_AGE, "component" => component.name.clone())
                .set(now.mono.since(at).as_seconds());
        }
    }
}

/// A GPU in trouble has no series: its readings are not reliable.
fn gpu(gpu: &GpuView) {
    let Some(reading) = gpu.reading.as_ref().filter(|reading| reading.trouble.is_none()) else { return };
    let uuid = reading.identity.as_ref().map(|identity| identity.uuid.clone()).unwrap_or_default();
    let set = |name: &'static str, value: Option<f64>| {
        if let Some(value) = value {
            gauge!(name, "gpu" => gpu.address.to_string(), "uuid" => uuid.clone()).set(value);
        }
    };
    set(GPU_TEMPERATURE, reading.temperature.value().map(|degrees| f64::from(*degrees)));
    set(GPU_POWER, reading.power.value().map(|milliwatts| f64::from(*milliwatts) / 1000.0));
    set(GPU_UTILIZATION, reading.utilization.value().map(|percent| f64::from(*percent)));
    set(GPU_MEMORY_USED, reading.memory.value().map(|(used, _)| *used as f64));
    set(GPU_MEMORY_TOTAL, reading.memory.value().map(|(_, total)| *total as f64));
    set(GPU_LINKS_UP, gpu.links.map(|(up, _)| f64::from(up)));
    set(GPU_LINKS_EXPECTED, gpu.links.map(|(_, expected)| f64::from(expected)));
    set(GPU_PCIE_REPLAYS, reading.pcie_replays.value().map(|count| f64::from(*count)));
    set(GPU_PROCESSES, reading.processes.value().map(|processes| processes.len() as f64));
    for (kind, count) in [("corrected", &reading.ecc_corrected), ("uncorrected", &reading.ecc_volatile)] {
        if let Some(count) = count.value() {
            let address = gpu.address.to_string();
            gauge!(GPU_ECC, "gpu" => address, "uuid" => uuid.clone(), "kind" => kind).set(*count as f64);
        }
    }
}

const STATES: [(HealthState, &str); 4] = [
    (HealthState::Healthy, "HEALTHY"),
    (HealthState::Degraded, "DEGRADED"),
    (HealthState::Unhealthy, "UNHEALTHY"),
    (HealthState::Unknown, "UNKNOWN"),
];

fn job(job: &JobView, read: &ReadSide, now: Stamp) {
    let id = &job.id.0;
    let current = phase_label(job.phase);
    for phase in PHASES {
        gauge!(JOB_PHASE, "job" => id.clone(), "phase" => phase).set(flag(phase == current));
    }
    gauge!(JOB_ATTEMPT, "job" => id.clone()).set(job.attempt.0);
    counter!(JOB_RESTARTS, "job" => id.clone()).absolute(job.restarts.into());
    counter!(JOB_POLICY_TROUBLES, "job" => id.clone()).absolute(job.policy_troubles.into());
    let of_all = job.restarts.saturating_sub(job.restarts_in_process + job.restarts_of_some);
    let by_rung = [
        ("in_process", job.restarts_in_process),
        ("respawn_ranks", job.restarts_of_some),
        ("in_job", of_all),
    ];
    for (rung, count) in by_rung {
        counter!(JOB_RESTARTS_BY_RUNG, "job" => id.clone(), "rung" => rung).absolute(count.into());
    }
    for ((cause, domain), count) in &job.failures {
        counter!(JOB_FAILURES, "job" => id.clone(), "cause" => cause.word(), "domain" => *domain)
            .absolute((*count).into());
    }
    if let Some(step) = job.step {
        gauge!(JOB_STEP, "job" => id.clone()).set(step as f64);
    }
    // The heartbeats of an ended job grow older forever and must not cause an alert.
    if matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost) {
        return;
    }
    gauge!(JOB_HANG, "job" => id.clone()).set(flag(job.hang.is_some()));
    if let Some(pace) = read.pace.of(&job.id, now.mono).filter(|_| job.phase == JobPhase::Running) {
        gauge!(JOB_PACE, "job" => id.clone()).set(pace);
    }
    for (tier, every) in saving::by_tier(job, read.checkpoints.as_deref()) {
        gauge!(JOB_SAVE_INTERVAL, "job" => id.clone(), "tier" => tier.word()).set(every);
    }
    if let Some(saving) = &job.saving {
        gauge!(JOB_SAVE_COST, "job" => id.clone(), "interval" => "advised").set(saving.cost);
        gauge!(JOB_SAVE_COST, "job" => id.clone(), "interval" => "present").set(saving.cost_was);
    }
    for finding in job.findings.values() {
        let (what, number) = (finding.what.word(), finding.finding.to_string());
        gauge!(JOB_FINDING, "job" => id.clone(), "what" => what, "number" => number.clone()).set(1.0);
        if let Some(cost) = finding.cost_percent {
            gauge!(JOB_FINDING_COST, "job" => id.clone(), "what" => what, "number" => number)
                .set(cost / 100.0);
        }
    }
    for rank in job.ranks.values() {
        let Some(beat) = &rank.beat else { continue };
        let number = rank.rank.0.to_string();
        if let Some(step) = beat.step {
            gauge!(RANK_STEP, "job" => id.clone(), "rank" => number.clone()).set(step as f64);
        }
        let pace = [
            (RANK_SELF_TIME, beat.pace.self_time.map(|own| own.as_seconds())),
            (RANK_AGAINST_PEERS, beat.pace.against_peers),
            (RANK_WAIT, beat.pace.wait_share),
        ];
        for (name, value) in pace {
            if let Some(value) = value {
                gauge!(name, "job" => id.clone(), "rank" => number.clone()).set(value);
            }
        }
        if beat.at.0 > 0 {
            gauge!(RANK_HEARTBEAT_AGE, "job" => id.clone(), "rank" => number)
                .set(now.mono.since(beat.at).as_seconds());
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
    for of in read.checkpoints.iter().flat_map(|checkpoints| checkpoints.tiers()) {
        let tier = of.tier.word();
        // Empty for runs without a user: caches, and directories from the configuration.
        let uid = owner::owner(&of.run).map_or_else(String::new, |uid| uid.to_string());
        let run = owner::name(&of.run).to_owned();
        gauge!(CHECKPOINT_AGE, "run" => run.clone(), "uid" => uid.clone(), "tier" => tier)
            .set(of.age_s(seconds) as f64);
        gauge!(CHECKPOINT_STEP, "run" => run, "uid" => uid, "tier" => tier).set(of.step as f64);
    }
}

/// Whether replicas keep up. Reasons that do not apply are 0.
fn lags(checkpoints: &Service) {
    for lag in checkpoints.lags() {
        let uid = owner::owner(&lag.of.run).map_or_else(String::new, |uid| uid.to_string());
        let run = owner::name(&lag.of.run).to_owned();
        for reason in LagReason::ALL {
            let waits = if reason == lag.reason { lag.of.seconds() } else { 0 };
            gauge!(CHECKPOINT_BEHIND, "run" => run.clone(), "uid" => uid.clone(), "reason" => reason.word())
                .set(waits as f64);
        }
    }
}

const PHASES: [&str; 6] = ["STARTING", "RUNNING", "RECOVERING", "STOPPING", "ENDED", "LOST"];

fn phase_label(phase: JobPhase) -> &'static str {
    match phase {
        JobPhase::Starting => "STARTING",
        JobPhase::Running => "RUNNING",
        JobPhase::Recovering => "RECOVERING",
        JobPhase::Stopping => "STOPPING",
        JobPhase::Ended(_) => "ENDED",
        JobPhase::Lost => "LOST",
    }
}

/// This process itself. Where /proc cannot be read the series are absent, not zero.
fn process() {
    let Ok(stat) = procfs::process::Process::myself().and_then(|myself| myself.stat()) else { return };
    gauge!(PROCESS_RSS).set((stat.rss * procfs::page_size()) as f64);
    let ticks = stat.utime + stat.stime;
    gauge!(PROCESS_CPU).set(ticks as f64 / procfs::ticks_per_second() as f64);
}

fn flag(yes: bool) -> f64 {
    if yes { 1.0 } else { 0.0 }
}
