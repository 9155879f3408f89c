//! What hooks receive: entries of the journal, or notices in the form that a service reads. A problem is one notice, with
//! one more when it is over.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::finding::Finding;
use mainstay_model::health::{HealthChange, HealthState};
use mainstay_model::id::{Incident, JobId};
use mainstay_model::redact::mask_json;
use mainstay_model::time::{Span, Wall};
use mainstay_proto::datamodels::{HealthEvent, ProcessingStrategy};
use mainstay_proto::v1::Severity;
use mainstay_view::convert::event;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::health_event;

/// The version of what [`HookFormat::Raw`] has in addition to the entry.
const SCHEMA_VERSION: u32 = 1;

/// Alertmanager takes an alert for resolved if it is not sent again: an open one lasts for this long.
const MAX_OPEN: Span = Span::seconds(7 * 86_400);

/// The most characters of the text of a section in Slack.
const MAX_SLACK: usize = 3000;

/// The most characters of a summary in PagerDuty.
const MAX_SUMMARY: usize = 1024;

/// The form of what hooks receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HookFormat {
    /// The entry of the journal.
    #[default]
    Raw,
    /// A message for an incoming webhook of Slack.
    Slack,
    /// An event for PagerDuty's Events API v2.
    PagerDuty,
    /// Alerts for Alertmanager's API v2.
    Alertmanager,
    /// A CloudEvent 1.0 in structured JSON.
    CloudEvents,
    /// A HealthEvent for NVSentinel, which stores it. Commands receive the entry.
    NvSentinel,
    /// The same, for which NVSentinel may also cordon, drain and repair the node.
    #[serde(rename = "nvsentinel-remediate")]
    NvSentinelRemediate,
}

impl HookFormat {
    /// What NVSentinel may do about an event; none for the other formats.
    pub(crate) fn strategy(self) -> Option<ProcessingStrategy> {
        match self {
            HookFormat::NvSentinel => Some(ProcessingStrategy::StoreOnly),
            HookFormat::NvSentinelRemediate => Some(ProcessingStrategy::ExecuteRemediation),
            _ => None,
        }
    }

    /// The `Content-Type` of its text.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            HookFormat::CloudEvents => "application/cloudevents+json",
            _ => "application/json",
        }
    }
}

/// The kind of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Problem {
    Incident(Option<Incident>),
    Finding(u64),
    Component,
    Test,
}

/// An entry that is sent, and the problem that it is about.
#[derive(Clone, Debug)]
pub(super) struct Notice {
    pub(super) entry: Entry,
    problem: Problem,
    is_over: bool,
    /// That of the problem, also when it is over.
    severity: Severity,
    /// The component, if the problem is one's state.
    component: Option<String>,
    /// The severity of its state before, if that was another problem.
    was: Option<Severity>,
}

impl Notice {
    /// One for an entry that is sent as it is.
    pub(super) fn of(entry: &Entry) -> Notice {
        let severity = event::event(entry).severity();
        Notice {
            entry: entry.clone(),
            problem: Problem::Incident(entry.body.incident()),
            is_over: false,
            severity,
            component: None,
            was: None,
        }
    }

    /// One for `mainstay hooks test`.
    pub(super) fn test(entry: Entry) -> Notice {
        Notice { problem: Problem::Test, severity: Severity::Info, is_over: true, ..Notice::of(&entry) }
    }

    /// The same for a problem and its end, on all hosts and in all messages about it.
    fn key(&self, host: &str) -> String {
        let job = self.entry.job.as_ref().map_or("", |job| &job.0);
        match self.problem {
            Problem::Incident(Some(number)) => format!("mainstay/{job}/incident/{}", number.0),
            Problem::Incident(None) => format!("mainstay/{job}/end"),
            Problem::Finding(number) => format!("mainstay/{job}/finding/{number}"),
            Problem::Component => {
                format!("mainstay/{host}/{}", self.component.as_deref().unwrap_or_default())
            }
            Problem::Test => format!("mainstay/{host}/test"),
        }
    }

