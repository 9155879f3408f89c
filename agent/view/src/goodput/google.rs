//! The log of Google's ml-goodput-measurement: one JSON object per line, as its recorder writes them to Cloud Logging.
//!
//! [`read`] gives the categories and totals of its calculator for such a log, [`Writer`] makes one from a job's journal.
//! Its calculator takes a step for done when the next one starts, and a step that starts again for a disruption.

use std::collections::BTreeMap;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::time::Wall;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// What the calculator of ml-goodput-measurement shows of a log. All times are in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GoogleAccount {
    /// From the first start of the job to its last end, or to the newest entry if it has none.
    pub total: f64,
    /// Productive time.
    pub productive: f64,
    /// Badput by category. `DATA_LOADING_ASYNC` overlaps with training, and is not part of the total.
    pub badput: BTreeMap<&'static str, f64>,
    /// `CUSTOM_BADPUT_EVENTS` by their type.
    pub custom: BTreeMap<String, f64>,
    /// How often a step started again.
    pub disruptions: u32,
}

const TPU_INITIALIZATION: &str = "TPU_INITIALIZATION";
const TRAINING_PREP: &str = "TRAINING_PREP";
const PROGRAM_STARTUP: &str = "PROGRAM_STARTUP";
const DATA_LOADING_SYNC: &str = "DATA_LOADING_SYNC";
const DATA_LOADING_ASYNC: &str = "DATA_LOADING_ASYNC";
const SAVE: &str = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME";
const RESTORE: &str = "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME";
const WASTED: &str = "WASTED_PROGRESS_FROM_DISRUPTION";
const RECOVERY: &str = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION";
const SLICE_DOWN: &str = "ELASTIC_SLICE_DOWN";
const SCALE_UP: &str = "ELASTIC_SCALE_UP";
const REINITIALIZATION: &str = "ELASTIC_REINITIALIZATION";
const OTHER: &str = "OTHER";

/// Reads a log: an entry per line, or what Cloud Logging exports, with the entry in `jsonPayload`.
///
/// # Errors
/// A line is no such entry, or the log has no start of a job. The error is readable text with the line.
pub fn read(text: &str) -> Result<GoogleAccount, String> {
    let mut log = Vec::new();
    for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line).map_err(|error| format!("line {number}: {error}"))?;
        let Value::Object(mut entry) = value else {
            return Err(format!("line {number}: an entry is a JSON object"));
        };
        if let Some(Value::Object(payload)) = entry.remove("jsonPayload") {
            entry = payload;
        }
        log.push(entry);
    }
    account(&log).ok_or_else(|| "the log has no job_start_time".to_owned())
}

fn number(entry: &Map<String, Value>, key: &str) -> Option<f64> {
    entry.get(key)?.as_f64().filter(|number| number.is_finite())
}

fn text<'a>(entry: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    entry.get(key)?.as_str()
}

/// The intervals between a start and the next end, by type.
fn intervals(
    log: &[Map<String, Value>],
    kind: Option<&str>,
    start: &str,
    end: &str,
) -> Vec<(f64, f64, String)> {
    let mut open: BTreeMap<String, f64> = BTreeMap::new();
    let mut found = Vec::new();
    for entry in log {
        let of = kind.map_or("", |kind| text(entry, kind).unwrap_or("unknown")).to_uppercase();
        if let Some(at) = number(entry, start) {
            open.insert(of, at);
        } else if let Some(end) = number(entry, end)
            && let Some(start) = open.remove(&of)
            && start < end
        {
            found.push((start, end, of));
        }
    }
    found
}

fn length(of: &[(f64, f64, String)]) -> f64 {
    of.iter().map(|(start, end, _)| end - start).sum()
}

/// The steps since the last start or disruption, in the order in which they started.
struct Segment<'a> {
    steps: Vec<(u64, f64)>,
    custom: &'a [(f64, f64, String)],
}

