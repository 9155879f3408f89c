//! What is recorded of the job: its journal, with the lines of it that people see, marks in checkpoint directories, and
//! what is learned for its next run.

mod notice;

use std::path::PathBuf;
use std::time::Duration;

use mainstay_journal::state::StateWriter;
use mainstay_journal::store::learned::Memory;
use mainstay_model::entry::{Body, Entry};
use mainstay_model::finding::Finding;
use mainstay_model::id::{Attempt, Incident, JobId};
use mainstay_model::time::Stamp;
use mainstay_model::verdict::{FaultDomain, Outcome};
use mainstay_progress::goodput::Ledger;
use mainstay_progress::memory::JobMemory;
use mainstay_recovery::job::{Job, Summary};
use mainstay_sys::clock;
use mainstay_sys::timed_files::Patient;
use mainstay_view::node::{JobPhase, JobView};
use mainstay_view::summary::Recounted;

use crate::checkpoints::doubtful;
use crate::hang::Hang;
use crate::log_files;
use crate::ranks::RankSpec;

/// Writes in checkpoint directories.
static CHECKPOINTS: Patient = Patient::new("checkpoint-marks");

/// How long marking doubtful checkpoints may take; after that it continues in the background.
const MARK_WITHIN: Duration = Duration::from_millis(200);

/// The most entries of the journal that are in memory when they are counted.
const MAX_ENTRIES_PER_READ: usize = 512;

/// The journal, and what people have seen of it.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) job: JobId,
    launch: String,
    checkpoint_dir: PathBuf,
    pub(crate) snapshots: StateWriter,
    /// Where what is learned of the job is kept, and what earlier runs learned; none if it is not kept.
    memory: Option<(Memory, JobMemory)>,
    /// The verdict that the terminal showed last: its incident, headline and domain.
    shown: Option<(Incident, String, FaultDomain)>,
    /// The attempt whose start the terminal reported last.
    outcome_shown: Option<Attempt>,
}

impl Journal {
    pub(crate) fn new(
        spec: &RankSpec,
        snapshots: StateWriter,
        memory: Option<(Memory, JobMemory)>,
    ) -> Journal {
        Journal {
            job: JobId(spec.job.clone()),
            launch: spec.launch.clone(),
            checkpoint_dir: spec.checkpoint_dir.clone(),
            snapshots,
            memory,
            shown: None,
            outcome_shown: None,
        }
    }

    /// The line for an entry on the terminal, if people should see it and have not seen it yet.
    pub(crate) fn line(&mut self, body: &Body) -> Option<String> {
        notice::line(body).filter(|_| !self.was_shown(body))
    }

    /// Whether the terminal has already shown this: a verdict that is renewed with more evidence is often the same, with a
    /// higher confidence, and a leader that replaces another finds the outcome of the last restart once more.
    fn was_shown(&mut self, body: &Body) -> bool {
        match body {
            Body::Verdict(verdict) => {
                let shown = (verdict.incident, verdict.headline.clone(), verdict.domain);
                self.shown.replace(shown.clone()) == Some(shown)
            }
            Body::Outcome(Outcome { attempt, .. }) => self.outcome_shown.replace(*attempt) == Some(*attempt),
            _ => false,
        }
    }

    /// Writes an entry; `origin`: its number in the leader's journal.
    pub(crate) fn record(&mut self, stamp: Stamp, origin: Option<u64>, body: Body) -> Entry {
        if let Body::Finding(finding) = &body {
            self.mark_checkpoints(finding);
        }
        match origin {
            // The leader's orders are in its journal too, and come in bursts.
            Some(_) => self.snapshots.gather(stamp, Some(&self.job), origin, body),
            None => self.snapshots.record(stamp, Some(&self.job), None, body),
        }
    }

    fn mark_checkpoints(&self, finding: &Finding) {
        let directory = self.checkpoint_dir.clone();
        let (job, launch, finding) = (self.job.clone(), self.launch.clone(), finding.clone());
        let mark = move || doubtful::mark(&directory, &job, &launch, &finding);
        let marked = CHECKPOINTS.ask(MARK_WITHIN, mark);
        if let Err(error) = marked.unwrap_or_else(|| Err(std::io::ErrorKind::TimedOut.into())) {
            let directory = self.checkpoint_dir.display();
            tracing::warn!(%directory, %error, "cannot mark checkpoints as doubtful");
        }
    }

    /// The incident after the last one that has a verdict.
    pub(crate) fn next_incident(&mut self) -> Incident {
        self.snapshots.show_due();
        let view = self.snapshots.reader().view();
        let last = view.jobs.get(&self.job).and_then(|job| job.last_verdict.as_ref());
        Incident(last.map_or(0, |verdict| verdict.incident.0) + 1)
    }

    /// Whether the end of the job is recorded.
    pub(crate) fn has_end(&self) -> bool {
        let has_ended = |job: &JobView| matches!(job.phase, JobPhase::Ended(_));
        self.snapshots.reader().view().jobs.get(&self.job).is_some_and(has_ended)
    }

    /// The summary from this host's journal: the leader, which accounts every step, is gone.
    pub(crate) fn recount(&self, exit: i32, reason: String) -> Summary {
        let (stamp, reader) = (clock::now(), self.snapshots.reader());
        let recounted = log_files::ask(move || {
            let (mut recounted, mut cursor) = (Recounted::default(), 0);
            while let Ok(read) = reader.entries_after(cursor, MAX_ENTRIES_PER_READ)
                && read.cursor > cursor
            {
                cursor = read.cursor;
                read.entries.iter().for_each(|entry| recounted.entry(entry));
            }
            recounted
        });
        let summary = recounted.and_then(|recounted| recounted.summary(stamp, exit, reason.clone()));
        summary.unwrap_or_else(|| Summary {
            exit,
            reason,
            attempts: 0,
            accounting: Ledger::open(stamp.mono).accounting(stamp.mono),
            incidents: Vec::new(),
            saving: None,
            exclude: Vec::new(),
        })
    }

    /// Passes to a job what earlier runs learned of it.
    pub(crate) fn recall(&self, job: &mut Job) {
        if let Some((_, learned)) = &self.memory {
            job.recall(learned);
        }
    }

    /// Keeps what was learned of the job for its next run.
    pub(crate) fn remember(&self, job: &Job, hang: &mut Hang) {
        let Some((memory, before)) = &self.memory else { return };
        let mut learned = JobMemory { runs: before.runs, ..JobMemory::default() };
        job.remember(&mut learned);
        hang.remember(&mut learned);
        let memory = memory.clone();
        if let Some(Err(error)) = log_files::ask(move || memory.write(learned)) {
            tracing::debug!(%error, "cannot store what was learned about the job");
        }
    }
}
