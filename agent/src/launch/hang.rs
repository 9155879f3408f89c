//! The judge of hangs beside the loop: what the pages and the kernel tell goes in, what is to be told comes out.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mainstay_core::entry::Fact;
use mainstay_core::hang::{Hang, HangKind, Limits, Outlook, Suspicion, Watch, listed};
use mainstay_core::id::{Attempt, Rank};
use mainstay_core::observation::{Observation, Weight};
use mainstay_core::time::{Mono, Span};

use tokio::sync::oneshot;

use crate::act::ranks::RankProcess;
use crate::os::clock;
use crate::source::activity;
use crate::source::evidence::{self, Subject, Taken};
use crate::source::pages::PageReader;

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

/// The judge of hangs of one job.
#[derive(Debug)]
pub(super) struct Judge {
    mode: Mode,
    watch: Watch,
    ranks: usize,
    attempt: Attempt,
    /// When nothing had moved as of the suspicion that was told last.
    told: Option<Mono>,
    /// The hang that was found, until it passes or the attempt ends.
    found: Option<(HangKind, Mono)>,
}

impl Judge {
    pub(super) fn new(settings: &HangSettings, ranks: usize, now: Mono) -> Judge {
        Judge {
            mode: settings.mode,
            watch: Watch::new(settings.limits.clone(), Rank(0), ranks, now),
            ranks,
            attempt: Attempt(0),
            told: None,
            found: None,
        }
    }

    pub(super) fn begin_attempt(&mut self, attempt: Attempt, now: Mono) {
        self.attempt = attempt;
        self.watch.begin_attempt(now, self.ranks);
        (self.told, self.found) = (None, None);
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
        if self.found.is_some() {
            return self.passed(now);
        }
        if self.watch.wants_probes(now) {
            for rank in ranks.iter().filter(|rank| rank.exit.is_none()) {
                if let Some(probe) = activity::probe(rank.pid) {
                    self.watch.probe(rank.local_rank as usize, probe);
                }
            }
        }
        match self.watch.look(now) {
            Outlook::Calm => None,
            Outlook::Waiting(suspicion) => self.suspicion(&suspicion, now),
            Outlook::Hang(hang) => {
                self.found = Some((hang.kind, hang.confirmed));
                Some(self.hung(*hang))
            }
        }
    }

    fn hung(&self, hang: Hang) -> Fact {
        Fact::RanksHung { attempt: self.attempt, hang: Box::new(hang), acts: self.mode == Mode::Auto }
    }

    /// Whether what was taken for a hang has moved again: then it was none, and all goes on.
    pub(super) fn passed(&mut self, now: Mono) -> Option<Fact> {
        let (kind, confirmed) = self.found?;
        let moved = match kind {
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
    fn suspicion(&mut self, suspicion: &Suspicion, now: Mono) -> Option<Fact> {
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
        Some(Fact::Observed(Observation {
            component: "job".to_owned(),
            event: "hang_suspected".to_owned(),
            weight: Weight::Warning,
            detail: format!(
                "nothing has moved for {silence}, {who}; it is taken for a hang after {}, because {}",
                suspicion.limit, suspicion.why
            ),
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
    pub(super) fn begin(attempt: Attempt, file: PathBuf, subjects: Vec<Subject>) -> Evidence {
        let (sender, taken) = oneshot::channel();
        let path = file.clone();
        let take = move || {
            let taken = evidence::take(&subjects, Instant::now() + EVIDENCE_WITHIN);
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
/// For what is under way at that time.
const EVIDENCE_GRACE: Duration = Duration::from_millis(500);

/// Shorter waits are nobody's business.
const TOLD_AFTER: Span = Span::seconds(10);

fn numbers(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(",")
}