    fn name(&self) -> &'static str {
        match self.problem {
            Problem::Incident(_) => "incident",
            Problem::Finding(_) => "finding",
            Problem::Component => "health",
            Problem::Test => "test",
        }
    }
}

/// What was sent and is not over.
#[derive(Debug, Default)]
pub(super) struct OpenNotices {
    jobs: BTreeMap<JobId, OpenOfJob>,
}

#[derive(Debug, Default)]
struct OpenOfJob {
    incidents: BTreeSet<Incident>,
    findings: BTreeMap<u64, Severity>,
    /// The job has ended, without an open incident.
    has_ended: bool,
}

impl OpenNotices {
    /// The notices for an entry.
    pub(super) fn notices(&mut self, entry: &Entry, on: &[String]) -> Vec<Notice> {
        let is_on = |kinds: &[&str]| on.iter().any(|on| kinds.contains(&on.as_str()));
        let notice = |problem, is_over, severity| Notice {
            entry: entry.clone(),
            problem,
            is_over,
            severity,
            component: None,
            was: None,
        };
        if let Body::Health(change) = &entry.body {
            return component(entry, change).into_iter().filter(|_| is_on(&["health"])).collect();
        }
        let Some(job) = &entry.job else { return Vec::new() };
        let open = self.jobs.entry(job.clone()).or_default();
        let incident = |number| Problem::Incident(Some(number));
        let mut sent = Vec::new();
        match &entry.body {
            Body::Verdict(of) if is_on(&["verdict", "decision"]) && open.incidents.insert(of.incident) => {
                sent.push(notice(incident(of.incident), false, Severity::Error));
            }
            Body::Outcome(of) if is_on(&["verdict", "decision"]) => {
                // Also one that was sent before this agent started.
                open.incidents.insert(of.incident);
                let over = std::mem::take(&mut open.incidents).into_iter();
                sent.extend(over.map(|number| notice(incident(number), true, Severity::Error)));
            }
            Body::Finding(of) if is_on(&["finding"]) => {
                let severity = event::event(&Entry { body: as_open(of), ..entry.clone() }).severity();
                let is_known = match of.over {
                    true => open.findings.remove(&of.finding).is_none(),
                    false => open.findings.insert(of.finding, severity).is_some(),
                };
                if !is_known {
                    sent.push(notice(Problem::Finding(of.finding), of.over, severity));
                }
            }
            // Findings belong to one attempt.
            Body::Fact(Fact::AttemptStarted { .. }) => sent.extend(open.end_findings(&notice)),
            Body::Fact(Fact::JobEnded { exit, .. }) => {
                sent.extend(open.end_findings(&notice));
                if *exit == 0 {
                    let over = std::mem::take(&mut open.incidents).into_iter();
                    sent.extend(over.map(|number| notice(incident(number), true, Severity::Error)));
                }
                // A job that ends because of a failure is news about that failure.
                let last = open.incidents.last().copied();
                if is_on(&["job_ended"]) {
                    open.has_ended = *exit != 0 && last.is_none();
                    sent.push(notice(Problem::Incident(last), *exit == 0, Severity::Error));
                }
                if *exit == 0 {
                    self.jobs.remove(job);
                }
            }
            // It was queued again.
            Body::Fact(Fact::JobStarted(_)) => {
                let before = std::mem::take(open);
                sent.extend(
                    before
                        .incidents
                        .into_iter()
                        .map(|number| notice(incident(number), true, Severity::Error)),
                );
                if before.has_ended {
                    sent.push(notice(Problem::Incident(None), true, Severity::Error));
                }
            }
            _ => {}
        }
        sent
    }
}

impl OpenOfJob {
    fn end_findings(&mut self, notice: &impl Fn(Problem, bool, Severity) -> Notice) -> Vec<Notice> {
        let over = std::mem::take(&mut self.findings).into_iter();
        over.map(|(number, severity)| notice(Problem::Finding(number), true, severity)).collect()
    }
}

