//! Reads the files that `mainstay run` writes: the journal while it grows, and the summary at the end.
//!
//! The only code of these tools that knows the names in the journal's lines (`docs/reference/journal.md`). Unknown
//! lines are skipped, because the journal's format grows.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The interval of polling a journal for an entry.
const LOOK: Duration = Duration::from_millis(40);
/// A launcher that records nothing expected for this long has hung.
const WITHIN: Duration = Duration::from_secs(60);

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of the journal's stamps.
pub fn now() -> u64 {
    let clock = nix::time::ClockId::CLOCK_MONOTONIC;
    // Linux has this clock on every machine; zero would be visible as an absurd time and does not end a run.
    let Ok(time) = nix::time::clock_gettime(clock) else { return 0 };
    u64::try_from(time.tv_sec()).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0)
}

/// One line of a journal.
#[derive(Clone, Debug)]
pub struct Entry {
    /// When it happened, on [`now`]'s clock.
    pub mono: u64,
    body: Value,
}

/// The ranks of an attempt at their start.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// 0 for the first start.
    pub number: u64,
    /// Process by rank.
    pub pids: BTreeMap<u64, i32>,
}

impl Entry {
    /// Reads one line.
    pub fn parse(line: &str) -> Option<Self> {
        let line: Value = serde_json::from_str(line).ok()?;
        Some(Self { mono: line["at"]["mono"].as_u64()?, body: line["body"].clone() })
    }

    fn is_fact(&self, what: &str) -> bool {
        self.body["kind"] == "fact" && self.body["what"] == what
    }

    /// Whether it is a fact of this name, or an observation of this event.
    pub fn is_event(&self, what: &str) -> bool {
        self.is_fact(what) || (self.is_fact("observed") && self.body["event"] == what)
    }

    fn is(&self, kind: &str) -> bool {
        self.body["kind"] == kind
    }

    fn number(&self, field: &str) -> Option<u64> {
        self.body[field].as_u64()
    }

    fn text(&self, field: &str) -> String {
        self.body[field].as_str().unwrap_or_default().to_string()
    }

    /// The attempt whose ranks were started.
    pub fn attempt_started(&self) -> Option<Attempt> {
        if !self.is_fact("attempt_started") {
            return None;
        }
        let mut pids = BTreeMap::new();
        for rank in self.body["ranks"].as_array()? {
            pids.insert(rank["rank"].as_u64()?, i32::try_from(rank["pid"].as_i64()?).ok()?);
        }
        Some(Attempt { number: self.number("attempt")?, pids })
    }

    /// The progress of the job: the newest step that all ranks completed, and its loss.
    pub fn progress(&self) -> Option<(u64, Option<f64>)> {
        if self.is_fact("progress") || self.is_fact("ranks_stepping") {
            return Some((self.number("step")?, self.body["loss"].as_f64()));
        }
        None
    }

    /// The process id of a rank that failed and is ending, or has ended without being asked to.
    pub fn rank_died(&self) -> Option<i32> {
        if self.is_fact("rank_ending") || self.rank_gone() {
            i32::try_from(self.body["pid"].as_i64()?).ok()
        } else {
            None
        }
    }

    /// Whether a rank reported an exception.
    pub fn rank_raised(&self) -> bool {
        self.is_fact("rank_raised")
    }

    /// What a spare has ready: whether the imports of its ranks are done, and the newest step of which it has copies.
    pub fn spare_ready(&self) -> Option<(bool, Option<u64>)> {
        let values = &self.body["values"];
        let step = values["step"].as_str().and_then(|step| step.parse().ok());
        self.is_event("spare_ready").then(|| (values["imports"] == "true", step))
    }

    /// Whether all processes of an attempt are gone, or wait for the next one.
    pub fn attempt_ended(&self) -> bool {
        self.is_fact("attempt_ended")
    }

    /// Whether the process of a rank is gone that was not asked to end.
    fn rank_gone(&self) -> bool {
        self.is_fact("rank_exited") && self.body["after_stop"] != true
    }

    /// Whether ranks were found to hang.
    pub fn ranks_hung(&self) -> bool {
        self.is_fact("ranks_hung")
    }

    /// The content of a verdict, or none.
    pub fn verdict(&self) -> Option<Verdict> {
        self.is("verdict").then(|| Verdict {
            headline: self.text("headline"),
            domain: self.text("domain"),
            class: self.text("class"),
            confidence: self.body["confidence"].as_f64().unwrap_or(0.0),
            culprit: self.number("culprit"),
            evidence: self.body["evidence"].as_array().into_iter().flatten().map(plain).collect(),
        })
    }

