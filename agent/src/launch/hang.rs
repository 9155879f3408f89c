//! The judge of hangs beside the loop: what the pages and the kernel tell goes in, what is to be told comes out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::base::time::{Mono, Span};
use mainstay_core::hang::{
    ACTIVITY, Hang, HangKind, Idle, Limits, Outlook, Pulse, Suspicion, Waits, Watch, listed,
};
use mainstay_core::model::entry::Fact;
use mainstay_core::model::observation::{Observation, Weight};
use mainstay_core::progress::memory::Learned;

use tokio::sync::oneshot;

use crate::act::log_files;
use crate::act::ranks::RankProcess;
use crate::os::clock;
use crate::source::activity;
use crate::source::evidence::{self, Frames, Subject, Taken};
use crate::source::pages::PageReader;
use crate::source::tpu;

/// What is done about hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Ranks that hang are stopped and started again.
    Auto,
    /// They are only told of.
    Report,
    /// Nobody looks.
    Off,
}

/// What is asked for about hangs.
#[derive(Clone, Debug)]
pub struct HangSettings {
    /// What is done.
    pub mode: Mode,
    /// How long things may take.
    pub limits: Limits,
}

/// A hang that was found.
#[derive(Clone, Copy, Debug)]
struct Found {
    kind: HangKind,
    confirmed: Mono,
    /// By what the processes do, for want of heartbeats.
    by_activity: bool,
}

/// The judge of hangs of one job.
#[derive(Debug)]
pub(super) struct Judge {
    mode: Mode,
    watch: Watch,
    /// Judges as long as no rank sends heartbeats.
    idle: Idle,
    /// Whether ranks' GPUs have work, as the agent told last, and since when none has; and since when none has of those that had.
    gpus: BTreeMap<Rank, bool>,
    gpus_idle: Option<Mono>,
    gpus_rest: Option<Mono>,
    /// Whether there may be TPUs here, once that was looked for; and a question to libtpu that is under way.
    tpus: Option<bool>,
    asked_tpus: Option<mpsc::Receiver<Option<Span>>>,
    /// A question to NCCL's RAS service that is under way.
    asked: Option<mpsc::Receiver<Option<(String, Waits)>>>,
    ranks: usize,
    attempt: Attempt,
    /// When nothing had moved as of the suspicion that was told last.
    told: Option<Mono>,
    /// The hang that was found, until it passes or the attempt ends.
    found: Option<Found>,
}

impl Judge {
    pub(super) fn new(settings: &HangSettings, first: Rank, ranks: usize, now: Mono) -> Judge {
        Judge {
            mode: settings.mode,
            watch: Watch::new(settings.limits.clone(), first, ranks, now),
            idle: Idle::new(settings.limits.idle, first, ranks),
            gpus: BTreeMap::new(),
            gpus_idle: None,
            gpus_rest: None,
            tpus: None,
            asked_tpus: None,
            asked: None,
            ranks,
            attempt: Attempt(0),
            told: None,
            found: None,
        }
    }

    /// Whether ranks that hang are stopped, and not only told of.
    pub(super) fn acts(&self) -> bool {
        self.mode == Mode::Auto
    }

    /// Takes in what earlier runs of the job learned.
    pub(super) fn recall(&mut self, learned: &Learned) {
        self.watch.phases().recall(&learned.phases);
        self.idle.recall(learned.rest);
    }

    /// Adds what this run learned, for the next one.
    pub(super) fn remember(&mut self, learned: &mut Learned) {
        learned.phases = self.watch.phases().remembered();
        learned.rest = self.idle.longest_rest();
    }

    pub(super) fn begin_attempt(&mut self, attempt: Attempt, now: Mono) {
        self.attempt = attempt;
        self.watch.begin_attempt(now, self.ranks);
        self.idle.begin_attempt();
        self.asked = None;
        (self.told, self.found) = (None, None);
    }

    /// Takes in whether ranks' GPUs have work, as the agent tells it; empty when there is nobody who would.
    pub(super) fn gpus_at_work(&mut self, at_work: &BTreeMap<Rank, bool>, now: Mono) {
        let any = |of: &BTreeMap<Rank, bool>| of.values().any(|at_work| *at_work);
        if at_work.is_empty() || any(at_work) {
            self.gpus_rest = None;
        } else if any(&self.gpus) {
            self.gpus_rest = Some(now);
        }
        self.gpus.clone_from(at_work);
    }

    /// A rank's process ended with status 0.
    pub(super) fn finished(&mut self, rank: &RankProcess, now: Mono) {
        self.watch.finished(rank.local_rank as usize, now);
    }

    /// Learns from what a look at a rank's page has just brought, and takes in how it stands.
    pub(super) fn see(&mut self, local_rank: u32, page: &mut PageReader, now: Mono) {
        if self.mode == Mode::Off {
            return;
        }
        page.teach(self.watch.phases());
        let (sight, counts) = page.sight(self.watch.phases());
        self.watch.sight(local_rank as usize, now, &sight);
        self.watch.counts(local_rank as usize, now, counts);
    }

