//! What is recorded of the job: its journal, with the lines of it that people see, marks in checkpoint directories, and
//! what is learned for its next run.

mod notice;

use std::time::Duration;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::finding::Finding;
use mainstay_model::time::{Mono, Stamp};
use mainstay_model::verdict::Outcome;
use mainstay_progress::goodput::Ledger;
use mainstay_progress::memory::Learned;
use mainstay_recovery::job::Summary;
use mainstay_view::node::{JobPhase, JobView};
use mainstay_view::summary::Recounted;

use crate::log_files;
use crate::run::Launcher;
use mainstay_journal::state::StateWriter;
use mainstay_journal::store::learned::Memory;
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::verdict::FaultDomain;
use mainstay_sys::clock;
use mainstay_sys::timed_files::Patient;

/// The journal, and what people have seen of it.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) snapshots: StateWriter,
    /// Where what is learned of the job is kept, and from how many runs so far; none if it is not kept.
    pub(crate) memory: Option<(Memory, u32)>,
    /// The verdict that the terminal showed last: its incident, headline and domain.
    pub(crate) shown: Option<(Incident, String, FaultDomain)>,
    /// The attempt whose start the terminal reported last.
    pub(crate) outcome_shown: Option<Attempt>,
}

/// Writes in checkpoint directories.
static CHECKPOINTS: Patient = Patient::new("checkpoint-marks");

/// How long marking doubtful checkpoints may take; after that it continues in the background.
const MARK_WITHIN: Duration = Duration::from_millis(200);

/// The most entries of the journal that are in memory when they are counted.
const ENTRIES_AT_ONCE: usize = 512;

impl Journal {
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
}

impl Launcher {
    /// Writes an entry to the journal.
    pub(crate) fn record(&mut self, stamp: Stamp, origin: Option<u64>, body: Body) -> Entry {
        if let Body::Finding(finding) = &body {
            self.mark_checkpoints(finding);
        }
        // The leader's orders are in its journal too, and come in bursts.
        let entry = match origin {
            Some(_) => self.journal.snapshots.gather(stamp, Some(&self.id), origin, body),
            None => self.journal.snapshots.record(stamp, Some(&self.id), None, body),
        };
        if let Some(lead) = self.group.lead_mut() {
            lead.keep_recent(&entry);
        }
        entry
    }

    /// Shows and records an entry of this host's journal.
    pub(crate) fn publish_body(&mut self, at: Mono, body: Body) {
        let line = self.journal.line(&body);
        line.into_iter().for_each(|line| self.output.terminal.print(line));
        let entry = self.record(clock::stamp_of(at), None, body);
        self.agent.send_entry(entry, self.rank_spec.own_ranks());
    }

    /// Marks doubtful checkpoints in their directory.
    fn mark_checkpoints(&self, finding: &Finding) {
        let directory = self.rank_spec.checkpoint_dir.clone();
        let (job, launch, finding) = (self.id.clone(), self.rank_spec.launch.clone(), finding.clone());
        let mark = {
            let directory = directory.clone();
            move || crate::checkpoints::doubtful::mark(&directory, &job, &launch, &finding)
        };
        let marked = CHECKPOINTS.ask(MARK_WITHIN, mark);
        if let Err(error) = marked.unwrap_or_else(|| Err(std::io::ErrorKind::TimedOut.into())) {
            tracing::warn!(directory = %directory.display(), %error, "cannot mark checkpoints as doubtful");
        }
    }

    /// Records the end of the job, unless it is recorded.
    pub(crate) fn record_end(&mut self, exit: i32) {
        let view = self.journal.snapshots.reader().view();
        let has_ended = |job: &JobView| matches!(job.phase, JobPhase::Ended(_));
        if !view.jobs.get(&self.id).is_some_and(has_ended) {
            let reason = self.group.reason();
            self.publish_body(clock::mono(), Body::Fact(Fact::JobEnded { exit, reason }));
        }
    }

    /// The summary from this host's journal: the leader, which accounts every step, is gone.
    pub(crate) fn recount(&self, exit: i32) -> Summary {
        let (at, reason, reader) = (clock::mono(), self.group.reason(), self.journal.snapshots.reader());
        let recounted = log_files::ask(move || {
            let (mut recounted, mut cursor) = (Recounted::default(), 0);
            while let Ok(read) = reader.entries_after(cursor, ENTRIES_AT_ONCE)
                && read.cursor > cursor
            {
                cursor = read.cursor;
                read.entries.iter().for_each(|entry| recounted.entry(entry));
            }
            recounted
        });
        let summary = recounted.and_then(|recounted| recounted.summary(at, exit, reason.clone()));
        let accounting = || Ledger::open(at).accounting(at);
        summary.unwrap_or_else(|| Summary {
            exit,
            reason,
            attempts: 0,
            accounting: accounting(),
            incidents: Vec::new(),
            saving: None,
        })
    }

    /// Keeps what was learned of the job for its next run.
    pub(crate) fn remember(&mut self) {
        let Some((memory, runs)) = &self.journal.memory else { return };
        let mut learned = Learned { runs: *runs, ..Learned::default() };
        let Some(lead) = self.group.lead() else { return };
        lead.job().remember(&mut learned);
        self.hang.judge.remember(&mut learned);
        let memory = memory.clone();
        if let Some(Err(error)) = log_files::ask(move || memory.write(learned)) {
            tracing::debug!(%error, "cannot store what was learned about the job");
        }
    }
}
