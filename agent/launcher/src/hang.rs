//! Hangs of the job's ranks: pages, processes and devices are read here and judged by [`mainstay_hang`].

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mainstay_hang::{ActivitySample, HangJudge, Limits, RankSeen, Waits};
use mainstay_model::entry::Fact;
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::{Mono, Span};
use mainstay_progress::memory::JobMemory;
use mainstay_sensors::source::evidence::{self, CollectedEvidence, Frames, Subject};
use mainstay_sensors::source::pages::PageReader;
use mainstay_sensors::source::{activity, tpu};
use mainstay_sys::clock;
use mainstay_view::node::BeatView;
use tokio::sync::oneshot;

use crate::log_files;
use crate::ranks::Ranks;
use crate::ranks::process::RankProcess;

/// What to do about hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Ranks that hang are stopped and started again.
    Auto,
    /// They are only reported.
    Report,
    /// Hangs are not detected.
    Off,
}

/// The user's settings for hangs.
#[derive(Clone, Debug)]
pub struct HangSettings {
    /// What to do about hangs.
    pub mode: Mode,
    /// How long things may take.
    pub limits: Limits,
}

/// The judge of hangs of one job, with its sources outside of it.
#[derive(Debug)]
pub(crate) struct Hang {
    mode: Mode,
    pub(crate) job: HangJudge,
    /// Whether this host may have TPUs, once checked; and a query to libtpu that is in progress.
    tpus: Option<bool>,
    asked_tpus: Option<mpsc::Receiver<Option<Span>>>,
    /// A query to NCCL's RAS service that is in progress.
    asked: Option<mpsc::Receiver<Option<(String, Waits)>>>,
    /// What ranks that hang are doing, while it is recorded.
    pub(crate) evidence: Option<Evidence>,
    /// What other hosts have reported about their ranks since readers were last shown it.
    elsewhere: Vec<(Rank, BeatView)>,
}

impl Hang {
    /// For ranks from `first` on.
    pub(crate) fn new(settings: &HangSettings, first: Rank, ranks: usize, now: Mono) -> Hang {
        let job = HangJudge::new(settings.limits.clone(), settings.mode == Mode::Auto, first, ranks, now);
        Hang {
            mode: settings.mode,
            job,
            tpus: None,
            asked_tpus: None,
            asked: None,
            evidence: None,
            elsewhere: Vec::new(),
        }
    }

    /// What ranks of another host do, in the current attempt.
    pub(crate) fn seen_elsewhere(&mut self, now: Mono, seen: &RankSeen) {
        self.job.seen_elsewhere(now, seen);
        if seen.sample.registered {
            let (step, at) = (seen.sample.step, seen.sample.beat_at);
            let sections = seen.section.iter().cloned().collect();
            self.elsewhere.push((seen.rank, BeatView { step, sections, at, ..BeatView::default() }));
        }
    }

    /// What readers have not been shown yet of the ranks of other hosts.
    pub(crate) fn take_elsewhere(&mut self) -> Vec<(Rank, BeatView)> {
        std::mem::take(&mut self.elsewhere)
    }

    /// What to report to the leader about the ranks here.
    pub(crate) fn due_to_report(&mut self, now: Mono) -> Vec<RankSeen> {
        if self.mode == Mode::Off { Vec::new() } else { self.job.to_report(now) }
    }

    /// Takes in what earlier runs of the job learned.
    pub(crate) fn recall(&mut self, learned: &JobMemory) {
        self.job.phases().recall(&learned.phases);
        self.job.idle().recall(learned.rest);
    }

    /// Adds what this run learned, for the next one.
    pub(crate) fn remember(&mut self, learned: &mut JobMemory) {
        learned.phases = self.job.phases().remembered();
        learned.rest = self.job.idle().longest_rest();
    }

    pub(crate) fn begin_attempt(&mut self, attempt: Attempt, now: Mono) {
        self.job.begin_attempt(attempt, now);
        self.asked = None;
    }

    /// Takes in the latest look at a rank's page.
    pub(crate) fn see(&mut self, local_rank: u32, page: &mut PageReader, now: Mono) {
        if self.mode == Mode::Off {
            return;
        }
        page.teach(self.job.phases());
        let (sample, counts) = page.sample(self.job.phases());
        self.job.sample(local_rank as usize, now, &sample, counts);
    }

    /// Judges after a look at all pages, unless a rank is being stopped or missing; returns the fact to record.
    pub(crate) fn judge(&mut self, ranks: &Ranks, now: Mono) -> Option<Fact> {
        let is_off = self.mode == Mode::Off || ranks.processes.is_empty();
        if is_off || ranks.stopping.stop.is_some() || ranks.has_failed() {
            return None;
        }
        let living: Vec<&RankProcess> = ranks.living().collect();
        let pulses = if self.job.wants_pulses(now) { self.pulses(&living, now) } else { None };
        if self.job.wants_probes(now) {
            for rank in &living {
                if let Some(probe) = activity::probe(rank.pid, Some(&rank.files.stacks)) {
                    self.job.probe(rank.local_rank as usize, probe);
                }
            }
        }
        let living: Vec<Rank> = living.iter().map(|rank| rank.rank).collect();
        self.job.judge(now, pulses.as_deref(), &living)
    }

    /// Starts to record what the ranks do, in a thread: `/proc` may block a reader.
    pub(crate) fn take_evidence(&mut self, ranks: &Ranks, attempt: Attempt) {
        let file = ranks.spec.run_dir.join(format!("attempt_{}/hang.json", attempt.0));
        // Native frames pause a rank for a moment, so they are only for ranks that will be stopped.
        let frames = if self.job.acts() { Frames::Native } else { Frames::Python };
        self.evidence = Some(Evidence::begin(attempt, file, ranks.subjects(), frames));
    }

