//! A journal entry as an event: typed fields for machines, one sentence for people, all other fields flat.

use std::collections::BTreeMap;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::finding::FindingKind;
use mainstay_model::health::HealthState;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::observation::Weight;
use mainstay_model::verdict::Action;
use mainstay_proto::v1::{Event, EventFilter, EventKind, Severity};
use serde_json::{Map, Value};

use super::{sentence, timestamp};

/// The entry as the API reports it.
pub fn event(entry: &Entry) -> Event {
    with(entry, &|_| true, sentence::sentence(&entry.body))
}

/// The same for a caller who may not read what the job's program wrote: numbers, and texts with a fixed set of
/// values.
pub fn without_texts(entry: &Entry) -> Event {
    let message = sentence::without_texts(&entry.body);
    Event { texts_withheld: true, ..with(entry, &|name| FIXED_ATTRIBUTES.contains(&name), message) }
}

/// Attributes with a fixed set of values, which Mainstay gives.
const FIXED_ATTRIBUTES: [&str; 5] = ["action.type", "cause.type", "class", "domain", "hang.kind"];

/// Texts are included only under names that `text` allows.
fn with(entry: &Entry, text: &dyn Fn(&str) -> bool, message: String) -> Event {
    let fields = match serde_json::to_value(&entry.body) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    let r#type = type_of(&entry.body, &fields).to_owned();
    let mut attributes = attributes(fields, text);
    if let Some(origin) = entry.origin_seq {
        attributes.insert("origin_cursor".to_owned(), origin.to_string());
    }
    Event {
        cursor: entry.seq,
        time: Some(timestamp(entry.at.wall)),
        monotonic_ns: entry.at.mono.0,
        boot_id: entry.boot.0.clone(),
        kind: kind(&entry.body).into(),
        r#type,
        severity: severity(&entry.body).into(),
        job: entry.job.as_ref().map(|job| job.0.clone()),
        attempt: attempt(&entry.body).map(|attempt| attempt.0),
        rank: rank(&entry.body).map(|rank| rank.0),
        incident: entry.body.incident().map(|incident| incident.0),
        message,
        attributes,
        texts_withheld: false,
        host: String::new(),
    }
}

/// Whether an event matches the caller's filter.
pub fn passes(event: &Event, filter: &EventFilter) -> bool {
    let job = filter.job.as_ref().is_none_or(|job| event.job.as_ref() == Some(job));
    let kind = filter.kinds.is_empty() || filter.kinds.contains(&event.kind);
    job && kind && event.severity >= filter.min_severity
}

fn kind(body: &Body) -> EventKind {
    match body {
        Body::Fact(_) => EventKind::Fact,
        Body::Health(_) => EventKind::Health,
        Body::Verdict(_) => EventKind::Verdict,
        Body::Decision(_) => EventKind::Decision,
        Body::Outcome(_) => EventKind::Outcome,
        Body::Finding(_) => EventKind::Finding,
    }
}

/// That of a fact is its name in the journal.
fn type_of<'a>(body: &Body, fields: &'a Map<String, Value>) -> &'a str {
    match body {
        Body::Fact(_) => fields.get("what").and_then(Value::as_str).unwrap_or_default(),
        Body::Health(_) => "health_changed",
        Body::Verdict(_) => "failure_judged",
        Body::Decision(decision) => decision.action.as_str(),
        Body::Outcome(_) => "training_resumed",
        Body::Finding(finding) => finding.what.as_str(),
    }
}

fn severity(body: &Body) -> Severity {
    match body {
        Body::Fact(fact) => fact_severity(fact),
        Body::Health(change) => match change.component.state {
            HealthState::Healthy => Severity::Info,
            HealthState::Unknown | HealthState::Degraded => Severity::Warning,
            HealthState::Unhealthy => Severity::Error,
        },
        Body::Verdict(_) => Severity::Error,
        Body::Decision(decision) => match decision.action {
            Action::HandBack { .. } | Action::Stop { .. } => Severity::Error,
            _ => Severity::Warning,
        },
        Body::Outcome(_) => Severity::Info,
        Body::Finding(finding) if finding.over => Severity::Info,
        Body::Finding(finding) if finding.what == FindingKind::SilentCorruption => Severity::Error,
        Body::Finding(_) => Severity::Warning,
    }
}

