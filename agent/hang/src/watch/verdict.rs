//! The findings for a hang, and for heartbeats without steps.

use crate::activity::Activity;
use crate::finding::HangStatus;
use crate::locate::Suspects;
use crate::phase::{Limit, LimitFrom, PhaseId};
use mainstay_model::hang::{Hang, HangKind};
use mainstay_model::time::{Mono, Span};

use super::Watch;

/// The highest confidence in a hang if only lines of the output show steps.
const MAX_CONFIDENCE_BY_OUTPUT: f64 = 0.7;

impl Watch {
    /// The hang that these suspects amount to, with its evidence.
    pub(super) fn hang(&self, now: Mono, suspects: Suspects, usual: (PhaseId, Limit)) -> Hang {
        let (phase, limit) = usual;
        let from = match limit.from {
            LimitFrom::Given => "as given",
            LimitFrom::Learned => "by what it took in this job",
            LimitFrom::Recalled => "by what it took in earlier runs of this job",
            LimitFrom::Default => "the default while few samples exist",
        };
        let mut evidence = vec![format!(
            "no heartbeat, step, section or collective of any of {} ranks advanced for {}",
            self.ranks.len(),
            self.silence(now)
        )];
        if suspects.kind != HangKind::Stopped {
            evidence.push(format!("{} may take {} ({from})", self.phases.name(phase), limit.span));
        }
        evidence.extend(suspects.evidence);
        if let Some(activity) = suspects.culprits.first().and_then(|rank| self.activity(*rank as usize)) {
            let does = match activity {
                Activity::Still => "uses no CPU time and does no I/O",
                Activity::Spinning => "uses CPU time and does no I/O",
                Activity::Working => "is busy",
            };
            evidence.push(format!("{} {does}", self.number(suspects.culprits[0] as usize)));
        }
        let mut confidence = suspects.confidence;
        if self.phases.is_output(phase) && suspects.kind != HangKind::Stopped {
            evidence.push("the ranks' steps are known only from lines of their output".to_owned());
            confidence = confidence.min(MAX_CONFIDENCE_BY_OUTPUT);
        }
        self.finding(now, suspects.kind, suspects.culprits, self.moved, phase, confidence, evidence)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one record, from its two makers")]
    fn finding(
        &self,
        now: Mono,
        kind: HangKind,
        culprits: Vec<u32>,
        since: Mono,
        phase: PhaseId,
        confidence: f64,
        evidence: Vec<String>,
    ) -> Hang {
        let all = (0..self.ranks.len()).filter(|rank| self.lives(*rank));
        let victims = all.filter(|rank| !culprits.iter().any(|culprit| *culprit as usize == *rank));
        let step = match culprits.first() {
            Some(rank) => self.ranks[*rank as usize].sample.step,
            None => self.newest_step(),
        };
        Hang {
            kind,
            hosts: Vec::new(),
            victims: victims.map(|rank| self.number(rank)).collect(),
            culprits: self.numbers(&culprits),
            since,
            confirmed: now,
            phase: self.phases.name(phase).to_owned(),
            limit: self.phases.limit(phase).span,
            step,
            confidence,
            evidence,
        }
    }

    /// Heartbeats without a step, for ten times as long as a step may take.
    pub(super) fn livelock(&mut self, now: Mono) -> HangStatus {
        let since = self.completed.max(self.restarted);
        let given = self.phases.limits().given.get("livelock").copied();
        let limit = given.unwrap_or_else(|| {
            let step = self.phases.limit(PhaseId::STEP).span.0.saturating_mul(10);
            let longest = self.phases.longest(PhaseId::STEP).0.saturating_mul(5);
            self.phases.limits().livelock.max(Span(step)).max(Span(longest))
        });
        if now.since(since) < limit || !self.anybody_trains() {
            self.beats_then = None;
            return HangStatus::Progressing;
        }
        let beats: Vec<u64> = self.ranks.iter().map(|rank| rank.sample.beats).collect();
        let Some((at, then)) = &self.beats_then else {
            self.beats_then = Some((now, beats));
            return HangStatus::Progressing;
        };
        if now.since(*at) < Span::seconds(1) {
            return HangStatus::Progressing;
        }
        let moving = (0..beats.len()).filter(|rank| beats[*rank] != then[*rank]);
        let moving: Vec<u32> = moving.map(|rank| u32::try_from(rank).unwrap_or(u32::MAX)).collect();
        if moving.is_empty() {
            return HangStatus::Progressing;
        }
        let evidence = vec![
            format!("no rank completed a step or a collective for {}", now.since(since)),
            format!("{} sent heartbeats throughout", self.listed(&moving)),
        ];
        let all = moving.len() == self.ranks.len();
        let culprits = if all { Vec::new() } else { moving };
        let confidence = if all { 0.6 } else { 0.8 };
        let hang =
            self.finding(now, HangKind::Livelock, culprits, since, PhaseId::STEP, confidence, evidence);
        HangStatus::Confirmed(Box::new(hang))
    }
}
