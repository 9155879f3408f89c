//! How a job ended.

use std::fs;
use std::path::PathBuf;

use mainstay_model::entry::Entry;
use mainstay_model::verdict::Verdict;
use mainstay_recovery::job::Summary;

use crate::journal;

/// The end of a job, when its launcher is gone.
#[derive(Debug)]
pub struct End {
    /// The launcher's exit status; a signal that ended it as its negative number.
    pub status: i32,
    /// What the launcher showed on its standard output.
    pub stdout: String,
    /// The same for its standard error.
    pub stderr: String,
    /// Its journal.
    pub journal: Vec<Entry>,
    /// `summary.json`, if it was written.
    pub summary: Option<Summary>,
    /// Logs, journal, summary.
    pub run_dir: PathBuf,
}

impl End {
    /// Fails with the whole story unless the launcher's exit status is this one.
    #[track_caller]
    pub fn assert_status(&self, status: i32) -> &End {
        assert_eq!(self.status, status, "{self}");
        self
    }

    /// Fails unless the launcher wrote this on its standard error.
    #[track_caller]
    pub fn assert_printed(&self, what: &str) -> &End {
        assert!(self.stderr.contains(what), "not said: {what:?}\n{self}");
        self
    }

    /// The launcher's lines on its standard error that contain all of these values, without their time.
    pub fn lines(&self, named: &[&str]) -> Vec<&str> {
        let text = |line| without_time(line).filter(|text| named.iter().all(|named| text.contains(named)));
        self.stderr.lines().filter_map(text).collect()
    }

    /// The first of these lines.
    #[track_caller]
    pub fn line(&self, named: &[&str]) -> &str {
        self.lines(named).first().copied().unwrap_or_else(|| panic!("no line with {named:?}\n{self}"))
    }

    /// The last verdict on the job's only incident. A finding that arrives while the job is stopped (on a busy
    /// machine a rank is soon the slowest) causes a new verdict on the incident, with one more line of evidence.
    /// The culprit is the same each time.
    #[track_caller]
    pub fn verdict(&self) -> &Verdict {
        let verdicts = journal::verdicts(&self.journal);
        let Some(last) = verdicts.last() else { panic!("there is no verdict\n{self}") };
        let same = |of: &&Verdict| of.incident == last.incident && of.culprit == last.culprit;
        assert!(verdicts.iter().all(same), "verdicts on one incident and one culprit\n{self}");
        last
    }

    /// The summary, which each started job has.
    #[track_caller]
    pub fn summary(&self) -> &Summary {
        self.summary.as_ref().unwrap_or_else(|| panic!("there is no summary\n{self}"))
    }

    /// A stream of a rank in an attempt, as the file holds it: `stdout` or `stderr`.
    pub fn output(&self, attempt: u32, local_rank: u32, stream: &str) -> String {
        let path = self.run_dir.join(format!("attempt_{attempt}/{local_rank}/{stream}.log"));
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
    }
}

/// A line of the launcher without its time.
fn without_time(line: &str) -> Option<&str> {
    let text = line.strip_prefix("mainstay: ")?;
    let (first, rest) = text.split_once(' ')?;
    Some(if first.ends_with('Z') && first.contains(':') { rest } else { text })
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "exit status {}, launcher said:\n{}", self.status, self.stderr)?;
        writeln!(f, "journal:\n{}", journal::reported(&self.journal))?;
        let mut attempt = 0;
        while self.run_dir.join(format!("attempt_{attempt}")).exists() {
            for rank in 0..2 {
                let printed = self.output(attempt, rank, "stderr");
                writeln!(f, "attempt {attempt}, rank {rank}, stderr:\n{printed}")?;
            }
            attempt += 1;
        }
        Ok(())
    }
}