fn as_open(finding: &Finding) -> Body {
    Body::Finding(Finding { over: false, ..finding.clone() })
}

/// None for a component that was never seen in another state.
fn component(entry: &Entry, change: &HealthChange) -> Option<Notice> {
    let is_over = change.component.state == HealthState::Healthy;
    // After a start, nothing has been read yet.
    if change.from.is_none() && change.component.state == HealthState::Unknown {
        return None;
    }
    let severity = |state| match state {
        HealthState::Healthy => None,
        HealthState::Unknown | HealthState::Degraded => Some(Severity::Warning),
        HealthState::Unhealthy => Some(Severity::Error),
    };
    let (before, now) = (change.from.and_then(severity), severity(change.component.state));
    Some(Notice {
        entry: entry.clone(),
        problem: Problem::Component,
        is_over,
        severity: now.or(before)?,
        component: Some(change.component.name.clone()),
        was: before.filter(|before| now.is_some_and(|now| now != *before)),
    })
}

/// Who sends notices, and in which form.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    pub(super) format: HookFormat,
    /// The name of this host.
    pub(super) host: String,
    /// Where people reach this agent's page.
    pub(super) link: Option<String>,
    /// PagerDuty's integration key.
    pub(super) key: Option<String>,
}

impl Sender {
    /// The text for a hook, without secrets: it quotes the output of programs.
    pub(super) fn write(&self, notice: &Notice) -> Value {
        let mut document = match self.format {
            HookFormat::Raw | HookFormat::NvSentinel | HookFormat::NvSentinelRemediate => self.raw(notice),
            HookFormat::Slack => self.slack(notice),
            HookFormat::PagerDuty => self.pagerduty(notice),
            HookFormat::Alertmanager => self.alertmanager(notice),
            HookFormat::CloudEvents => self.cloudevent(notice),
        };
        mask_json(&mut document);
        if self.format == HookFormat::PagerDuty {
            // Their names are those of secrets.
            document["dedup_key"] = json!(cut(&notice.key(&self.host), 255));
            if let Some(key) = &self.key {
                document["routing_key"] = json!(key);
            }
        }
        document
    }

    /// The event for NVSentinel: of components alone. The failures of jobs are the launcher's matter.
    pub(super) fn health_event(&self, notice: &Notice) -> Option<HealthEvent> {
        let (at, strategy) = (notice.entry.at.wall, self.format.strategy()?);
        let node = std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
        let node = node.as_deref().unwrap_or(&self.host);
        match (notice.problem, &notice.entry.body) {
            (Problem::Component, Body::Health(change)) => {
                Some(health_event::of_component(&change.component, at, node, strategy))
            }
            (Problem::Test, _) => Some(health_event::test(event::event(&notice.entry).message, at, node)),
            _ => None,
        }
    }

    /// The entry as the journal has it, and what a reader of many hosts needs.
    pub(super) fn raw(&self, notice: &Notice) -> Value {
        let event = event::event(&notice.entry);
        let mut document =
            serde_json::to_value(&notice.entry).unwrap_or_else(|error| error.to_string().into());
        if let Some(fields) = document.as_object_mut() {
            fields.insert("schema_version".to_owned(), SCHEMA_VERSION.into());
            fields.insert("host".to_owned(), self.host.clone().into());
            fields.insert("severity".to_owned(), word(event.severity()).into());
            fields.insert("summary".to_owned(), event.message.into());
            fields.extend(self.link.iter().map(|link| ("link".to_owned(), link.clone().into())));
        }
        document
    }

    fn summary(&self, notice: &Notice) -> String {
        let message = event::event(&notice.entry).message;
        match &notice.entry.job {
            Some(job) => format!("job {}: {message}", job.0),
            None => format!("{}: {message}", self.host),
        }
    }