    /// Judges after a look at all pages; what is to be told.
    pub(super) fn judge(&mut self, ranks: &[RankProcess], now: Mono) -> Option<Fact> {
        if self.mode == Mode::Off || ranks.is_empty() {
            return None;
        }
        let looked = self.look_at_processes(ranks, now);
        if self.found.is_some() {
            return self.passed(now);
        }
        let outlook = match looked {
            Some(outlook) => outlook,
            None if self.watch.hears_anybody() => self.look_at_pages(ranks, now),
            None => Outlook::Calm,
        };
        match outlook {
            Outlook::Calm => None,
            Outlook::Waiting(suspicion) => self.suspicion(&suspicion, now, true),
            Outlook::Doubt(suspicion) => self.suspicion(&suspicion, now, false),
            Outlook::Hang(hang) => {
                let by_activity = hang.phase == ACTIVITY;
                self.found = Some(Found { kind: hang.kind, confirmed: hang.confirmed, by_activity });
                Some(self.hung(*hang))
            }
        }
    }

    fn look_at_pages(&mut self, ranks: &[RankProcess], now: Mono) -> Outlook {
        if self.watch.wants_probes(now) {
            for rank in ranks.iter().filter(|rank| rank.exit.is_none()) {
                if let Some(probe) = activity::probe(rank.pid, Some(&rank.files.stacks)) {
                    self.watch.probe(rank.local_rank as usize, probe);
                }
            }
        }
        let told_of = |rank: &RankProcess| self.gpus.contains_key(&rank.rank);
        let told_of_all = ranks.iter().filter(|rank| rank.exit.is_none()).all(told_of);
        self.watch.devices_rest(self.gpus_rest.filter(|_| told_of_all));
        self.watch.look(now)
    }

    /// Looks at what the ranks' processes do, now and then, where no rank sends heartbeats; what that comes to.
    fn look_at_processes(&mut self, ranks: &[RankProcess], now: Mono) -> Option<Outlook> {
        if self.watch.hears_anybody() || !self.idle.wants_look(now) {
            return None;
        }
        let mut pulses = vec![None; self.ranks];
        for rank in ranks.iter().filter(|rank| rank.exit.is_none()) {
            // Of a rank that cannot be read nothing is known, and then nothing is judged.
            let probe = activity::probe(rank.pid, Some(&rank.files.stacks))?;
            let output =
                [&rank.files.stdout, &rank.files.stderr].map(|file| log_files::length(file).unwrap_or(0));
            let pulse = Pulse { probe, output: output.iter().sum(), network: activity::network(rank.pid) };
            if let Some(place) = pulses.get_mut(rank.local_rank as usize) {
                *place = Some(pulse);
            }
        }
        let living = || ranks.iter().filter(|rank| rank.exit.is_none());
        if let Some(answer) = self.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            self.asked = None;
            if let Some((counts, waits)) = answer {
                self.idle.collectives(now, counts, waits);
            }
        }
        if let Some(idle) = self.devices_idle(ranks, now) {
            self.idle.devices(now, idle);
        }
        if self.idle.wants_collectives(now) {
            let ranks = living().map(|rank| (rank.rank, rank.pid)).collect();
            self.asked = Some(evidence::ask_nccl(ranks, NCCL_WITHIN));
        }
        let holds_device = || pulses.iter().flatten().any(|pulse| pulse.probe.holds_device);
        Some(self.idle.look(now, &pulses, holds_device))
    }

    /// For how long none of the ranks' devices has had work, where that is told of all of them.
    fn devices_idle(&mut self, ranks: &[RankProcess], now: Mono) -> Option<Span> {
        let living: Vec<&RankProcess> = ranks.iter().filter(|rank| rank.exit.is_none()).collect();
        if !living.is_empty() && living.iter().all(|rank| self.gpus.contains_key(&rank.rank)) {
            if living.iter().any(|rank| self.gpus.get(&rank.rank) == Some(&true)) {
                self.gpus_idle = None;
                return Some(Span(0));
            }
            return Some(now.since(*self.gpus_idle.get_or_insert(now)));
        }
        self.gpus_idle = None;
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

    fn hung(&self, hang: Hang) -> Fact {
        Fact::RanksHung { attempt: self.attempt, hang: Box::new(hang), acts: self.acts() }
    }

    /// Whether what was taken for a hang has moved again: then it was none, and all goes on.
    pub(super) fn passed(&mut self, now: Mono) -> Option<Fact> {
        let Found { kind, confirmed, by_activity } = self.found?;
        let moved = match kind {
            _ if by_activity && !self.watch.hears_anybody() => self.idle.last_active(),
            // It beats all the time.
            HangKind::Livelock => self.watch.last_completed(),
            _ => self.watch.last_moved(),
        };
        if moved <= confirmed {
            return None;
        }
        self.found = None;
        self.watch.restart_clock(now);
        Some(Fact::HangPassed { attempt: self.attempt, after: moved.since(confirmed) })
    }

    /// A suspicion is told once, and only if there is something to wait for that nobody announced.
    fn suspicion(&mut self, suspicion: &Suspicion, now: Mono, acts: bool) -> Option<Fact> {
        let silence = now.since(suspicion.since);
        if self.told == Some(suspicion.since) || suspicion.limit.0 == u64::MAX || silence < TOLD_AFTER {
            return None;
        }
        self.told = Some(suspicion.since);
        let who = if suspicion.ranks.is_empty() {
            "nothing tells the ranks apart".to_owned()
        } else {
            format!("all wait for {}", listed(&suspicion.ranks))
        };
        let detail = if acts {
            let (limit, why) = (suspicion.limit, &suspicion.why);
            format!(
                "nothing has moved for {silence}, {who}; it is taken for a hang after {limit}, because {why}"
            )
        } else {
            format!(
                "it may hang: for {silence} {}; without heartbeats that cannot be told from work, and nothing is done",
                suspicion.why
            )
        };
        Some(Fact::Observed(Observation {
            component: "job".to_owned(),
            event: "hang_suspected".to_owned(),
            weight: Weight::Warning,
            detail,
            values: BTreeMap::from([
                ("silent_ns".to_owned(), silence.0.to_string()),
                ("limit_ns".to_owned(), suspicion.limit.0.to_string()),
                ("ranks".to_owned(), numbers(&suspicion.ranks)),
            ]),
        }))
    }
}

