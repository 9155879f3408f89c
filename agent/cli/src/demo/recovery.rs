//! Reads the journal of a run while it grows: its attempts, its progress, and how it recovered from failures.

use std::path::{Path, PathBuf};

use anyhow::Context;
use mainstay_journal::store::journal::JournalReader;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_model::verdict::{Cause, Decision, Outcome, Verdict};

/// The journal of the one run below a folder of logs.
pub(super) struct Follower {
    logs: PathBuf,
    cursor: u64,
    pub(super) entries: Vec<Entry>,
}

impl Follower {
    /// Follows the run that will appear there.
    pub(super) fn new(logs: &Path) -> Follower {
        Follower { logs: logs.to_owned(), cursor: 0, entries: Vec::new() }
    }

    /// Reads new entries; they are the last of `entries`, from the returned position on.
    pub(super) fn poll(&mut self) -> anyhow::Result<usize> {
        let known = self.entries.len();
        if let Some(run) = run_dir(&self.logs) {
            let read = JournalReader::new(&run.join("journal")).entries_after(self.cursor, usize::MAX);
            let read = read.with_context(|| format!("reading the journal of {}", run.display()))?;
            self.cursor = read.cursor;
            self.entries.extend(read.entries);
        }
        Ok(known)
    }

    /// The newest attempt whose ranks were started, with their processes.
    pub(super) fn attempt(&self) -> Option<(Attempt, Vec<(Rank, Pid)>)> {
        self.entries.iter().rev().find_map(started)
    }
}

/// The directory of the one run below a folder of logs.
pub(super) fn run_dir(logs: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(logs).ok()?;
    let runs = entries.filter_map(|entry| Some(entry.ok()?.path()));
    runs.filter(|run| run.join("journal").is_dir()).max()
}

/// The attempt whose ranks were started by this entry.
pub(super) fn started(entry: &Entry) -> Option<(Attempt, Vec<(Rank, Pid)>)> {
    let Body::Fact(Fact::AttemptStarted { attempt, ranks, .. }) = &entry.body else { return None };
    Some((*attempt, ranks.iter().map(|rank| (rank.rank, rank.pid)).collect()))
}

/// The newest step that all ranks have completed, and its loss.
pub(super) fn progress(entry: &Entry) -> Option<(u64, Option<f64>)> {
    match &entry.body {
        Body::Fact(Fact::Progress { step, loss, .. }) => Some((*step, *loss)),
        Body::Fact(Fact::RanksStepping { step, .. }) => Some((*step, None)),
        _ => None,
    }
}

/// A failure after which the job continued.
#[derive(Clone, Debug)]
pub(super) struct Recovery {
    pub(super) verdict: Verdict,
    pub(super) decision: Decision,
    /// When the launcher had decided.
    pub(super) decided_at: u64,
    pub(super) outcome: Outcome,
}

impl Recovery {
    /// The recoveries of a journal, in order.
    pub(super) fn all(entries: &[Entry]) -> Vec<Recovery> {
        let outcomes = entries.iter().filter_map(|entry| match &entry.body {
            Body::Outcome(outcome) => Some(outcome),
            _ => None,
        });
        outcomes.filter_map(|outcome| Recovery::from_entries(entries, outcome)).collect()
    }

    fn from_entries(entries: &[Entry], outcome: &Outcome) -> Option<Recovery> {
        let verdict = entries.iter().find_map(|entry| match &entry.body {
            Body::Verdict(verdict) if verdict.incident == outcome.incident => Some(verdict.clone()),
            _ => None,
        })?;
        let (decided_at, decision) = entries.iter().find_map(|entry| match &entry.body {
            Body::Decision(decision) if decision.action.attempt() == Some(outcome.attempt) => {
                Some((entry.at.mono.0, decision.clone()))
            }
            _ => None,
        })?;
        Some(Recovery { verdict, decision, decided_at, outcome: outcome.clone() })
    }

    /// The decision in words, with its reason.
    pub(super) fn decided(&self) -> String {
        format!("{}: {}", self.decision.action.as_str().replace('_', " "), self.decision.why)
    }

    pub(super) fn is_of_a_lost_host(&self) -> bool {
        matches!(self.verdict.cause, Cause::HostLost { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&str; 6] = [
        r#"{"seq":1,"at":{"mono":100,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"attempt_started","attempt":0,"master_port":1,"ranks":[{"rank":0,"local_rank":0,"pid":11},{"rank":1,"local_rank":1,"pid":12}]}}"#,
        r#"{"seq":2,"at":{"mono":200,"wall":1},"boot":"b","job":"j","body":{"kind":"fact","what":"progress","attempt":0,"step":7,"loss":2.5}}"#,
        r#"{"seq":3,"at":{"mono":320,"wall":1},"boot":"b","job":"j","body":{"kind":"verdict","incident":1,"attempt":0,"headline":"rank 1 was killed by SIGKILL","cause":{"type":"signal","signal":9},"domain":"unknown","confidence":0.9,"evidence":[],"culprit":1,"fault_at":300,"detected_at":305}}"#,
        r#"{"seq":4,"at":{"mono":325,"wall":1},"boot":"b","job":"j","body":{"kind":"decision","incident":1,"action":{"type":"wait"},"why":"not ready","by":"launcher"}}"#,
        r#"{"seq":5,"at":{"mono":330,"wall":1},"boot":"b","job":"j","body":{"kind":"decision","incident":1,"action":{"type":"restart_in_job","attempt":1},"why":"1 of 3 restarts","by":"launcher"}}"#,
        r#"{"seq":6,"at":{"mono":900,"wall":1},"boot":"b","job":"j","body":{"kind":"outcome","incident":1,"attempt":1,"step":6,"reached_before":7,"steps_lost":2,"to_ranks_started":50,"to_first_step":590}}"#,
    ];

    fn entries(lines: &[&str]) -> Vec<Entry> {
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_recovery_has_the_decision_that_started_its_attempt() {
        let recoveries = Recovery::all(&entries(&LINES));
        assert_eq!(recoveries.len(), 1);
        assert_eq!((recoveries[0].decided_at, recoveries[0].verdict.culprit), (330, Some(Rank(1))));
        assert!(!recoveries[0].is_of_a_lost_host());
        assert!(Recovery::all(&entries(&LINES[..5])).is_empty(), "nothing has recovered yet");
    }

    #[test]
    fn a_journal_is_followed_from_its_first_line() {
        let dir = testing::tempdir().unwrap();
        let journal = dir.path().join("run/journal");
        std::fs::create_dir_all(&journal).unwrap();
        let mut follower = Follower::new(dir.path());
        assert_eq!(follower.poll().unwrap(), 0);
        let file = journal.join("00000000000000000001.jsonl");
        std::fs::write(&file, format!("{}\n{}", LINES[0], &LINES[1][..40])).unwrap();
        follower.poll().unwrap();
        assert_eq!(follower.entries.len(), 1, "a line without its end is not there yet");
        std::fs::write(&file, format!("{}\n{}\n", LINES[0], LINES[1])).unwrap();
        assert_eq!(follower.poll().unwrap(), 1);
        assert_eq!(follower.entries.last().and_then(progress), Some((7, Some(2.5))));
        assert_eq!(follower.attempt().unwrap().1, [(Rank(0), Pid(11)), (Rank(1), Pid(12))]);
    }
}
