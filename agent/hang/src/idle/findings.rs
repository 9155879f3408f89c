//! What a job without heartbeats seems to do: it works, it waits, or it hangs.

use super::{BEYOND, Collectives, Idle, MIN_WORK_TO_REST, NETWORK, REGULAR, UNSEEN, now_minus};
use crate::activity::{Activity, ProcessState};
use crate::finding::{HangStatus, STOPPED_LIMIT, STOPPED_REPORT_AFTER, Suspicion};
use mainstay_model::hang::{ACTIVITY, Hang, HangKind};
use mainstay_model::id::Rank;
use mainstay_model::time::{Mono, Span};

impl Idle {
    /// Ranks that a signal stopped. Such a rest is not the program's own.
    pub(super) fn stopped(&self, now: Mono) -> Option<HangStatus> {
        let limit = self.floor.min(STOPPED_LIMIT);
        let (culprits, since) = self.stopped_for(now, limit)?;
        let text = format!("{} in state T (stopped) for {}", self.named(&culprits), now.since(since));
        Some(self.hang(now, HangKind::Stopped, &culprits, since, limit, 0.9, text))
    }

    /// Ranks that a signal stopped too recently to count as hung.
    pub(super) fn stopped_of_late(&self, now: Mono) -> Option<HangStatus> {
        let (ranks, since) = self.stopped_for(now, STOPPED_REPORT_AFTER)?;
        let why = "a signal stopped them".to_owned();
        Some(HangStatus::Stopped(Suspicion {
            ranks: self.numbers(&ranks),
            since,
            limit: self.floor.min(STOPPED_LIMIT),
            why,
        }))
    }

    /// Ranks that have been stopped for at least `span`, and since when.
    fn stopped_for(&self, now: Mono, span: Span) -> Option<(Vec<usize>, Mono)> {
        let stopped = |rank: &usize| self.ranks[*rank].stopped.is_some_and(|at| now.since(at) >= span);
        let ranks: Vec<usize> = (0..self.ranks.len()).filter(stopped).collect();
        let since = ranks.iter().filter_map(|rank| self.ranks[*rank].stopped).min()?;
        Some((ranks, since))
    }

    /// Ranks do nothing but use CPU time, and NCCL's counters show that some wait for others, always the same ones.
    pub(super) fn waits_in_collectives(&self, now: Mono) -> Option<HangStatus> {
        let Collectives { waits, since, last, .. } = self.collectives.as_ref()?;
        let limit = self.floor.max(Span(self.gap.0.saturating_mul(BEYOND)));
        let all_the_while = *since >= self.worked && last.since(*since) >= limit;
        if !all_the_while || now.since(*last) >= Span(self.floor.0 / 2) {
            return None;
        }
        let place = |rank: &Rank| rank.0.checked_sub(self.first_rank).map(|place| place as usize);
        let culprits: Vec<usize> = waits.culprits.iter().filter_map(place).collect();
        let kind = waits.kind.unwrap_or(HangKind::UserCode);
        let text = format!("{}, and no counter of NCCL moved for {}", waits.reported, last.since(*since));
        Some(self.hang(now, kind, &culprits, self.worked, limit, 0.7, text))
    }

    /// The devices always had work and are now idle, and the processes do nothing but use CPU time.
    pub(super) fn devices_rest(&self, now: Mono) -> Option<HangStatus> {
        let rest = self.devices.rest(now)?;
        let limit = self.floor.max(Span(self.devices.longest().0.saturating_mul(BEYOND)));
        let out_of_the_ordinary = rest >= limit && now.since(self.worked) >= limit;
        if !out_of_the_ordinary || !self.devices.usually_work(Span(self.floor.0 / 2), MIN_WORK_TO_REST) {
            return None;
        }
        let text = format!(
            "no device of the job has had work for {rest}, and its processes read, wrote and printed nothing in that time"
        );
        Some(self.hang(now, HangKind::AllStill, &[], now_minus(now, rest), limit, 0.6, text))
    }