    /// What the processes of the living ranks do, with what devices and NCCL report meanwhile. None if a rank cannot be
    /// read: then nothing is judged.
    fn pulses(&mut self, living: &[&RankProcess], now: Mono) -> Option<Vec<Option<ActivitySample>>> {
        let mut pulses = vec![None; self.job.ranks()];
        for rank in living {
            let probe = activity::probe(rank.pid, Some(&rank.files.stacks))?;
            let output =
                [&rank.files.stdout, &rank.files.stderr].map(|file| log_files::length(file).unwrap_or(0));
            let pulse =
                ActivitySample { probe, output: output.iter().sum(), network: activity::network(rank.pid) };
            if let Some(place) = pulses.get_mut(rank.local_rank as usize) {
                *place = Some(pulse);
            }
        }
        if let Some(answer) = self.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            self.asked = None;
            if let Some((counts, waits)) = answer {
                self.job.idle().collectives(now, counts, waits);
            }
        }
        if let Some(idle) = self.devices_idle(living, now) {
            self.job.idle().devices(now, idle);
        }
        if self.job.idle().wants_collectives(now) {
            let ranks = living.iter().map(|rank| (rank.rank, rank.pid)).collect();
            self.asked = Some(evidence::ask_nccl(ranks, NCCL_WITHIN));
        }
        Some(pulses)
    }

    /// How long all of the ranks' devices have been idle; none unless known for each device.
    fn devices_idle(&mut self, living: &[&RankProcess], now: Mono) -> Option<Span> {
        let ranks: Vec<Rank> = living.iter().map(|rank| rank.rank).collect();
        if let Some(idle) = self.job.gpus_idle(&ranks, now) {
            return Some(idle);
        }
        if !*self.tpus.get_or_insert_with(|| tpu::may_be_here(Path::new("/sys"))) {
            return None;
        }
        let pids = || living.iter().map(|rank| rank.pid).collect();
        let asked = self.asked_tpus.get_or_insert_with(|| tpu::ask_idle(pids(), TPU_WITHIN));
        match asked.try_recv() {
            Err(mpsc::TryRecvError::Empty) => None,
            answer => {
                self.asked_tpus = None;
                answer.ok().flatten()
            }
        }
    }
}

/// Evidence that is being collected.
#[derive(Debug)]
pub(crate) struct Evidence {
    attempt: Attempt,
    file: PathBuf,
    began: Mono,
    until: tokio::time::Instant,
    taken: oneshot::Receiver<(CollectedEvidence, Result<(), String>)>,
}

impl Evidence {
    /// Starts collecting in a separate thread.
    pub(crate) fn begin(attempt: Attempt, file: PathBuf, subjects: Vec<Subject>, frames: Frames) -> Evidence {
        let (sender, taken) = oneshot::channel();
        let path = file.clone();
        let take = move || {
            let taken = evidence::take(&subjects, frames, Instant::now() + EVIDENCE_WITHIN);
            let written = evidence::write(&taken, &path);
            // The receiver is gone if it took too long.
            let _ = sender.send((taken, written));
        };
        if let Err(error) = std::thread::Builder::new().name("evidence".to_owned()).spawn(take) {
            tracing::warn!(%error, "no thread to take evidence in");
        }
        let until = tokio::time::Instant::now() + EVIDENCE_WITHIN + EVIDENCE_GRACE;
        Evidence { attempt, file, began: clock::mono(), until, taken }
    }

    /// The collected evidence; after the deadline, a fact that there is none.
    pub(crate) async fn taken(&mut self) -> Fact {
        let taken = tokio::time::timeout_at(self.until, &mut self.taken).await;
        let took = clock::mono().since(self.began);
        let attempt = self.attempt;
        match taken {
            Ok(Ok((taken, written))) => {
                let mut summary = taken.findings;
                let file = written.map_err(|error| summary.push(error)).ok();
                let file = file.map(|()| self.file.display().to_string());
                Fact::EvidenceTaken { attempt, file, groups: taken.groups, waits: taken.waits, summary, took }
            }
            Ok(Err(_)) | Err(_) => {
                let summary = vec![format!("the state of the ranks could not be read within {took}")];
                let (groups, waits) = (Vec::new(), Vec::new());
                Fact::EvidenceTaken { attempt, file: None, groups, waits, summary, took }
            }
        }
    }
}

/// How long collecting evidence may take.
const EVIDENCE_WITHIN: Duration = Duration::from_secs(3);
/// How long NCCL's RAS service may take if there are no heartbeats to judge by.
const NCCL_WITHIN: Duration = Duration::from_secs(10);
/// How long libtpu may take to report what its TPUs do.
const TPU_WITHIN: Duration = Duration::from_secs(5);
/// Extra time for what is in progress at that time.
const EVIDENCE_GRACE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    /// As when `/proc` holds up its reader: the decision does not wait any longer.
    #[tokio::test]
    async fn evidence_that_takes_too_long_is_reported_as_missing() {
        let (_nobody_answers, taken) = oneshot::channel();
        let until = tokio::time::Instant::now();
        let file = PathBuf::from("hang.json");
        let mut evidence = Evidence { attempt: Attempt(3), file, began: clock::mono(), until, taken };
        let Fact::EvidenceTaken { attempt, file, groups, summary, .. } = evidence.taken().await else {
            panic!("it is evidence")
        };
        assert_eq!((attempt, file, groups), (Attempt(3), None, Vec::new()));
        assert_eq!(summary.len(), 1, "{summary:?}");
    }
}
