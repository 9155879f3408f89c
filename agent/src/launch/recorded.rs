//! What is recorded of the job: its journal, with the lines of it that people see, marks in checkpoint directories, and
//! what is learned for its next run.

use std::time::Duration;

use mainstay_core::base::time::Stamp;
use mainstay_core::model::entry::{Body, Entry};
use mainstay_core::model::finding::Finding;
use mainstay_core::progress::memory::Learned;

use super::decider::Decider;
use super::event_loop::Launcher;
use super::notice;
use crate::act::doubtful_checkpoints;
use crate::act::log_files;
use crate::os::timed_files::Patient;

/// Writes in checkpoint directories.
static CHECKPOINTS: Patient = Patient::new("checkpoint-marks");

/// How long marking doubtful checkpoints may take; after that it continues in the background.
const MARK_WITHIN: Duration = Duration::from_millis(200);

impl Launcher {
    /// Writes an entry to the journal, and prints it if people should see it.
    pub(super) fn record(&mut self, stamp: Stamp, origin: Option<u64>, body: Body) -> Entry {
        if let Some(line) = notice::line(&body)
            && !self.was_shown(&body)
        {
            self.terminal.print(line);
        }
        if let Body::Finding(finding) = &body {
            self.mark_checkpoints(finding);
        }
        // The leader's orders are in its journal too, and come in bursts.
        let entry = match origin {
            Some(_) => self.snapshots.gather(stamp, Some(&self.id), origin, body),
            None => self.snapshots.record(stamp, Some(&self.id), None, body),
        };
        if let Decider::Leading(leading) = &mut self.decider {
            leading.lead.keep_recent(&entry);
        }
        entry
    }

    /// Whether the terminal has already shown this for the incident: a verdict that is renewed with more evidence is often
    /// the same, with a higher confidence.
    fn was_shown(&mut self, body: &Body) -> bool {
        let Body::Verdict(verdict) = body else { return false };
        let shown = (verdict.incident, verdict.headline.clone(), verdict.domain);
        self.shown.replace(shown.clone()) == Some(shown)
    }

    /// Marks doubtful checkpoints in their directory.
    fn mark_checkpoints(&self, finding: &Finding) {
        let directory = self.rank_spec.checkpoint_dir.clone();
        let (job, launch, finding) = (self.id.clone(), self.rank_spec.launch.clone(), finding.clone());
        let mark = {
            let directory = directory.clone();
            move || doubtful_checkpoints::mark(&directory, &job, &launch, &finding)
        };
        let marked = CHECKPOINTS.ask(MARK_WITHIN, mark);
        if let Err(error) = marked.unwrap_or_else(|| Err(std::io::ErrorKind::TimedOut.into())) {
            tracing::warn!(directory = %directory.display(), %error, "cannot mark checkpoints as doubtful");
        }
    }

    /// Keeps what was learned of the job for its next run.
    pub(super) fn remember(&mut self) {
        let Some((memory, runs)) = &self.memory else { return };
        let mut learned = Learned { runs: *runs, ..Learned::default() };
        let Some(job) = self.decider.job() else { return };
        job.remember(&mut learned);
        self.hangs.remember(&mut learned);
        let memory = memory.clone();
        if let Some(Err(error)) = log_files::ask(move || memory.write(learned)) {
            tracing::debug!(%error, "cannot store what was learned about the job");
        }
    }
}
