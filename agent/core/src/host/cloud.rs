//! The judge of what the cloud announces for this machine: `host.cloud`.
//!
//! - What is days away is told and condemns nobody: only what begins within `cloud.limits.notice` makes the machine
//!   degraded, so that work can be moved in time.
//! - A metadata server that fails for a moment is asked again and not told of. One that stays silent is unknown; what it
//!   announced before still counts.
//! - What was announced before the agent was started again is not told twice.
//! - When jobs have to save and end because of it is a fact of its own (`leave.rs`).

pub mod amazon;
pub mod azure;
pub mod google;
pub mod leave;
mod time;

use std::collections::{BTreeMap, BTreeSet};

use crate::base::time::{Mono, Span, Stamp, Wall};
use crate::base::units::Period;
use crate::model::entry::Fact;
use crate::model::health::{Component, Evidence, HealthState, RecommendedAction};
use crate::model::observation::{Observation, Weight};
use crate::model::report::SensorReport;
use crate::settings;

settings! {
    /// When announcements of the cloud count.
    pub struct CloudLimits {
        /// How long before its window begins maintenance makes host.cloud degraded; it is told of at once.
        notice: Period = Period::seconds(3600),
        /// How long before the machine is stopped or its host is maintained its jobs are told to save and end.
        leave: Period = Period::seconds(120),
        /// How long the metadata server must have been silent before host.cloud is unknown, once it has answered.
        silent_for: Period = Period::seconds(120),
    }
    sections {}
}

/// The component.
const NAME: &str = "host.cloud";
const ANNOUNCED: &str = "cloud_notice";
const OVER: &str = "cloud_notice_over";

/// What the metadata server tells at the moment.
#[derive(Clone, Debug, PartialEq)]
pub struct CloudSample {
    /// Whose machine it is, for people: `Google Compute Engine`.
    pub provider: String,
    /// All that is announced; or why that cannot be told.
    pub notices: Result<Vec<Notice>, String>,
}

/// Something announced for this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Notice {
    /// By what it is known to be the same as before, in the cloud's words.
    pub id: String,
    /// What is to happen.
    pub kind: NoticeKind,
    /// When it begins; none if that is now.
    pub starts: Option<Wall>,
    /// When it is to be over.
    pub ends: Option<Wall>,
    /// It has begun.
    pub ongoing: bool,
    /// More of it, for people: `SCHEDULED; it can be rescheduled`.
    pub detail: String,
    /// Where it was read: `instance/upcoming-maintenance`.
    pub source: String,
}

/// What is to happen to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoticeKind {
    /// The cloud thinks that the machine may be taken away soon.
    AtRisk,
    /// It is moved to another host while it runs, and stands still for some seconds.
    Migration,
    /// Its host is maintained: it is stopped, or started again.
    Maintenance,
    /// It is stopped.
    Termination,
    /// It is taken away, as spot machines are.
    Preemption,
}

impl NoticeKind {
    fn words(self) -> &'static str {
        match self {
            NoticeKind::AtRisk => "the machine may be taken away soon",
            NoticeKind::Migration => "the machine is moved to another host while it runs",
            NoticeKind::Maintenance => "maintenance of the host",
            NoticeKind::Termination => "the machine is stopped",
            NoticeKind::Preemption => "the machine is taken away (preempted)",
        }
    }

    /// How bad it is when it is near.
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

/// Judges what is announced.
#[derive(Clone, Debug)]
pub struct CloudJudge {
    limits: CloudLimits,
    /// What was told to be announced and not to be over yet, by its id.
    reported: BTreeMap<String, String>,
    /// What was last read, and when.
    last: Option<(Mono, Vec<Notice>)>,
    shown: Option<(HealthState, Mono)>,
    /// The notices for which jobs were told to leave. An agent that was started again tells them again: they may not have heard.
    left_for: BTreeSet<String>,
}

impl CloudJudge {
    /// A judge that was told nothing yet.
    pub fn new(limits: CloudLimits) -> CloudJudge {
        let (reported, left_for) = (BTreeMap::new(), BTreeSet::new());
        CloudJudge { limits, reported, last: None, shown: None, left_for }
    }

    /// Takes in what was told before the agent was started again, in any boot.
    pub fn recall(&mut self, observation: &Observation) {
        let Some(id) = observation.values.get("id").filter(|_| observation.component == NAME) else { return };
        match observation.event.as_str() {
            ANNOUNCED => drop(self.reported.insert(id.clone(), observation.detail.clone())),
            OVER => drop(self.reported.remove(id)),
            _ => {}
        }
    }

    /// Judges what the metadata server tells at `now`.
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
                if silent_for.is_none_or(|silent| silent >= self.limits.silent_for.0) {
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
            let reason = words(notice, now.wall);
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
        Evidence { source: notice.source.clone(), reading: notice.detail.clone(), limit, before: None }
    }

    /// Tells what is new and what is over.
    fn report(&mut self, notices: &[Notice], facts: &mut Vec<Fact>) {
        for notice in notices {
            // The same one at another time or in another state is news again.
            let detail = format!("{}: {}", notice.kind.words(), notice.detail);
            if self.reported.get(&notice.id) == Some(&detail) {
                continue;
            }
            let weight = match notice.kind.weight() {
                (HealthState::Unhealthy, _) => Weight::Error,
                _ => Weight::Warning,
            };
            facts.push(observed(ANNOUNCED, weight, &notice.id, &detail));
            self.left_for.remove(&notice.id);
            self.reported.insert(notice.id.clone(), detail);
        }
        let gone: Vec<String> = self
            .reported
            .keys()
            .filter(|id| !notices.iter().any(|notice| notice.id == **id))
            .cloned()
            .collect();
        for id in gone {
            let what = self.reported.remove(&id).unwrap_or_default();
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

/// What should have been over an hour ago was forgotten by whoever announces it. What is going on is not.
fn is_past(notice: &Notice, now: Wall) -> bool {
    let hour = i64::try_from(Span::seconds(3600).0).unwrap_or(i64::MAX);
    !notice.ongoing && notice.ends.is_some_and(|ends| ends.0.saturating_add(hour) < now.0)
}

fn words(notice: &Notice, now: Wall) -> String {
    let when = match notice.starts {
        _ if notice.ongoing => "going on now".to_owned(),
        Some(starts) if starts > now => format!("starts in {}", lasting(starts.0.saturating_sub(now.0))),
        Some(_) => "its window has started".to_owned(),
        None => "now".to_owned(),
    };
    format!("{}, {when} ({})", notice.kind.words(), notice.detail)
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

/// The body of an answer that should be JSON.
fn json(body: &str) -> Result<serde_json::Value, String> {
    serde_json::from_str(body).map_err(|error| format!("no JSON: {error}"))
}