/// Evidence that is being taken.
#[derive(Debug)]
pub(super) struct Evidence {
    attempt: Attempt,
    file: PathBuf,
    began: Mono,
    until: tokio::time::Instant,
    taken: oneshot::Receiver<(Taken, Result<(), String>)>,
}

impl Evidence {
    /// Begins in a thread of its own.
    pub(super) fn begin(attempt: Attempt, file: PathBuf, subjects: Vec<Subject>, frames: Frames) -> Evidence {
        let (sender, taken) = oneshot::channel();
        let path = file.clone();
        let take = move || {
            let taken = evidence::take(&subjects, frames, Instant::now() + EVIDENCE_WITHIN);
            let written = evidence::write(&taken, &path);
            // Nobody waits any more if it took too long.
            let _ = sender.send((taken, written));
        };
        if let Err(error) = std::thread::Builder::new().name("evidence".to_owned()).spawn(take) {
            tracing::warn!(%error, "no thread to take evidence in");
        }
        let until = tokio::time::Instant::now() + EVIDENCE_WITHIN + EVIDENCE_GRACE;
        Evidence { attempt, file, began: clock::mono(), until, taken }
    }

    /// What was taken, or after the deadline that nothing was.
    pub(super) async fn taken(&mut self) -> Fact {
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
                let summary = vec![format!("what the ranks were at could not be read within {took}")];
                let (groups, waits) = (Vec::new(), Vec::new());
                Fact::EvidenceTaken { attempt, file: None, groups, waits, summary, took }
            }
        }
    }
}

/// How long evidence may take.
const EVIDENCE_WITHIN: Duration = Duration::from_secs(3);
/// How long NCCL's RAS service may take, where there are no heartbeats to judge by.
const NCCL_WITHIN: Duration = Duration::from_secs(10);
/// How long libtpu may take to say what its TPUs do.
const TPU_WITHIN: Duration = Duration::from_secs(5);
/// For what is under way at that time.
const EVIDENCE_GRACE: Duration = Duration::from_millis(500);

/// Shorter waits are nobody's business.
const TOLD_AFTER: Span = Span::seconds(10);

fn numbers(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As when `/proc` holds up its reader: the decision does not wait any longer.
    #[tokio::test]
    async fn evidence_that_does_not_come_is_told_as_missing() {
        let (_nobody_answers, taken) = oneshot::channel();
        let until = tokio::time::Instant::now();
        let file = PathBuf::from("hang.json");
        let mut evidence = Evidence { attempt: Attempt(3), file, began: clock::mono(), until, taken };
        let Fact::EvidenceTaken { attempt, file, groups, summary, .. } = evidence.taken().await else {
            panic!("it is evidence")
        };
        assert_eq!((attempt, file, groups), (Attempt(3), None, Vec::new()));
        assert!(summary[0].starts_with("what the ranks were at could not be read within"), "{summary:?}");
    }

    #[test]
    fn gpus_come_to_rest_when_those_that_had_work_are_told_to_have_none() {
        let settings = HangSettings { mode: Mode::Auto, limits: Limits::default() };
        let mut judge = Judge::new(&settings, Rank(0), 2, Mono(1));
        let mut tell = |at_work: &[bool], now: u64| {
            let told = (0..).map(Rank).zip(at_work.iter().copied()).collect();
            judge.gpus_at_work(&told, Mono(now));
            judge.gpus_rest
        };
        assert_eq!(tell(&[false, false], 2), None, "nobody knows whether they ever had any");
        assert_eq!(tell(&[true, false], 3), None);
        assert_eq!(tell(&[false, false], 4), Some(Mono(4)));
        assert_eq!(tell(&[false, false], 5), Some(Mono(4)), "the same as before");
        assert_eq!(tell(&[false, true], 6), None);
        assert_eq!(tell(&[false, false], 7), Some(Mono(7)));
        assert_eq!(tell(&[], 8), None, "who told is gone");
        assert_eq!(tell(&[false, false], 9), None, "and may tell of long ago");
    }
}