fn fact_severity(fact: &Fact) -> Severity {
    match fact {
        Fact::RankExited { status, after_stop, .. } if !status.is_success() && !after_stop => Severity::Error,
        Fact::JobEnded { exit, .. } if *exit != 0 => Severity::Error,
        Fact::RanksHung { acts: false, .. } => Severity::Warning,
        Fact::OutOfMemoryKills { .. }
        | Fact::RanksHung { .. }
        | Fact::StartFailed { .. }
        | Fact::RankRaised { .. }
        | Fact::RankEnding { .. }
        | Fact::HostLost { .. }
        | Fact::LauncherLost { .. } => Severity::Error,
        Fact::Observed(observation) => match observation.weight {
            Weight::Info => Severity::Info,
            Weight::Warning => Severity::Warning,
            Weight::Error => Severity::Error,
        },
        Fact::GpuDriverSilent { .. } => Severity::Error,
        // The component reports the severity; this only states that it was reported.
        Fact::Xid(_)
        | Fact::Sxid(_)
        | Fact::KernelReport(_)
        | Fact::KernelLinesLeftOut { .. }
        | Fact::KernelLogGap { .. }
        | Fact::RankRefused { .. }
        | Fact::PagesUnavailable { .. }
        | Fact::AgentLost { .. } => Severity::Warning,
        Fact::WorldChanged { before, now, .. } if now < before => Severity::Warning,
        Fact::HostEvidenceReported { .. }
        | Fact::WorldChanged { .. }
        | Fact::AgentStarted { .. }
        | Fact::AgentStopped
        | Fact::GpuDriverAnswered { .. }
        | Fact::JobStarted(_)
        | Fact::AttemptStarted { .. }
        | Fact::RankConnected { .. }
        | Fact::RanksStepping { .. }
        | Fact::Progress { .. }
        | Fact::RankExited { .. }
        | Fact::AttemptEnded { .. }
        | Fact::HangPassed { .. }
        | Fact::EvidenceTaken { .. }
        | Fact::StopRequested { .. }
        | Fact::AgentFound { .. }
        | Fact::JobEnded { .. } => Severity::Info,
    }
}

fn attempt(body: &Body) -> Option<Attempt> {
    match body {
        Body::Fact(fact) => match fact {
            Fact::AttemptStarted { attempt, .. }
            | Fact::StartFailed { attempt, .. }
            | Fact::RankConnected { attempt, .. }
            | Fact::RankRefused { attempt, .. }
            | Fact::RanksStepping { attempt, .. }
            | Fact::Progress { attempt, .. }
            | Fact::RankRaised { attempt, .. }
            | Fact::RankEnding { attempt, .. }
            | Fact::RankExited { attempt, .. }
            | Fact::RanksHung { attempt, .. }
            | Fact::HangPassed { attempt, .. }
            | Fact::HostLost { attempt, .. }
            | Fact::WorldChanged { attempt, .. }
            | Fact::EvidenceTaken { attempt, .. }
            | Fact::AttemptEnded { attempt, .. } => Some(*attempt),
            Fact::AgentStarted { .. }
            | Fact::AgentStopped
            | Fact::OutOfMemoryKills { .. }
            | Fact::Xid(_)
            | Fact::Sxid(_)
            | Fact::KernelReport(_)
            | Fact::KernelLinesLeftOut { .. }
            | Fact::KernelLogGap { .. }
            | Fact::Observed(_)
            | Fact::HostEvidenceReported { .. }
            | Fact::GpuDriverSilent { .. }
            | Fact::GpuDriverAnswered { .. }
            | Fact::JobStarted(_)
            | Fact::PagesUnavailable { .. }
            | Fact::StopRequested { .. }
            | Fact::LauncherLost { .. }
            | Fact::AgentFound { .. }
            | Fact::AgentLost { .. }
            | Fact::JobEnded { .. } => None,
        },
        Body::Health(_) => None,
        Body::Verdict(verdict) => Some(verdict.attempt),
        Body::Decision(decision) => decision.action.attempt(),
        Body::Outcome(outcome) => Some(outcome.attempt),
        Body::Finding(finding) => Some(finding.attempt),
    }
}

fn rank(body: &Body) -> Option<Rank> {
    match body {
        Body::Fact(
            Fact::RankConnected { rank, .. }
            | Fact::RankRefused { rank, .. }
            | Fact::RankRaised { rank, .. }
            | Fact::RankEnding { rank, .. }
            | Fact::RankExited { rank, .. },
        ) => Some(*rank),
        Body::Fact(Fact::RanksHung { hang, .. }) => hang.culprits.first().copied(),
        Body::Verdict(verdict) => verdict.culprit,
        Body::Finding(finding) => match finding.ranks.as_slice() {
            [rank] => Some(*rank),
            _ => None,
        },
        Body::Fact(_) | Body::Health(_) | Body::Decision(_) | Body::Outcome(_) => None,
    }
}

/// The fields of the journal's JSON form, flat: names joined by dots, lists of texts by line ends, lists of numbers
/// by commas. Omits what the event has fields for. The journal's names never change, so neither do these.
fn attributes(fields: Map<String, Value>, text: &dyn Fn(&str) -> bool) -> BTreeMap<String, String> {
    let mut flat = Flat { attributes: BTreeMap::new(), text };
    for (name, value) in fields {
        if !matches!(name.as_str(), "kind" | "what" | "attempt" | "rank" | "incident") {
            flat.add(name, value);
        }
    }
    flat.attributes
}

struct Flat<'a> {
    attributes: BTreeMap<String, String>,
    text: &'a dyn Fn(&str) -> bool,
}

