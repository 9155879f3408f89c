//! `RunPreflight`: the checks before a start, from what the sensors that watch the host have read. Reads no device;
//! it only waits for sensors that have not looked yet. Active probes, if requested, run in child processes after
//! that, one request at a time.

use std::sync::Arc;
use std::time::Duration;

use mainstay_health::hardware::gpu::GpuReading;
use mainstay_health::host::preflight::{Check, CheckVerdict, Group, Requirement, conclude, overall, summary};
use mainstay_model::health::HealthState;
use mainstay_model::time::{Mono, Span};
use mainstay_proto::v1::run_preflight_response::Item;
use mainstay_proto::v1::{PreflightSummary, RunPreflightRequest, RunPreflightResponse};
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc};
use tonic::Status;

use super::refusal::{Reason, invalid};
use super::stream::{Caller, CallerGone, End};
use super::{Mode, ReadSide};
use mainstay_journal::state::{Looking, StateReader};
use mainstay_sensors::source::active::{Deep, Gpus};
use mainstay_view::convert::{duration, preflight as convert, span};

/// How long a check of what is watched may take.
const USUAL_DEADLINE: Span = Span::seconds(10);
const SHORTEST_DEADLINE: Span = Span::millis(10);
const LONGEST_DEADLINE: Span = Span::seconds(600);

/// A look that has not returned for this long hangs, and its previous reading no longer counts.
const HANGS_AFTER: Span = Span::seconds(60);

/// How long a caller may take to read a message.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// How long an active probe may take.
const USUAL_PROBE: Span = Span::seconds(30);

/// The component for whether GPUs can be read.
const DRIVER: &str = "gpu.driver";

/// Active probes, for callers who may run them. They load the host: one request at a time.
#[derive(Clone, Debug)]
pub struct DeepChecks(Arc<Mutex<Deep>>);

impl DeepChecks {
    /// These.
    pub fn new(deep: Deep) -> DeepChecks {
        DeepChecks(Arc::new(Mutex::new(deep)))
    }
}

/// The request.
pub(super) struct PreflightPlan {
    groups: Vec<Group>,
    required: Vec<Requirement>,
    deadline: Span,
    deep: Option<OwnedMutexGuard<Deep>>,
}

impl PreflightPlan {
    /// Reads a request.
    ///
    /// # Errors
    /// The server does not watch the host, or a requirement is of no group.
    pub(super) fn from_request(
        read: &ReadSide,
        request: &RunPreflightRequest,
    ) -> Result<PreflightPlan, Status> {
        if read.about.mode == Mode::Launcher {
            return Err(Reason::AGENT_ONLY
                .refuse("a launcher does not watch the host: ask the agent, or run `mainstay check`"));
        }
        let mut deep = None;
        if request.deep {
            let probes = read.deep.as_ref().ok_or_else(|| {
                Reason::UNIX_SOCKET_ONLY
                    .refuse("active probes load the host: they are for callers on the agent's Unix socket")
            })?;
            let mut guard = probes.0.clone().try_lock_owned().map_err(|_| {
                Reason::PROBES_RUNNING
                    .refuse("active probes are under way here: try again when they are done")
            })?;
            let each = request.deadline.as_ref().map_or(USUAL_PROBE, span);
            let each = each.0.clamp(SHORTEST_DEADLINE.0, LONGEST_DEADLINE.0);
            guard.plan.deadline = Duration::from_nanos(each);
            deep = Some(guard);
        }
        let mut groups: Vec<Group> = request.groups().filter_map(convert::group_of).collect();
        if groups.is_empty() {
            groups = Group::ALL.to_vec();
        }
        let required = request.required.iter().map(|required| {
            let group = convert::group_of(required.group())
                .ok_or_else(|| invalid("required.group", "name the group"))?;
            Ok(Requirement { group, count: required.count })
        });
        let deadline = request.deadline.as_ref().map_or(USUAL_DEADLINE, span);
        Ok(PreflightPlan {
            groups,
            required: required.collect::<Result<_, Status>>()?,
            deadline: Span(deadline.0.clamp(SHORTEST_DEADLINE.0, LONGEST_DEADLINE.0)),
            deep,
        })
    }
}