impl Segment<'_> {
    /// Accounts it: steps up to `kept` were not lost. Returns its productive time.
    fn close(&self, kept: u64, account: &mut GoogleAccount) -> f64 {
        if kept == 0 {
            return 0.0;
        }
        let smallest = self.steps.iter().map(|(step, _)| *step).min();
        let (mut productive, mut first, mut others, mut wasted) = (0.0, 0.0, Vec::new(), 0.0);
        let mut counted = 0;
        for ((before, started), (step, next)) in self.steps.iter().zip(self.steps.iter().skip(1)) {
            if *step > kept {
                wasted += next - started;
                continue;
            }
            if step.checked_sub(1) != Some(*before) {
                continue;
            }
            let mut spent = next - started;
            for (from, to, kind) in self.custom.iter().filter(|(from, to, _)| started <= from && to <= next) {
                spent -= to - from;
                *account.custom.entry(kind.clone()).or_default() += to - from;
            }
            let spent = spent.max(0.0);
            productive += spent;
            counted += 1;
            if Some(*before) == smallest {
                first = spent;
            } else {
                others.push(spent);
            }
        }
        *account.badput.entry(WASTED).or_default() += wasted;
        if counted == 0 || others.is_empty() {
            return if counted == 0 { 0.0 } else { first };
        }
        let mean = (productive - first) / others.len() as f64;
        let extra = (first - mean).max(0.0);
        *account.badput.entry(PROGRAM_STARTUP).or_default() += extra;
        productive - extra
    }
}

fn account(log: &[Map<String, Value>]) -> Option<GoogleAccount> {
    let mut of = GoogleAccount::default();
    let first_start = log.iter().find_map(|entry| number(entry, "job_start_time"))?;
    let end = log.iter().rev().find_map(|entry| number(entry, "job_end_time"));
    let newest = || {
        let times = log.iter().flat_map(|entry| entry.iter().filter(|(key, _)| key.ends_with("_time")));
        times.filter_map(|(_, value)| value.as_f64()).fold(first_start, f64::max)
    };
    of.total = end.unwrap_or_else(newest) - first_start;

    let custom = intervals(
        log,
        Some("custom_badput_event_type"),
        "custom_badput_event_start_time",
        "custom_badput_event_end_time",
    );
    let mut segment = Segment { steps: Vec::new(), custom: &custom };
    let (mut started, mut loading, mut is_sync, mut last_load) = (None, None, true, None);
    let mut loaded = 0.0;
    for entry in log {
        started = number(entry, "job_start_time").or(started);
        if let (Some(at), Some(step)) =
            (number(entry, "step_start_time"), entry.get("step_count").and_then(Value::as_u64))
        {
            if segment.steps.iter().any(|(known, _)| *known == step) {
                of.disruptions += 1;
                of.productive += segment.close(step, &mut of);
                is_sync = true;
                if let Some(load) = last_load.take() {
                    *of.badput.entry(DATA_LOADING_SYNC).or_default() += load;
                }
                let last = segment.steps.last().map(|(_, at)| *at);
                if let (Some(started), Some(last)) = (started, last)
                    && started > last
                {
                    *of.badput.entry(RECOVERY).or_default() += started - last;
                }
                segment.steps.clear();
            }
            segment.steps.push((step, at));
        }
        if let Some(at) = number(entry, "data_loading_start_time") {
            loading = Some(at);
        } else if let (Some(end), Some(start)) = (number(entry, "data_loading_end_time"), loading) {
            (last_load, loading) = (Some(end - start), None);
            loaded += end - start;
            if std::mem::take(&mut is_sync) {
                *of.badput.entry(DATA_LOADING_SYNC).or_default() += end - start;
            }
        }
    }
    if let Some((last, at)) = segment.steps.iter().copied().max_by_key(|(step, _)| *step) {
        of.productive += segment.close(last, &mut of);
        of.productive += end.map_or(0.0, |end| end - at);
    }
    let sync = of.badput.get(DATA_LOADING_SYNC).copied().unwrap_or_default();
    of.badput.insert(DATA_LOADING_ASYNC, loaded - sync);
    initialisation(log, &mut of);
    checkpoints(log, &mut of);
    let total = of.total;
    for time in of.badput.values_mut().chain(of.custom.values_mut()) {
        if *time < 0.0 || *time > total {
            *time = 0.0;
        }
    }
    let known: f64 =
        of.badput.iter().filter(|(kind, _)| **kind != DATA_LOADING_ASYNC).map(|(_, time)| time).sum();
    let known = known + of.custom.values().sum::<f64>();
    of.badput.insert(OTHER, (total - of.productive - known).max(0.0));
    of.badput.retain(|_, time| *time > 0.0);
    of.custom.retain(|_, time| *time > 0.0);
    Some(of)
}

