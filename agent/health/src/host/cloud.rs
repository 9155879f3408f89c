//! The judge of the cloud's announcements for this machine: `host.cloud`.
//!
//! - An announcement for a later day is reported but does not change the state. Only one that starts within
//!   `limits.host.cloud.notice` makes the machine degraded, so that work can be moved in time.
//! - A metadata server that fails briefly is asked again without a report. If it stays silent, the state is unknown;
//!   its earlier announcements still count.
//! - Announcements from before a restart of the agent are not reported twice.
//! - The request that jobs save and end because of an announcement is a separate fact (`leave.rs`).

pub mod amazon;
pub mod azure;
pub mod google;
pub mod leave;
mod time;

use std::collections::{BTreeMap, BTreeSet};

use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::report::SensorReport;
use mainstay_model::settings;
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_model::units::Period;

settings! {
    /// When announcements of the cloud count.
    pub struct CloudLimits {
        /// How long before its start maintenance makes host.cloud degraded; it is reported at once.
        notice: Period = Period::seconds(3600),
        /// How long before the machine is stopped or its host is maintained jobs are asked to save and end.
        leave: Period = Period::seconds(120),
    }
    sections {}
}

/// How long the metadata server must not answer before host.cloud is unknown, once it has answered.
const SILENT_FOR: Span = Span::seconds(120);

/// The component.
const NAME: &str = "host.cloud";
const ANNOUNCED: &str = "cloud_notice";
const OVER: &str = "cloud_notice_over";

/// What the metadata server reports at the moment.
#[derive(Clone, Debug, PartialEq)]
pub struct CloudSample {
    /// The cloud's name: `Google Compute Engine`.
    pub provider: String,
    /// All announcements; or why they are unknown.
    pub notices: Result<Vec<Notice>, String>,
}

/// An announcement for this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Notice {
    /// The cloud's id of the announcement.
    pub id: String,
    /// What will happen.
    pub kind: NoticeKind,
    /// When it starts; `None` if now.
    pub starts: Option<Wall>,
    /// When it is expected to end.
    pub ends: Option<Wall>,
    /// It has started.
    pub ongoing: bool,
    /// More details: `SCHEDULED; it can be rescheduled`.
    pub detail: String,
    /// The key that it was read from: `instance/upcoming-maintenance`.
    pub source: String,
}

/// What will happen to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoticeKind {
    /// The cloud warns that the machine may be taken away soon.
    AtRisk,
    /// It is moved to another host while it runs and pauses for some seconds.
    Migration,
    /// Its host is maintained: the machine is stopped or restarted.
    Maintenance,
    /// It is stopped.
    Termination,
    /// It is taken away, like spot machines.
    Preemption,
}

impl NoticeKind {
    fn describe(self) -> &'static str {
        match self {
            NoticeKind::AtRisk => "the machine may be taken away soon",
            NoticeKind::Migration => "the machine is moved to another host while it runs",
            NoticeKind::Maintenance => "maintenance of the host",
            NoticeKind::Termination => "the machine is stopped",
            NoticeKind::Preemption => "the machine is taken away (preempted)",
        }
    }

    /// State and action when it is near.
    fn weight(self) -> (HealthState, RecommendedAction) {
        match self {
            NoticeKind::AtRisk | NoticeKind::Migration => (HealthState::Degraded, RecommendedAction::None),
            NoticeKind::Maintenance => (HealthState::Degraded, RecommendedAction::ReplaceNode),
            NoticeKind::Termination | NoticeKind::Preemption => {
                (HealthState::Unhealthy, RecommendedAction::ReplaceNode)
            }
        }
    }
}

/// Judges the cloud's announcements.
#[derive(Clone, Debug)]
pub struct CloudJudge {
    limits: CloudLimits,
    /// Reported announcements that are not over, by id.
    reported_notices: BTreeMap<String, String>,
    /// The last announcements, and when they were read.
    last: Option<(Mono, Vec<Notice>)>,
    shown: Option<(HealthState, Mono)>,
    /// The notices for which jobs were asked to leave. A restarted agent asks again: a job may have missed it.
    left_for: BTreeSet<String>,
}

impl CloudJudge {
    /// A judge without any announcement yet.
    pub fn new(limits: CloudLimits) -> CloudJudge {
        let (reported_notices, left_for) = (BTreeMap::new(), BTreeSet::new());
        CloudJudge { limits, reported_notices, last: None, shown: None, left_for }
    }

    /// Restores an observation from before a restart of the agent, of any boot.
    pub fn recall(&mut self, observation: &Observation) {
        let Some(id) = observation.values.get("id").filter(|_| observation.component == NAME) else { return };
        match observation.event.as_str() {
            ANNOUNCED => drop(self.reported_notices.insert(id.clone(), observation.detail.clone())),
            OVER => drop(self.reported_notices.remove(id)),
            _ => {}
        }
    }