/// Sends the checks and then their summary.
pub(super) async fn run(read: ReadSide, wanted: PreflightPlan, caller: Caller<RunPreflightResponse>) -> End {
    let began = (read.clock)().mono;
    let until = Duration::from_nanos(wanted.deadline.0);
    if tokio::time::timeout(until, all_have_looked(&read.snapshots)).await == Ok(false) {
        return End::snapshots_gone();
    }
    let now = (read.clock)().mono;
    let (checks, silent) = watched(&read.snapshots, now, wanted.deadline);
    let silent: Vec<Group> = silent.iter().map(|sensor| Group::from_name(sensor)).collect();
    let mut checks = conclude(checks, &wanted.groups, &wanted.required, &silent);
    for check in &checks {
        if let Err(left) = report(&caller, check).await {
            return left.into();
        }
    }
    if let Some(deep) = wanted.deep {
        match probe(&read, deep, wanted.groups, &caller).await {
            Ok(probed) => checks.extend(probed),
            Err(left) => return left.into(),
        }
    }
    let took = (read.clock)().mono.since(began);
    let last = Item::Summary(PreflightSummary {
        verdict: convert::verdict(overall(&checks)).into(),
        summary: summary(&checks, took),
        took: Some(duration(took)),
    });
    match caller.send(RunPreflightResponse { item: Some(last) }).await {
        Ok(()) | Err(CallerGone) => End::Left,
    }
}

async fn report(caller: &Caller<RunPreflightResponse>, check: &Check) -> Result<(), CallerGone> {
    let item = RunPreflightResponse { item: Some(Item::Check(convert::check(check))) };
    // A caller that does not read must not block the active probes of others.
    tokio::time::timeout(READ_WITHIN, caller.send(item)).await.unwrap_or(Err(CallerGone))
}

/// Runs the active probes on a thread that may block, and reports each result. If the caller leaves, the probe in
/// progress is the last.
async fn probe(
    read: &ReadSide,
    deep: OwnedMutexGuard<Deep>,
    groups: Vec<Group>,
    caller: &Caller<RunPreflightResponse>,
) -> Result<Vec<Check>, CallerGone> {
    let (done, mut reported) = mpsc::channel(1);
    let gpus = gpus(&read.snapshots);
    tokio::task::spawn_blocking(move || {
        deep.run(&groups, || gpus, |check| done.blocking_send(check).is_ok());
    });
    let mut checks = Vec::new();
    while let Some(check) = reported.recv().await {
        report(caller, &check).await?;
        checks.push(check);
    }
    Ok(checks)
}

/// The GPUs from the agent's last reading: no second process calls a driver that may hang.
fn gpus(snapshots: &StateReader) -> Gpus {
    let view = snapshots.view();
    let readings: Vec<GpuReading> = view.gpus.iter().filter_map(|gpu| gpu.reading.clone()).collect();
    let driver = view.components.get(DRIVER);
    match driver.filter(|driver| driver.state == HealthState::Unknown) {
        Some(driver) => Gpus::Unknown(driver.reason.clone()),
        None if readings.is_empty() => Gpus::None,
        None => Gpus::Read(readings),
    }
}

/// Waits until every sensor has looked. False if nothing publishes snapshots any longer.
pub(super) async fn all_have_looked(snapshots: &StateReader) -> bool {
    let mut snapshots = snapshots.clone();
    while !snapshots.roster().is_complete() {
        if !snapshots.changed().await {
            return false;
        }
    }
    !snapshots.is_gone()
}

/// The components as checks, including sensors that did not answer, and the names of those sensors.
pub(super) fn watched(snapshots: &StateReader, now: Mono, deadline: Span) -> (Vec<Check>, Vec<String>) {
    let sensors = snapshots.roster().sensors();
    let sensor_of =
        |component: &str| sensors.iter().find(|(_, sensor)| sensor.components.contains(component));
    let view = snapshots.view();
    let mut checks: Vec<Check> = view
        .components
        .values()
        .map(|component| {
            let mut check = Check::of_component(component);
            if let Some((name, sensor)) = sensor_of(&component.name) {
                check.took = sensor.took;
                if let Some(hanging) = hangs(sensor, now) {
                    check.verdict = CheckVerdict::Unknown;
                    check.reason = format!(
                        "its check ({name}) has not returned for {hanging}; last result: {}",
                        check.reason
                    );
                }
            }
            check
        })
        .collect();
    let mut silent = Vec::new();
    for (name, sensor) in &sensors {
        if sensor.took.is_none() {
            silent.push(name.clone());
            checks.push(Check::unanswered(name, Group::from_name(name), deadline));
        }
    }
    (checks, silent)
}

/// For how long a sensor's look has not returned, if that is too long.
fn hangs(sensor: &Looking, now: Mono) -> Option<Span> {
    let since = now.since(sensor.began?);
    (since > HANGS_AFTER).then_some(since)
}