/// Start-up, and for elastic jobs what changes of their size cost, which may include a start-up.
fn initialisation(log: &[Map<String, Value>], of: &mut GoogleAccount) {
    let again = intervals(log, None, "elastic_reinit_start_time", "elastic_reinit_end_time");
    let overlap = |(from, to, _): &(f64, f64, String)| -> f64 {
        again.iter().map(|(start, end, _)| (to.min(*end) - from.max(*start)).max(0.0)).sum()
    };
    for (kind, start, end) in [
        (TPU_INITIALIZATION, "tpu_init_start_time", "tpu_init_end_time"),
        (TRAINING_PREP, "training_prep_start_time", "training_prep_end_time"),
    ] {
        let found = intervals(log, None, start, end);
        let within: f64 = found.iter().map(overlap).sum();
        of.badput.insert(kind, (length(&found) - within).max(0.0));
    }
    of.badput.insert(REINITIALIZATION, length(&again));
    let waits =
        intervals(log, Some("elastic_wait_event_type"), "elastic_wait_start_time", "elastic_wait_end_time");
    for (start, end, kind) in waits {
        let kind = if kind.contains("SCALE_UP") { SCALE_UP } else { SLICE_DOWN };
        *of.badput.entry(kind).or_default() += end - start;
    }
}

/// The entries of Orbax's checkpoint manager. Saves that block are not productive.
fn checkpoints(log: &[Map<String, Value>], of: &mut GoogleAccount) {
    let sum = |kind: &str, key: &str| -> f64 {
        let entries =
            log.iter().filter(|entry| text(entry, "event_type").is_some_and(|of| of.ends_with(kind)));
        entries.filter_map(|entry| number(entry, key)).sum()
    };
    let saving = sum("save", "checkpoint_manager_blocking_duration_secs");
    of.badput.insert(SAVE, saving);
    of.badput.insert(RESTORE, sum("restore", "checkpoint_manager_duration_secs"));
    of.productive -= saving;
}

/// Writes the log of a job from the entries of its journal, in order. Steps between two entries are written as equally
/// long.
#[derive(Debug, Default)]
pub struct Writer {
    job: String,
    preparing: bool,
    /// The last step that was done, and when.
    done: Option<(u64, f64)>,
}

impl Writer {
    /// The log of this job.
    pub fn new(job: &str) -> Writer {
        Writer { job: job.to_owned(), ..Writer::default() }
    }