    /// The decision: the action's name and the reason. Waiting is no decision yet.
    pub fn decision(&self) -> Option<(String, String)> {
        let action = self.body["action"]["type"].as_str().filter(|action| *action != "wait")?;
        self.is("decision").then(|| (action.to_owned(), self.text("why")))
    }

    /// Whether a restart was decided.
    pub fn decides_restart(&self) -> bool {
        self.is("decision") && self.body["action"]["type"] == "restart_in_job"
    }
}

/// A verdict in the journal's form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// One line.
    pub headline: String,
    /// The fault domain; `unknown` is an abstention.
    pub domain: String,
    /// The failure class; empty if it is unknown.
    pub class: String,
    /// The confidence, from 0 to 1.
    pub confidence: f64,
    /// The rank that it names.
    pub culprit: Option<u64>,
    /// Its evidence.
    pub evidence: Vec<String>,
}

fn plain(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The journal entries of one failure, each with the time of its event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Incident {
    /// The rank that the verdict names.
    pub culprit: Option<u64>,
    /// The host that the verdict calls lost.
    pub host_lost: Option<String>,
    /// When the launcher knew.
    pub detected: Option<u64>,
    /// The verdict in one line, and its time.
    pub verdict: Option<(u64, String)>,
    /// The decision and its reason.
    pub decision: Option<(u64, String)>,
    /// When the new ranks had been started.
    pub ranks_started: Option<u64>,
    /// When the new ranks' clients had connected.
    pub ranks_connected: Option<u64>,
    /// The first step that all ranks completed again.
    pub first_step: Option<(u64, u64)>,
    /// Repeated steps.
    pub steps_lost: Option<u64>,
    /// The newest step that had been reached before the failure.
    pub reached_before: Option<u64>,
}

/// All failures in a journal after which the job continued, in order.
pub fn incidents(entries: &[Entry]) -> Vec<Incident> {
    let outcomes = entries.split_inclusive(|entry| entry.is("outcome"));
    outcomes
        .filter(|part| part.last().is_some_and(|last| last.is("outcome")))
        .filter_map(first_incident)
        .collect()
}

/// The first failure in a journal.
pub fn first_incident(entries: &[Entry]) -> Option<Incident> {
    let begin = entries.iter().position(|e| e.is("verdict") || e.rank_died().is_some())?;
    let mut incident = Incident::default();
    for entry in &entries[begin..] {
        if entry.rank_died().is_some() {
            incident.detected.get_or_insert(entry.mono);
        } else if entry.is("verdict") && incident.verdict.is_none() {
            incident.culprit = entry.number("culprit");
            let cause = &entry.body["cause"];
            let host = cause["host"].as_str().filter(|_| cause["type"] == "host_lost");
            incident.host_lost = host.map(str::to_owned);
            incident.detected = entry.number("detected_at").or(incident.detected);
            incident.verdict = Some((entry.mono, entry.text("headline")));
        } else if entry.is("decision") && incident.decision.is_none() {
            let action = entry.body["action"]["type"].as_str().unwrap_or("?").replace('_', " ");
            incident.decision = Some((entry.mono, format!("{action}: {}", entry.text("why"))));
        } else if entry.attempt_started().is_some() {
            incident.ranks_started.get_or_insert(entry.mono);
        } else if entry.is_fact("rank_connected") && incident.first_step.is_none() {
            incident.ranks_connected = Some(entry.mono);
        } else if entry.is_fact("ranks_stepping") {
            let step = entry.number("step").unwrap_or(0);
            incident.first_step.get_or_insert((entry.mono, step));
        } else if entry.is("outcome") {
            incident.steps_lost = entry.number("steps_lost");
            incident.reached_before = entry.number("reached_before");
            refine_by_outcome(&mut incident, entry, &entries[begin..]);
            break;
        }
    }
    Some(incident)
}

/// The outcome's durations count from the fault and are taken from the heartbeat pages: they are more precise than
/// the moment at which the launcher noticed.
fn refine_by_outcome(incident: &mut Incident, outcome: &Entry, entries: &[Entry]) {
    let Some(fault) = entries.iter().find(|e| e.is("verdict")).and_then(|e| e.number("fault_at")) else {
        return;
    };
    let after = |field: &str| outcome.number(field).map(|span| fault + span);
    incident.ranks_started = after("to_ranks_started").or(incident.ranks_started);
    incident.ranks_connected = after("to_ranks_connected").or(incident.ranks_connected);
    if let (Some(at), Some(step)) = (after("to_first_step"), outcome.number("step")) {
        incident.first_step = Some((at, step));
    }
}

/// The launcher's summary of an ended job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Seconds by state, the largest first.
    pub ledger: Vec<(String, f64)>,
}

