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
    fn verdicts_and_decisions_are_read() {
        let entries = entries(LINES);
        let verdict = entries[3].verdict().expect("the fourth line");
        assert_eq!((verdict.culprit, verdict.domain.as_str()), (Some(1), ""));
        assert_eq!(entries[4].decision(), Some(("restart_in_job".into(), "1 of 3 restarts".into())));
        assert!(entries[3].decision().is_none() && entries[4].verdict().is_none());
    }

    #[test]
    fn a_ready_spare_is_read() {
        let ready = r#"{"seq":1,"at":{"mono":100,"wall":1},"boot":"b","body":{"kind":"fact","what":"observed","component":"spare","event":"spare_ready","detail":"","values":{"imports":"true","step":"40"}}}"#;
        assert_eq!(entries(&[ready])[0].spare_ready(), Some((true, Some(40))));
        assert_eq!(entries(LINES)[0].spare_ready(), None);
    }

    #[test]
    fn attempts_and_deaths_are_read() {
        let entries = entries(LINES);
        let attempt = entries[0].attempt_started().expect("the first line");
        assert_eq!(attempt.pids, BTreeMap::from([(0, 11), (1, 12)]));
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
}
