//! The report of NCCL's RAS service about a job, and its judge: the component `nccl`, which is shown only after
//! something was wrong.
//!
//! - Counts are of launched operations, and while a job runs some rank is always behind for a moment. Ranks that
//!   differ are a sign only if nothing has moved for a long time. Even then they may be waiting in order, such as for
//!   a checkpoint of one of them. Whether it is a hang is not decided here.
//! - If several jobs run, each report comes from the one that answered. A report of one job does not clear a problem
//!   of another.

mod json;
mod report;
mod text;

use std::collections::BTreeMap;

pub use json::Wire;
pub use report::{
    CommRank, Communicator, Group, LaggingRank, Missing, Operation, Process, Processes, RankError, RasReport,
    State,
};
pub use text::{TextError, parse as parse_text};

use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, Evidence, HealthState, RecommendedAction};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::report::SensorReport;
use mainstay_model::settings;
use mainstay_model::time::{Mono, Span};
use mainstay_model::units::Period;

settings! {
    /// When NCCL counts as degraded.
    pub struct NcclLimits {
        /// How long the ranks of a communicator must be at different places, without any of them moving.
        still_for: Period = Period::seconds(600),
    }
    sections {}
}

/// How long a reported problem of a job counts while only other jobs answer.
const FORGET_AFTER: Span = Span::seconds(300);

/// The component.
const NAME: &str = "nccl";

/// The result of asking the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RasReply {
    /// Not asked: no job runs here.
    NoJob,
    /// Nothing listens: no process uses NCCL, or its version has no RAS service.
    Refused,
    /// Something listens and gives no report, with the reason.
    Failed(String),
    /// A report.
    Reported(RasReport),
}

/// Judges the service's reports.
#[derive(Clone, Debug)]
pub struct NcclJudge {
    limits: NcclLimits,
    /// The position of each communicator's ranks, since when, and when it was last reported.
    places: BTreeMap<String, CommunicatorState>,
    troubles: BTreeMap<String, RasProblem>,
    /// Whether NCCL answered for the present jobs, and the last error of an answer that failed.
    answered: bool,
    failed: Option<String>,
    /// Set once something was wrong.
    shown: Option<(HealthState, Mono)>,
}

#[derive(Clone, Debug)]
struct CommunicatorState {
    communicator: Communicator,
    since: Mono,
    reported_at: Mono,
}

#[derive(Clone, Debug)]
struct RasProblem {
    event: &'static str,
    detail: String,
    action: RecommendedAction,
    /// The communicator, if the problem belongs to a single one.
    communicator: Option<String>,
    reported_at: Mono,
}

impl NcclJudge {
    /// A judge without reports.
    pub fn new(limits: NcclLimits) -> NcclJudge {
        let (places, troubles) = (BTreeMap::new(), BTreeMap::new());
        NcclJudge { limits, places, troubles, answered: false, failed: None, shown: None }
    }

    /// Judges the result of a query at `now`.
    pub fn step(&mut self, now: Mono, asked: &RasReply) -> SensorReport {
        let mut facts = Vec::new();
        let mut unread = None;
        match asked {
            RasReply::NoJob => self.forget_job(),
            RasReply::Refused => {}
            RasReply::Failed(why) => {
                // If NCCL has never answered, something else listens there.
                unread = self.answered.then(|| why.clone());
                if self.answered && self.failed.replace(why.clone()).is_none() {
                    let detail = format!("the RAS service no longer answers: {why}");
                    facts.push(observed("ras_silent", Weight::Warning, detail));
                }
            }
            RasReply::Reported(report) => self.judge_report(now, report, &mut facts),
        }
        self.troubles.retain(|_, trouble| now.since(trouble.reported_at) <= FORGET_AFTER);
        self.places.retain(|_, place| now.since(place.reported_at) <= Span::seconds(3600));
        SensorReport { components: self.component(now, asked, unread).into_iter().collect(), facts }
    }

    fn forget_job(&mut self) {
        self.places.clear();
        self.troubles.clear();
        (self.answered, self.failed) = (false, None);
    }

    fn judge_report(&mut self, now: Mono, report: &RasReport, facts: &mut Vec<Fact>) {
        self.failed = None;
        if !std::mem::replace(&mut self.answered, true) {
            let listed = u32::try_from(report.communicators.len()).unwrap_or(u32::MAX);
            let count = listed.saturating_add(report.in_order);
            let detail = format!("the RAS service of NCCL {} answers; {count} communicators", report.version);
            facts.push(observed("ras_answers", Weight::Info, detail));
        }
        let mut found: BTreeMap<String, RasProblem> = BTreeMap::new();
        let trouble = |event, detail, communicator: Option<&str>, action| RasProblem {
            event,
            detail,
            action,
            communicator: communicator.map(str::to_owned),
            reported_at: now,
        };
        if report.dead.count > 0 {
            let detail = format!("the others no longer wait for {}", processes(&report.dead));
            let action = RecommendedAction::RestartProcess;
            found.insert(format!("dead {detail}"), trouble("process_dead", detail, None, action));
        }
        for communicator in &report.communicators {
            let hash = communicator.hash.as_str();
            for error in &communicator.errors {
                let detail = format!("communicator {hash}: {}", error_words(error));
                let action = RecommendedAction::RestartProcess;
                found.insert(format!("error {detail}"), trouble("rank_error", detail, Some(hash), action));
            }
            let since = self.stands_since(now, communicator);
            if communicator.mismatch() && now.since(since) >= self.limits.still_for.0 {
                let detail = format!("communicator {hash}: {}", standing_words(communicator));
                // One entry per communicator, even if the text changes.
                let key = format!("stands {hash}");
                found.insert(key, trouble("ranks_apart", detail, Some(hash), RecommendedAction::None));
            }
        }
        // A report clears the problems of the communicators that it lists.
        let texts: Vec<&str> =
            report.communicators.iter().map(|communicator| communicator.hash.as_str()).collect();
        let listed_all = report.in_order == 0 && !texts.is_empty();
        self.troubles.retain(|key, trouble| {
            let its_own = trouble.communicator.as_deref().map_or(listed_all, |hash| texts.contains(&hash));
            found.contains_key(key) || !its_own
        });
        for (key, trouble) in found {
            if self.troubles.get(&key).is_none_or(|before| before.detail != trouble.detail) {
                facts.push(observed(trouble.event, Weight::Warning, trouble.detail.clone()));
            }
            self.troubles.insert(key, trouble);
        }
    }