    /// Judges the metadata server's report at `now`.
    pub fn step(&mut self, now: Stamp, sample: &CloudSample) -> SensorReport {
        let mut facts = Vec::new();
        let mut problems: Vec<(HealthState, String, RecommendedAction)> = Vec::new();
        match &sample.notices {
            Ok(notices) => {
                self.report(notices, &mut facts);
                self.last = Some((now.mono, notices.clone()));
            }
            Err(why) => {
                let silent_for = self.last.as_ref().map(|(read, _)| now.mono.since(*read));
                if silent_for.is_none_or(|silent| silent >= SILENT_FOR) {
                    let since = silent_for.map(|silent| format!(" for {silent}")).unwrap_or_default();
                    let reason =
                        format!("the metadata server of {} does not answer{since}: {why}", sample.provider);
                    problems.push((HealthState::Unknown, reason, RecommendedAction::None));
                }
            }
        }
        let notices = self.last.as_ref().map(|(_, notices)| notices.as_slice()).unwrap_or_default();
        facts.extend(leave::due(notices, &mut self.left_for, now.wall, self.limits.leave.0));
        let mut later = Vec::new();
        for notice in notices {
            let reason = describe_notice(notice, now.wall);
            if is_past(notice, now.wall) {
                later.push(format!("{reason}, which should be over"));
            } else if is_near(notice, now.wall, self.limits.notice.0) {
                let (state, action) = notice.kind.weight();
                problems.push((state, reason, action));
            } else {
                later.push(reason);
            }
        }
        problems.sort_by_key(|(state, ..)| std::cmp::Reverse(*state));
        let state = problems.first().map_or(HealthState::Healthy, |(state, ..)| *state);
        let action = problems.iter().map(|(.., action)| *action).max().unwrap_or_default();
        let mut reasons: Vec<String> = problems.into_iter().map(|(_, reason, _)| reason).collect();
        reasons.extend(later);
        if reasons.is_empty() {
            reasons.push(format!("{} announces nothing for this machine", sample.provider));
        }
        let evidence = notices.iter().map(|notice| self.evidence(notice)).collect();
        let since = self.shown.filter(|(before, _)| *before == state).map_or(now.mono, |(_, since)| since);
        self.shown = Some((state, since));
        let component = Component {
            name: NAME.to_owned(),
            state,
            reason: reasons.join("; "),
            action,
            evidence,
            read_at: self.last.as_ref().map(|(read, _)| *read),
            since,
            ..Component::default()
        };
        SensorReport { components: vec![component], facts }
    }

    fn evidence(&self, notice: &Notice) -> Evidence {
        let limit =
            (notice.kind == NoticeKind::Maintenance).then(|| format!("starts within {}", self.limits.notice));
        Evidence {
            source: notice.source.clone(),
            reading: notice.detail.clone(),
            limit,
            ..Evidence::default()
        }
    }

    /// Reports new announcements and those that are over.
    fn report(&mut self, notices: &[Notice], facts: &mut Vec<Fact>) {
        for notice in notices {
            // A changed time or state is news again.
            let detail = format!("{}: {}", notice.kind.describe(), notice.detail);
            if self.reported_notices.get(&notice.id) == Some(&detail) {
                continue;
            }
            let weight = match notice.kind.weight() {
                (HealthState::Unhealthy, _) => Weight::Error,
                _ => Weight::Warning,
            };
            facts.push(observed(ANNOUNCED, weight, &notice.id, &detail));
            self.left_for.remove(&notice.id);
            self.reported_notices.insert(notice.id.clone(), detail);
        }
        let gone: Vec<String> = self
            .reported_notices
            .keys()
            .filter(|id| !notices.iter().any(|notice| notice.id == **id))
            .cloned()
            .collect();
        for id in gone {
            let what = self.reported_notices.remove(&id).unwrap_or_default();
            self.left_for.remove(&id);
            facts.push(observed(OVER, Weight::Info, &id, &format!("over, or taken back: {what}")));
        }
    }
}

fn observed(event: &str, weight: Weight, id: &str, detail: &str) -> Fact {
    Fact::Observed(Observation {
        component: NAME.to_owned(),
        event: event.to_owned(),
        weight,
        detail: detail.to_owned(),
        values: [("id".to_owned(), id.to_owned())].into(),
    })
}

fn is_near(notice: &Notice, now: Wall, before: Span) -> bool {
    let Some(starts) = notice.starts.filter(|_| !notice.ongoing) else { return true };
    let before = i64::try_from(before.0).unwrap_or(i64::MAX);
    starts.0.saturating_sub(before) <= now.0
}

/// An announcement that should have ended an hour ago was forgotten by the cloud, unless it is ongoing.
fn is_past(notice: &Notice, now: Wall) -> bool {
    let hour = i64::try_from(Span::seconds(3600).0).unwrap_or(i64::MAX);
    !notice.ongoing && notice.ends.is_some_and(|ends| ends.0.saturating_add(hour) < now.0)
}

fn describe_notice(notice: &Notice, now: Wall) -> String {
    let when = match notice.starts {
        _ if notice.ongoing => "going on now".to_owned(),
        Some(starts) if starts > now => format!("starts in {}", lasting(starts.0.saturating_sub(now.0))),
        Some(_) => "its window has started".to_owned(),
        None => "now".to_owned(),
    };
    format!("{}, {when} ({})", notice.kind.describe(), notice.detail)
}

/// "6 d 3 h", "1 h 20 min", "45 s".
fn lasting(nanoseconds: i64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// Parses the body of an answer as JSON.
fn json(body: &str) -> Result<serde_json::Value, String> {
    serde_json::from_str(body).map_err(|error| format!("no JSON: {error}"))
}