impl Flat<'_> {
    fn add(&mut self, name: String, value: Value) {
        match value {
            Value::Null => {}
            Value::Bool(yes) => self.insert(name, yes.to_string()),
            Value::Number(number) => self.insert(name, number.to_string()),
            Value::String(text) => self.add_text(name, text),
            Value::Array(items) => self.add_list(name, items),
            Value::Object(fields) => {
                for (field, value) in fields {
                    self.add(format!("{name}.{field}"), value);
                }
            }
        }
    }

    fn add_list(&mut self, name: String, items: Vec<Value>) {
        let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
        if let Some(texts) = texts {
            self.add_text(name, texts.join("\n"));
        } else if items.iter().all(Value::is_number) {
            let numbers: Vec<String> = items.iter().map(Value::to_string).collect();
            self.insert(name, numbers.join(","));
        } else {
            for (place, item) in items.into_iter().enumerate() {
                self.add(format!("{name}.{place}"), item);
            }
        }
    }

    fn add_text(&mut self, name: String, text: String) {
        if (self.text)(&name) {
            self.insert(name, text);
        }
    }

    fn insert(&mut self, name: String, value: String) {
        self.attributes.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use mainstay_model::entry::{ExitStatus, JobSpec, StartedRank};
    use mainstay_model::id::{BootId, JobId, Pid};
    use mainstay_model::time::{Mono, Stamp, Wall};

    use super::*;

    fn of(body: Body) -> Event {
        event(&entry(body))
    }

    fn entry(body: Body) -> Entry {
        Entry {
            seq: 7,
            at: Stamp { mono: Mono(5), wall: Wall(1_500_000_000) },
            boot: BootId("b".into()),
            job: Some(JobId("demo".into())),
            origin_seq: None,
            body,
        }
    }

    #[test]
    fn a_killed_rank_is_an_error_that_names_it() {
        let event = of(Body::Fact(Fact::RankExited {
            attempt: Attempt(2),
            rank: Rank(1),
            pid: Pid(99),
            status: ExitStatus::Signal(9),
            step: Some(41),
            data: None,
            after_stop: false,
            stderr_tail: vec!["one".into(), "two".into()],
            stdout_tail: Vec::new(),
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        }));
        assert_eq!((event.cursor, event.attempt, event.rank), (7, Some(2), Some(1)));
        assert_eq!(event.time.map(|time| (time.seconds, time.nanos)), Some((1, 500_000_000)));
        assert_eq!((event.kind(), event.severity()), (EventKind::Fact, Severity::Error));
        testing::snapshot!("view", "event: a killed rank is an error that names it", event.message);
        let attributes: Vec<(&str, &str)> =
            event.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(
            attributes,
            [
                ("after_stop", "false"),
                ("pid", "99"),
                ("status.signal", "9"),
                ("stderr_tail", "one\ntwo"),
                ("step", "41")
            ]
        );
    }

    #[test]
    fn a_stop_request_to_a_rank_is_no_error() {
        let event = of(Body::Fact(Fact::RankExited {
            attempt: Attempt(0),
            rank: Rank(0),
            pid: Pid(98),
            status: ExitStatus::Signal(15),
            step: None,
            data: None,
            after_stop: true,
            stderr_tail: Vec::new(),
            stdout_tail: Vec::new(),
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        }));
        assert_eq!(event.severity(), Severity::Info);
        testing::snapshot!("view", "event: a stop request to a rank is no error", event.message);
    }

    #[test]
    fn without_texts_an_event_has_its_numbers_and_nothing_that_a_program_wrote() {
        let exited = Fact::RankExited {
            attempt: Attempt(2),
            rank: Rank(1),
            pid: Pid(99),
            status: ExitStatus::Code(3),
            step: Some(41),
            data: None,
            after_stop: false,
            // A number in the output of a program is a text too.
            stderr_tail: vec!["5".into()],
            stdout_tail: Vec::new(),
            stderr_times: Vec::new(),
            stdout_times: Vec::new(),
        };
        let entry = entry(Body::Fact(exited));
        let event = without_texts(&entry);
        assert!(event.texts_withheld);
        testing::snapshot!(
            "view",
            "event: without texts an event has its numbers and nothing that a program wrote",
            event.message
        );
        let names: Vec<&str> = event.attributes.keys().map(String::as_str).collect();
        assert_eq!(names, ["after_stop", "pid", "status.code", "step"]);

        let spec = JobSpec { command: vec!["python".into(), "--token=x".into()], ..JobSpec::default() };
        let event = without_texts(&self::entry(Body::Fact(Fact::JobStarted(spec))));
        testing::snapshot!(
            "view",
            "event: without texts an event has its numbers and nothing that a program wrote 2",
            event.message
        );
        assert!(!event.attributes.contains_key("command") && event.attributes.contains_key("world_size"));
    }

    #[test]
    fn lists_of_things_are_flat() {
        let rank = StartedRank { rank: Rank(0), local_rank: 0, pid: Pid(5), page: None, start_ticks: None };
        let event = of(Body::Fact(Fact::AttemptStarted {
            attempt: Attempt(0),
            master_port: 7,
            ranks: vec![rank],
            hosts: vec![],
        }));
        assert_eq!(event.attributes.get("ranks.0.pid").map(String::as_str), Some("5"));
        assert_eq!(event.attributes.get("master_port").map(String::as_str), Some("7"));
        assert!(!event.attributes.contains_key("attempt"));
    }
}