    fn slack(&self, notice: &Notice) -> Value {
        let status = if notice.is_over { "resolved" } else { word(notice.severity) };
        // Slack reads these three.
        let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let text = cut(&format!("[{status}] {}", escape(&self.summary(notice))), MAX_SLACK);
        let host = escape(&self.host);
        let from = self.link.as_ref().map_or_else(|| host.clone(), |link| format!("<{link}|{host}>"));
        json!({
            "text": text,
            "blocks": [
                {"type": "section", "text": {"type": "mrkdwn", "text": text}},
                {"type": "context", "elements": [{"type": "mrkdwn", "text": format!("Mainstay on {from}")}]},
            ],
        })
    }

    fn pagerduty(&self, notice: &Notice) -> Value {
        let mut document = json!({
            "event_action": if notice.is_over { "resolve" } else { "trigger" },
            "client": "Mainstay",
            "payload": {
                "summary": cut(&self.summary(notice), MAX_SUMMARY),
                "source": self.host,
                "severity": word(notice.severity),
                "timestamp": time(notice.entry.at.wall),
                "class": notice.name(),
                "custom_details": self.raw(notice),
            },
        });
        if let Some(component) = &notice.component {
            document["payload"]["component"] = json!(component);
        }
        if let Some(link) = &self.link {
            document["client_url"] = json!(link);
            document["links"] = json!([{"href": link, "text": format!("Mainstay on {}", self.host)}]);
        }
        document
    }

    /// A problem and its end have the same labels. A job's have no host: another one may lead it at the end.
    fn alertmanager(&self, notice: &Notice) -> Value {
        let at = notice.entry.at.wall;
        let now = self.alert(notice, notice.severity, notice.is_over.then_some(at));
        let before = notice.was.map(|was| self.alert(notice, was, Some(at)));
        before.into_iter().chain([now]).collect()
    }

    fn alert(&self, notice: &Notice, severity: Severity, ended: Option<Wall>) -> Value {
        let at = notice.entry.at.wall;
        let mut labels = json!({
            "alertname": match notice.problem {
                Problem::Incident(_) => "MainstayIncident",
                Problem::Finding(_) => "MainstayFinding",
                Problem::Component => "MainstayHealth",
                Problem::Test => "MainstayTest",
            },
            "severity": word(severity),
        });
        match &notice.entry.job {
            Some(job) => labels["training_job"] = json!(job.0),
            None => labels["host"] = json!(self.host),
        }
        match notice.problem {
            Problem::Incident(Some(number)) => labels["incident"] = json!(number.0.to_string()),
            Problem::Finding(number) => labels["finding"] = json!(number.to_string()),
            Problem::Incident(None) | Problem::Component | Problem::Test => {}
        }
        if let Some(component) = &notice.component {
            labels["component"] = json!(component);
        }
        let ends = ended.unwrap_or(Wall(at.0.saturating_add_unsigned(MAX_OPEN.0)));
        let mut alert = json!({
            "labels": labels,
            "annotations": {"summary": self.summary(notice), "reported_by": self.host},
            "endsAt": time(ends),
        });
        if ended.is_none() {
            alert["startsAt"] = json!(time(at));
        }
        if let Some(link) = &self.link {
            alert["generatorURL"] = json!(link);
        }
        alert
    }

    fn cloudevent(&self, notice: &Notice) -> Value {
        let Entry { seq, boot, at, .. } = &notice.entry;
        let status = if notice.is_over { "resolved" } else { "opened" };
        json!({
            "specversion": "1.0",
            // Of several notices for one entry too.
            "id": format!("{}/{seq}/{}", boot.0, notice.key(&self.host)),
            "source": format!("/mainstay/{}", self.host),
            "type": format!("dev.mainstay.{}.{status}", notice.name()),
            "subject": notice.key(&self.host),
            "time": time(at.wall),
            "datacontenttype": "application/json",
            "data": self.raw(notice),
        })
    }
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Unspecified | Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

/// As RFC 3339 has it.
fn time(at: Wall) -> String {
    at.to_string().replacen(' ', "T", 1).replace(" UTC", "Z")
}

/// At most this many characters.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}