    /// Since when the ranks of a communicator are where they are.
    fn stands_since(&mut self, now: Mono, communicator: &Communicator) -> Mono {
        let place = self.places.entry(communicator.hash.clone()).or_insert_with(|| CommunicatorState {
            communicator: communicator.clone(),
            since: now,
            reported_at: now,
        });
        place.reported_at = now;
        if place.communicator != *communicator {
            place.communicator = communicator.clone();
            place.since = now;
        }
        place.since
    }

    fn component(&mut self, now: Mono, asked: &RasReply, unread: Option<String>) -> Option<Component> {
        let mut state = HealthState::Healthy;
        let mut reason = match asked {
            RasReply::NoJob => "no job runs".to_owned(),
            _ => "the RAS service no longer reports a problem".to_owned(),
        };
        let mut action = RecommendedAction::None;
        if let Some(why) = unread {
            state = HealthState::Unknown;
            reason = format!("the RAS service of NCCL no longer answers: {why}");
        }
        if !self.troubles.is_empty() {
            state = HealthState::Degraded;
            let texts: Vec<&str> =
                self.troubles.values().map(|trouble| trouble.detail.as_str()).take(3).collect();
            reason = texts.join("; ");
            if self.troubles.len() > texts.len() {
                reason = format!("{reason}; and {} more", self.troubles.len() - texts.len());
            }
            action = self.troubles.values().map(|trouble| trouble.action).max().unwrap_or(action);
        }
        if state == HealthState::Healthy && self.shown.is_none() {
            return None;
        }
        let since = self.shown.filter(|(before, _)| *before == state).map_or(now, |(_, since)| since);
        self.shown = Some((state, since));
        let source = "NCCL RAS".to_owned();
        let evidence = self.troubles.values().take(16).map(|trouble| Evidence {
            source: source.clone(),
            reading: trouble.detail.clone(),
            limit: (trouble.event == "ranks_apart").then(|| format!("unmoved for {}", self.limits.still_for)),
            ..Evidence::default()
        });
        let read_at = matches!(asked, RasReply::Reported(_) | RasReply::NoJob).then_some(now);
        let evidence = evidence.collect();
        let name = NAME.to_owned();
        Some(Component { name, state, reason, action, evidence, read_at, since, ..Component::default() })
    }
}

fn observed(event: &str, weight: Weight, detail: String) -> Fact {
    let (component, event) = (NAME.to_owned(), event.to_owned());
    Fact::Observed(Observation { component, event, weight, detail, ..Observation::default() })
}

fn processes(hidden: &Processes) -> String {
    let texts: Vec<String> = hidden
        .named
        .iter()
        .take(4)
        .map(|process| format!("process {} on {}", process.pid, process.host))
        .collect();
    let more = (hidden.count as usize).saturating_sub(texts.len());
    match (texts.is_empty(), more) {
        (true, 1) => "1 process".to_owned(),
        (true, count) => format!("{count} processes"),
        (false, 0) => texts.join(", "),
        (false, more) => format!("{} and {more} more", texts.join(", ")),
    }
}

fn error_words(error: &Group<RankError>) -> String {
    let when = if error.value.asynchronous { "" } else { " while it was set up" };
    format!("{} reported \"{}\"{when}", ranks(error.ranks, &error.named), error.value.what)
}

fn ranks(count: u32, named: &[CommRank]) -> String {
    let texts: Vec<String> = named.iter().take(4).map(CommRank::to_string).collect();
    let more = (count as usize).saturating_sub(texts.len());
    match (texts.is_empty(), more) {
        (true, 1) => "1 rank".to_owned(),
        (true, count) => format!("{count} ranks"),
        (false, 0) => texts.join(", "),
        (false, more) => format!("{} and {more} more", texts.join(", ")),
    }
}

/// How the ranks of a communicator differ.
fn standing_words(communicator: &Communicator) -> String {
    let mut words = Vec::new();
    for operation in &communicator.operations {
        let furthest = operation.groups.iter().map(|group| group.value).max().unwrap_or(0);
        for group in operation.groups.iter().filter(|group| group.value < furthest) {
            words.push(format!(
                "{}: {} launched, others {furthest}: {}",
                operation.name,
                group.value,
                ranks(group.ranks, &group.named)
            ));
        }
    }
    if communicator.states.len() > 1 {
        let state = |group: &Group<State>| format!("{:?}: {}", group.value, ranks(group.ranks, &group.named));
        words.extend(communicator.states.iter().skip(1).map(state));
    }
    if communicator.missing_count > 0 {
        let named: Vec<CommRank> = communicator.missing.iter().map(|(rank, _)| rank.clone()).collect();
        words.push(format!("no report of {}", ranks(communicator.missing_count, &named)));
    }
    words.join("; ")
}