    /// No process of the job does anything.
    pub(super) fn rests(&self, now: Mono, rest: Span, unseen: impl FnOnce() -> bool) -> HangStatus {
        let usual = self.floor.max(Span(self.longest.0.saturating_mul(BEYOND)));
        let long_enough = self.at_work >= Span(self.floor.0 / 2);
        let at_work = long_enough
            && self.rested.0.saturating_mul(MIN_WORK_TO_REST) <= self.at_work.0.saturating_add(self.rested.0);
        // Nothing is known about a rank whose processes cannot be read.
        let known = self.ranks.iter().all(|seen| seen.pulse.is_none() || seen.activity.is_some());
        // No program waits for a file system by design, even if it worked only briefly before.
        let blocked = self
            .ranks
            .iter()
            .filter_map(|seen| seen.blocked)
            .any(|since| since <= self.active.after(self.held_up()));
        if !known || rest < Span(usual.0 / 2) {
            return HangStatus::Progressing;
        }
        if !(at_work || blocked) {
            return if long_enough { HangStatus::Progressing } else { self.rests_since_early(rest, usual) };
        }
        let (limit, why) = if !at_work {
            (Span(usual.0.saturating_mul(UNSEEN)), "it has waited for a file system since it started")
        } else if self.network >= NETWORK {
            (
                Span(usual.0.saturating_mul(UNSEEN)),
                "this host's network carries data that may belong to the job",
            )
        } else if unseen() {
            (Span(usual.0.saturating_mul(UNSEEN)), "it holds a device whose work is not seen from here")
        } else {
            (usual, "it sends no heartbeats and was idle before")
        };
        if rest < limit {
            let why = why.to_owned();
            return HangStatus::Pending(Suspicion { ranks: Vec::new(), since: self.active, limit, why });
        }
        let asleep = |rank: &usize| self.ranks[*rank].state() == Some(ProcessState::Uninterruptible);
        let living: Vec<usize> = (0..self.ranks.len()).filter(|rank| self.lives(*rank)).collect();
        let in_disk_sleep: Vec<usize> = living.iter().copied().filter(asleep).collect();
        let text = format!(
            "no process of {} used CPU time, read, wrote, touched new memory or printed anything for {rest}",
            self.named(&living)
        );
        match (in_disk_sleep.len(), living.as_slice()) {
            (1.., _) => self.hang(now, HangKind::BlockedIo, &in_disk_sleep, self.active, limit, 0.6, text),
            (0, [only]) => self.hang(now, HangKind::AllStill, &[*only], self.active, limit, 0.6, text),
            (0, _) => self.hang(now, HangKind::AllStill, &[], self.active, limit, 0.4, text),
        }
    }

    /// The job does nothing, and worked too briefly before to show that it always works: a hang early in the run, or
    /// a program that waits by design. It is reported and never acted on.
    fn rests_since_early(&self, rest: Span, usual: Span) -> HangStatus {
        let limit = Span(usual.0.saturating_mul(UNSEEN));
        if self.at_work == Span::default() || rest < limit {
            return HangStatus::Progressing;
        }
        let living: Vec<usize> = (0..self.ranks.len()).filter(|rank| self.lives(*rank)).collect();
        let why = format!(
            "no process of {} has done anything, and before that the job was active for {} only; without heartbeats this looks \
             the same as a program that waits",
            self.named(&living),
            self.at_work
        );
        HangStatus::Suspected(Suspicion { ranks: self.numbers(&living), since: self.active, limit, why })
    }

    /// For much longer than ever before, CPU time is used and nothing else happens: a loop, a wait that spins, or
    /// work that looks like it. It is reported and never acted on.
    pub(super) fn only_spins(&self, now: Mono) -> HangStatus {
        let quiet = now.since(self.worked);
        let limit = Span(self.floor.0.max(self.gap.0.saturating_mul(2)).saturating_mul(UNSEEN));
        if self.signs < REGULAR || quiet < limit {
            return HangStatus::Progressing;
        }
        let ranks_of = |activity| {
            let is = move |rank: &usize| self.ranks[*rank].activity == Some(activity);
            (0..self.ranks.len()).filter(is).collect::<Vec<usize>>()
        };
        let (still, spinning) = (ranks_of(Activity::Still), ranks_of(Activity::Spinning));
        let (few, does) = if still.len() <= spinning.len() && !still.is_empty() {
            (still, "does nothing while others use CPU time")
        } else {
            (spinning, "uses CPU time and does nothing else")
        };
        let why = format!(
            "{} {does}, and nothing was put out or read meanwhile; without heartbeats this looks the same as work",
            self.named(&few)
        );
        HangStatus::Suspected(Suspicion { ranks: self.numbers(&few), since: self.worked, limit, why })
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one record, from its makers")]
    fn hang(
        &self,
        now: Mono,
        kind: HangKind,
        culprits: &[usize],
        since: Mono,
        limit: Span,
        confidence: f64,
        text: String,
    ) -> HangStatus {
        let victims = (0..self.ranks.len()).filter(|rank| self.lives(*rank) && !culprits.contains(rank));
        let victims: Vec<usize> = victims.collect();
        let evidence = vec![
            text,
            format!(
                "before, the job was active for {}, and its longest idle period was {}: the limit is {limit}",
                self.at_work, self.longest
            ),
            "the job sends no heartbeats: this is based on the activity of its processes, which is weaker evidence"
                .to_owned(),
        ];
        HangStatus::Confirmed(Box::new(Hang {
            kind,
            culprits: self.numbers(culprits),
            hosts: Vec::new(),
            victims: self.numbers(&victims),
            since,
            confirmed: now,
            phase: ACTIVITY.to_owned(),
            limit,
            step: None,
            confidence,
            evidence,
        }))
    }
}