impl Summary {
    /// Reads `summary.json` of the one run below a log folder.
    pub fn read(log_dir: &Path) -> Result<Self> {
        let path = run_dir(log_dir)?.join("summary.json");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let whole: Value =
            serde_json::from_str(&text).with_context(|| format!("parsing {}", path.display()))?;
        Ok(Self { ledger: ledger(&whole) })
    }

    /// The share of the whole time that went into steps that counted, in percent.
    pub fn goodput(&self) -> Option<f64> {
        let total: f64 = self.ledger.iter().map(|(_, seconds)| seconds).sum();
        let (_, training) = self.ledger.iter().find(|(state, _)| state == "training")?;
        (total > 0.0).then_some(100.0 * training / total)
    }
}

/// The time accounting: nanoseconds by state, the largest first.
fn ledger(summary: &Value) -> Vec<(String, f64)> {
    let parts = summary["books"]["parts"].as_object();
    let seconds = |ns: &Value| ns.as_f64().map(|ns| ns / 1e9);
    let mut ledger: Vec<(String, f64)> = parts
        .into_iter()
        .flatten()
        .filter_map(|(state, ns)| Some((state.replace('_', " "), seconds(ns)?)))
        .collect();
    ledger.sort_by(|a, b| b.1.total_cmp(&a.1));
    ledger
}

/// The folder of the one run below a log folder.
pub fn run_dir(log_dir: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(log_dir).with_context(|| format!("listing {}", log_dir.display()))?;
    let runs = entries.filter_map(|entry| Some(entry.ok()?.path()));
    runs.filter(|path| path.join("journal").is_dir())
        .max()
        .with_context(|| format!("{} holds no run with a journal", log_dir.display()))
}

/// Reads a journal while it grows.
pub struct Follower {
    log_dir: PathBuf,
    /// How far each file was read: whole lines only.
    read_to: BTreeMap<PathBuf, u64>,
    /// Everything read so far.
    pub entries: Vec<Entry>,
}

impl Follower {
    /// Follows the one run that will appear below a log folder.
    pub fn new(log_dir: &Path) -> Self {
        Self { log_dir: log_dir.to_path_buf(), read_to: BTreeMap::new(), entries: Vec::new() }
    }

