//! Example incidents to test a policy: a TOML file with a table for each, and the expected decision.
//!
//! ```toml
//! [[incident]]
//! name = "a killed rank is restarted"
//! cause = { kind = "signal", signal = 9 }
//! step = 40
//! expect = "restart_in_job"
//! ```

use std::collections::BTreeMap;

use mainstay_diagnosis::repeats::{OnHost, SeenBefore};
use mainstay_hang::HangKind;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::{Attempt, Incident as Number, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_model::units::Period;
use mainstay_model::verdict::{Cause, Doubts, FaultDomain, Verdict};
use mainstay_recovery::policy::{Budget, Case, CauseKind, Experience, Host, JobState, PastFailure, Settings};
use serde::Deserialize;

use mainstay_recovery::policy::rung_named;

/// The time of all example incidents: late enough for any history.
const NOW: Mono = Mono(1_000_000_000_000_000_000);

/// An example case.
#[derive(Clone, Debug, PartialEq)]
pub struct Incident {
    /// The name, which describes the case.
    pub name: String,
    /// The expected action; none if the decision is only shown.
    pub expect: Option<String>,
    /// The expected wait, in seconds; none if any time is accepted.
    pub expect_after: Option<f64>,
    /// The settings of the job.
    pub settings: Settings,
    verdict: Verdict,
    past: Vec<PastFailure>,
    earlier: Vec<Experience>,
    job: JobState,
    unhealthy: Vec<Component>,
    held: Vec<String>,
    waited: Span,
    last_step: Option<Mono>,
    seen: SeenBefore,
    spares: u32,
}

impl Incident {
    /// The case for the policy.
    pub fn case(&self) -> Case<'_> {
        Case {
            verdict: &self.verdict,
            past: &self.past,
            earlier: &self.earlier,
            job: self.job,
            host: Host {
                unhealthy: &self.unhealthy,
                held: &self.held,
                waited: self.waited,
                last_step: self.last_step,
            },
            seen: Some(&self.seen),
            spares: self.spares,
            now: NOW,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    incident: Vec<IncidentFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IncidentFile {
    name: String,
    expect: Option<String>,
    expect_after: Option<f64>,
    cause: WrittenCause,
    #[serde(default = "unknown")]
    domain: FaultDomain,
    class: Option<String>,
    #[serde(default)]
    deterministic: bool,
    #[serde(default = "half")]
    confidence: f64,
    step: Option<u64>,
    data: Option<u64>,
    #[serde(default = "yes")]
    heartbeats: bool,
    #[serde(default)]
    cannot_run: bool,
    #[serde(default)]
    culprit: u32,
    #[serde(default = "one")]
    exit: i32,
    #[serde(default = "minute")]
    lived: Period,
    reached: Option<u64>,
    committed: Option<u64>,
    #[serde(default)]
    past: Vec<WrittenPast>,
    #[serde(default)]
    earlier: Vec<WrittenExperience>,
    #[serde(default)]
    #[serde(alias = "sick")]
    unhealthy: Vec<WrittenComponent>,
    #[serde(default)]
    held: Vec<String>,
    waited: Option<Period>,
    last_step_ago: Option<Period>,
    #[serde(default)]
    seen: WrittenSeen,
    #[serde(default)]
    spares: u32,
    #[serde(default)]
    job: WrittenJob,
}

/// Hosts in `at_this_place` also count as `elsewhere`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSeen {
    #[serde(default)]
    elsewhere: Vec<String>,
    #[serde(default)]
    at_this_place: Vec<String>,
    #[serde(default)]
    in_earlier_runs: u32,
    #[serde(default)]
    #[serde(alias = "heard_by")]
    answered_by: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenCause {
    kind: String,
    #[serde(default)]
    exception: String,
    #[serde(default)]
    fingerprint: String,
    #[serde(default)]
    code: i32,
    #[serde(default)]
    signal: i32,
    hang: Option<HangKind>,
    #[serde(default)]
    place: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenPast {
    #[serde(default = "minute")]
    ago: Period,
    cause: WrittenCause,
    step: Option<u64>,
    data: Option<u64>,
    #[serde(default = "minute")]
    lived: Period,
    #[serde(default = "in_job")]
    action: String,
    reached: Option<u64>,
    committed: Option<u64>,
    #[serde(default = "yes")]
    heartbeats: bool,
    back_after: Option<Period>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenExperience {
    cause: String,
    action: String,
    tried: f64,
    helped: f64,
    seconds: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenComponent {
    name: String,
    #[serde(default = "unhealthy")]
    state: HealthState,
    #[serde(default = "no_reason")]
    reason: String,
    #[serde(default)]
    action: RecommendedAction,
    #[serde(default = "minute")]
    since: Period,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenJob {
    actions: Vec<String>,
    max_restarts: u32,
    window: Option<Period>,
    budgets: BTreeMap<String, WrittenBudget>,
    ready_within: ReadyWithin,
    hand_back_exit: i32,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenBudget {
    max_restarts: u32,
    window: Option<Period>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ReadyWithin {
    Limit(Period),
    Off(String),
}

impl Default for WrittenJob {
    fn default() -> WrittenJob {
        WrittenJob {
            actions: Vec::new(),
            max_restarts: 3,
            window: None,
            budgets: BTreeMap::new(),
            ready_within: ReadyWithin::Limit(minute()),
            hand_back_exit: mainstay_recovery::policy::HAND_BACK_EXIT,
        }
    }
}

fn unknown() -> FaultDomain {
    FaultDomain::Unknown
}

fn unhealthy() -> HealthState {
    HealthState::Unhealthy
}

fn no_reason() -> String {
    "it is unhealthy".to_owned()
}

fn in_job() -> String {
    "restart_in_job".to_owned()
}

fn half() -> f64 {
    0.5
}

fn yes() -> bool {
    true
}

fn one() -> i32 {
    1
}

fn minute() -> Period {
    Period::seconds(60)
}

/// Reads a file of incidents.
///
/// # Errors
/// The file is invalid. The error is readable text, with the line if it is known.
pub fn read(text: &str) -> Result<Vec<Incident>, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    file.incident
        .into_iter()
        .map(|written| {
            let name = written.name.clone();
            incident(written).map_err(|what| format!("incident {name:?}: {what}"))
        })
        .collect()
}

fn incident(written: IncidentFile) -> Result<Incident, String> {
    if let Some(expect) = &written.expect {
        rung_named(expect)?;
    }
    let past: Result<Vec<PastFailure>, String> = written.past.into_iter().map(past).collect();
    let past = past?;
    let earlier: Result<Vec<Experience>, String> = written.earlier.into_iter().map(experience).collect();
    let cause = cause(written.cause)?;
    let attempt = Attempt(u32::try_from(past.len()).unwrap_or(u32::MAX));
    let verdict = Verdict {
        incident: Number(past.len() as u64 + 1),
        attempt,
        headline: written.name.clone(),
        cause,
        domain: written.domain,
        class: written.class,
        deterministic: written.deterministic,
        doubts: Doubts::default(),
        confidence: written.confidence,
        culprit_confidence: None,
        cannot_run: written.cannot_run,
        culprit: Some(Rank(written.culprit)),
        host: None,
        victims: Vec::new(),
        step: written.step,
        data: written.data,
        heartbeats: written.heartbeats,
        fault_at: NOW,
        detected_at: NOW,
        evidence: Vec::new(),
    };
    let unhealthy = written.unhealthy.into_iter().map(|written| Component {
        name: written.name,
        state: written.state,
        reason: written.reason,
        action: written.action,
        since: ago(written.since),
        ..Component::default()
    });
    Ok(Incident {
        name: written.name,
        expect: written.expect,
        expect_after: written.expect_after,
        settings: settings(written.job)?,
        verdict,
        past,
        earlier: earlier?,
        // The restarts that waiting ranks make possible are listed in the job's actions.
        job: JobState {
            exit: written.exit,
            lived: written.lived.0,
            reached: written.reached.or(written.step),
            committed: written.committed,
            ranks: 1,
            waiting: 0,
        },
        unhealthy: unhealthy.collect(),
        held: written.held,
        waited: written.waited.map_or(Span::default(), |period| period.0),
        last_step: written.last_step_ago.map(ago),
        seen: seen(written.seen),
        spares: written.spares,
    })
}

fn seen(written: WrittenSeen) -> SeenBefore {
    let WrittenSeen { elsewhere, at_this_place, in_earlier_runs, answered_by } = written;
    let only_elsewhere = elsewhere.into_iter().filter(|host| !at_this_place.contains(host));
    let elsewhere = only_elsewhere.map(|host| OnHost { host, at_this_place: false });
    let here = at_this_place.iter().map(|host| OnHost { host: host.clone(), at_this_place: true });
    SeenBefore {
        elsewhere: elsewhere.chain(here).collect(),
        in_earlier_runs,
        answered_by,
        ..SeenBefore::default()
    }
}

fn past(written: WrittenPast) -> Result<PastFailure, String> {
    Ok(PastFailure {
        decided_at: ago(written.ago),
        cause: cause(written.cause)?,
        step: written.step,
        data: written.data,
        lived: written.lived.0,
        rung: rung_named(&written.action)?.ok_or("action: waiting is not a restart")?,
        reached: written.reached.or(written.step),
        committed: written.committed,
        heartbeats: written.heartbeats,
        back_after: written.back_after.map(|period| period.0),
    })
}

fn experience(written: WrittenExperience) -> Result<Experience, String> {
    let WrittenExperience { cause, action, tried, helped, seconds } = written;
    let cause = CauseKind::parse(&cause).ok_or_else(|| unknown_kind(&cause))?;
    let rung = rung_named(&action)?.ok_or("action: waiting is not a restart")?;
    let known = Experience { cause, rung, tried, helped, seconds };
    let beyond = "earlier: `tried` is 8 at most, `helped` at most as many, and `seconds` no less than 0";
    if known.is_sound() { Ok(known) } else { Err(beyond.to_owned()) }
}

fn cause(written: WrittenCause) -> Result<Cause, String> {
    let WrittenCause { kind, exception, fingerprint, code, signal, hang, place } = written;
    Ok(match CauseKind::parse(&kind) {
        Some(CauseKind::Exception) => Cause::Exception { exception, fingerprint },
        Some(CauseKind::ExitCode) => Cause::ExitCode { code },
        Some(CauseKind::Signal) => Cause::Signal { signal },
        Some(CauseKind::OutOfMemory) => Cause::OutOfMemory,
        Some(CauseKind::Hang) => Cause::Hang { hang: hang.unwrap_or(HangKind::AllStill), place },
        Some(CauseKind::HostLost) => Cause::HostLost { host: place },
        Some(CauseKind::Start) => Cause::StartFailed,
        None => return Err(unknown_kind(&kind)),
    })
}

fn unknown_kind(kind: &str) -> String {
    let kinds: Vec<&str> = CauseKind::ALL.into_iter().map(CauseKind::as_str).collect();
    format!("there is no cause of kind {kind:?}; there are {}", kinds.join(", "))
}

fn settings(written: WrittenJob) -> Result<Settings, String> {
    let window = |period: Option<Period>| period.map(|period| period.0);
    let mut settings =
        Settings::from(Budget { max_restarts: written.max_restarts, window: window(written.window) });
    for action in &written.actions {
        settings.rungs = rung_named(action)?.map_or(settings.rungs, |rung| settings.rungs.with(rung));
    }
    for (kind, budget) in written.budgets {
        let kind = CauseKind::parse(&kind).ok_or_else(|| unknown_kind(&kind))?;
        let (max_restarts, window) = (budget.max_restarts, window(budget.window));
        settings.by_cause.insert(kind, Budget { max_restarts, window });
    }
    settings.ready_within = match written.ready_within {
        ReadyWithin::Limit(period) => Some(period.0),
        ReadyWithin::Off(word) if word == "off" => None,
        ReadyWithin::Off(word) => {
            return Err(format!("job.ready_within: {word:?} is not a length of time, nor \"off\""));
        }
    };
    settings.hand_back_exit = written.hand_back_exit;
    Ok(settings)
}

fn ago(period: Period) -> Mono {
    Mono(NOW.0.saturating_sub(period.0.0))
}