    /// The entries of the log for the next entry of the journal.
    pub fn entry(&mut self, entry: &Entry) -> Vec<Value> {
        let at = seconds(entry.at.wall);
        let mut log = Vec::new();
        match &entry.body {
            Body::Fact(Fact::JobStarted(_)) => {
                log.push(self.line("job_start_time", at));
            }
            Body::Fact(Fact::AttemptStarted { attempt, .. }) => {
                if attempt.0 > 0 {
                    log.push(self.line("job_start_time", at));
                }
                (self.done, self.preparing) = (None, false);
                log.push(self.line("tpu_init_start_time", at));
            }
            Body::Fact(Fact::RankConnected { .. }) if !self.preparing => {
                self.preparing = true;
                log.push(self.line("tpu_init_end_time", at));
                log.push(self.line("training_prep_start_time", at));
            }
            Body::Fact(Fact::RanksStepping { step, .. }) => {
                log.push(self.line("training_prep_end_time", at));
                self.done = Some((*step, at));
                log.push(self.step(*step, at));
            }
            Body::Fact(Fact::Progress { step, .. } | Fact::RankExited { step: Some(step), .. }) => {
                self.reached(*step, at, &mut log);
            }
            Body::Fact(Fact::JobEnded { .. }) => log.push(self.line("job_end_time", at)),
            _ => {}
        }
        log
    }

    fn reached(&mut self, step: u64, at: f64, log: &mut Vec<Value>) {
        let Some((before, since)) = self.done.filter(|(before, _)| *before < step) else { return };
        // A program that suddenly numbers its steps in another way has not done all steps between.
        let first = if step - before > MAX_STEP_GAP { step } else { before + 1 };
        let steps = (step - first + 1) as f64;
        for (number, place) in (first..=step).zip(1_u32..) {
            log.push(self.step(number, since + (at - since) * f64::from(place) / steps));
        }
        self.done = Some((step, at));
    }

    /// The step after this one starts when it is done.
    fn step(&self, done: u64, at: f64) -> Value {
        json!({ "job_name": self.job, "step_count": done.saturating_add(1), "step_start_time": at })
    }

    fn line(&self, key: &str, at: f64) -> Value {
        json!({ "job_name": self.job, key: at })
    }
}

/// The most steps between two entries.
const MAX_STEP_GAP: u64 = 1 << 24;

fn seconds(at: Wall) -> f64 {
    at.0 as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timelines of the tests of ml-goodput-measurement 0.2.3 (Apache-2.0), elastic ones, and a log of [`Writer`], each
    /// with what its calculator says.
    const CASES: &str = include_str!("../../tests/ml_goodput.json");

    #[test]
    fn its_own_timelines_have_its_categories_and_totals() {
        let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
        assert!(cases.len() > 15);
        for case in &cases {
            let lines: Vec<String> = case["log"].as_array().unwrap().iter().map(Value::to_string).collect();
            let read = read(&lines.join("\n")).unwrap();
            let mut shown = json!(read.badput);
            if !read.custom.is_empty() {
                shown["CUSTOM_BADPUT_EVENTS"] = json!(read.custom);
            }
            let close =
                |a: &Value, b: &Value| (a.as_f64().unwrap_or(0.0) - b.as_f64().unwrap_or(0.0)).abs() < 1e-3;
            let name = &case["name"];
            assert!(close(&json!(read.total), &case["total"]), "{name}: {read:?}");
            assert!(close(&json!(read.productive), &case["productive"]), "{name}: {read:?}");
            assert_eq!(json!(read.disruptions), case["disruptions"], "{name}");
            for (kind, time) in case["badput"].as_object().unwrap() {
                match time {
                    Value::Object(custom) => {
                        for (kind, time) in custom {
                            assert!(close(&json!(read.custom.get(kind)), time), "{name}: {kind}: {read:?}");
                        }
                    }
                    time => assert!(close(&shown[kind], time), "{name}: {kind} is {time}: {read:?}"),
                }
            }
            let all = case["badput"].as_object().unwrap();
            assert!(read.badput.keys().all(|kind| all.contains_key(*kind)), "{name}: {read:?}");
        }
    }

    #[test]
    fn a_log_that_is_none_is_refused_with_its_line() {
        assert!(read("{\"job_start_time\": 1}\n[]").is_err_and(|error| error.starts_with("line 2:")));
        assert!(read("").is_err() && read("{").is_err());
        let exported = r#"{"jsonPayload": {"job_start_time": 1}, "timestamp": "x"}"#;
        assert!(read(exported).is_ok());
    }
}