    /// Polls until an entry is there for which `wanted` holds; an error after a minute without it.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Entry) -> bool) -> Result<()> {
        let began = Instant::now();
        loop {
            let fresh = self.poll()?;
            if self.entries[fresh..].iter().any(&wanted) {
                return Ok(());
            }
            let log_dir = self.log_dir.display();
            ensure!(began.elapsed() < WITHIN, "no {what} in the journal below {log_dir} after {WITHIN:?}");
            thread::sleep(LOOK);
        }
    }

    /// Reads new entries; they are the last of [`Self::entries`], from the returned position on. A run that does
    /// not exist yet has no entries.
    pub fn poll(&mut self) -> Result<usize> {
        let known = self.entries.len();
        let Ok(run) = run_dir(&self.log_dir) else { return Ok(known) };
        let Ok(files) = fs::read_dir(run.join("journal")) else { return Ok(known) };
        let mut files: Vec<PathBuf> = files.filter_map(|file| Some(file.ok()?.path())).collect();
        files.retain(|path| path.extension().is_some_and(|e| e == "jsonl"));
        files.sort();
        for path in files {
            let position = self.read_to.entry(path.clone()).or_insert(0);
            let mut new = Vec::new();
            let mut file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
            file.seek(SeekFrom::Start(*position))
                .and_then(|_| file.read_to_end(&mut new))
                .with_context(|| format!("reading {}", path.display()))?;
            let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
            *position += whole as u64;
            self.entries.extend(String::from_utf8_lossy(&new[..whole]).lines().filter_map(Entry::parse));
        }
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(lines: &[&str]) -> Vec<Entry> {
        lines.iter().map(|line| Entry::parse(line).expect("a line of a journal")).collect()
    }

    const LINES: &[&str] = &[
        r#"{"seq":1,"at":{"mono":100,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"attempt_started","attempt":0,"master_port":1,"ranks":[{"rank":0,"local_rank":0,"pid":11},{"rank":1,"local_rank":1,"pid":12}]}}"#,
        r#"{"seq":2,"at":{"mono":200,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"progress","attempt":0,"step":7,"loss":2.5}}"#,
        r#"{"seq":3,"at":{"mono":310,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"rank_exited","attempt":0,"rank":1,"pid":12,"status":{"signal":9},"after_stop":false}}"#,
        r#"{"seq":4,"at":{"mono":320,"wall":1},"boot":"b","job":"j","body":{"kind":"verdict","incident":1,"attempt":0,"headline":"rank 1 was killed by SIGKILL","cause":{"type":"signal","signal":9},"culprit":1,"fault_at":300,"detected_at":305}}"#,
        r#"{"seq":5,"at":{"mono":330,"wall":1},"boot":"b","job":"j","body":{"kind":"decision","incident":1,"action":{"type":"restart_in_job","attempt":1},"why":"1 of 3 restarts","by":"launcher"}}"#,
        r#"{"seq":6,"at":{"mono":900,"wall":1},"boot":"b","job":"j","body":{"kind":"outcome","incident":1,"attempt":1,"step":6,"reached_before":7,"steps_lost":2,"to_ranks_started":50,"to_first_step":590}}"#,
    ];

    #[test]
    fn an_incident_is_read_from_its_entries() {
        let incident = first_incident(&entries(LINES)).expect("there is one");
        assert_eq!(incident.culprit, Some(1));
        assert_eq!(incident.detected, Some(305));
        assert_eq!(incident.verdict, Some((320, "rank 1 was killed by SIGKILL".into())));
        assert_eq!(incident.decision, Some((330, "restart in job: 1 of 3 restarts".into())));
        assert_eq!(incident.ranks_started, Some(350));
        assert_eq!(incident.first_step, Some((890, 6)));
        assert_eq!(incident.steps_lost, Some(2));
        assert_eq!(incident.reached_before, Some(7));
    }

    #[test]
    fn verdicts_and_decisions_are_read() {
        let entries = entries(LINES);
        let verdict = entries[3].verdict().expect("the fourth line");
        assert_eq!((verdict.culprit, verdict.domain.as_str()), (Some(1), ""));
        assert_eq!(entries[4].decision(), Some(("restart_in_job".into(), "1 of 3 restarts".into())));
        assert!(entries[3].decision().is_none() && entries[4].verdict().is_none());
    }

    #[test]
    fn a_lost_host_and_a_ready_spare_are_read() {
        let lost = LINES[3].replace(r#"{"type":"signal","signal":9}"#, r#"{"type":"host_lost","host":"h1"}"#);
        let incident = first_incident(&entries(&[&lost])).expect("there is one");
        assert_eq!(incident.host_lost.as_deref(), Some("h1"));
        assert_eq!(first_incident(&entries(LINES)).expect("there is one").host_lost, None);
        let ready = r#"{"seq":1,"at":{"mono":100,"wall":1},"boot":"b","body":{"kind":"fact","what":"observed","component":"spare","event":"spare_ready","detail":"","values":{"imports":"true","step":"40"}}}"#;
        assert_eq!(entries(&[ready])[0].spare_ready(), Some((true, Some(40))));
        assert_eq!(entries(LINES)[0].spare_ready(), None);
    }

    #[test]
    fn a_quiet_journal_has_no_incident() {
        assert_eq!(first_incident(&entries(&LINES[..2])), None);
    }

    #[test]
    fn attempts_and_progress_are_read() {
        let entries = entries(LINES);
        let attempt = entries[0].attempt_started().expect("the first line");
        assert_eq!(attempt.pids, BTreeMap::from([(0, 11), (1, 12)]));
        assert_eq!(entries[1].progress(), Some((7, Some(2.5))));
        assert_eq!(entries[2].rank_died(), Some(12));
    }

    #[test]
    fn a_half_written_line_waits_for_its_end() {
        let dir = std::env::temp_dir().join(format!("xtask-journal-{}", std::process::id()));
        let journal = dir.join("run/journal");
        fs::create_dir_all(&journal).expect("a temporary folder");
        let (first, second) = (LINES[0], LINES[1]);
        let half = format!("{first}\n{}", &second[..40]);
        fs::write(journal.join("000001.jsonl"), half).expect("written");
        let mut follower = Follower::new(&dir);
        follower.poll().expect("readable");
        assert_eq!(follower.entries.len(), 1);
        fs::write(journal.join("000001.jsonl"), format!("{first}\n{second}\n")).expect("written");
        assert_eq!(follower.poll().expect("readable"), 1);
        assert_eq!(follower.entries.len(), 2);
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn the_ledger_gives_goodput() {
        let text =
            r#"{"books":{"wall":10,"parts":{"starting":4000000000,"training":6000000000},"goodput":0.6}}"#;
        let summary = Summary { ledger: ledger(&serde_json::from_str(text).expect("JSON")) };
        assert_eq!(summary.ledger[1], ("starting".into(), 4.0));
        assert_eq!(summary.goodput(), Some(60.0));
    }
}
