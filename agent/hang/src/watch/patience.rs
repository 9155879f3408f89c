//! How long to wait before a lack of movement counts as a hang, and why.

use crate::activity::{Activity, ProcessState};
use crate::locate::Suspects;
use crate::phase::{Limit, LimitFrom, PhaseId};
use mainstay_model::hang::HangKind;
use mainstay_model::time::{Mono, Span};

use super::Watch;

/// Twice the factor by which the steps of a job may grow at once when its sequences become longer.
const GROWS_AT_ONCE_TWICE: u64 = 7;

/// A driver's report about its devices may be this old: it covers the last second, and takes time to arrive.
const REPORTED_LATE: Span = Span::seconds(3);

impl Watch {
    /// Why no progress is expected. `None` if it is.
    pub(super) fn expected(&self, now: Mono) -> Option<String> {
        let living = |rank: &usize| self.lives(*rank);
        if let Some(rank) =
            (0..self.ranks.len()).filter(living).find(|r| self.ranks[*r].sample.quiet_until > now)
        {
            let stated =
                if self.ranks[rank].sample.quiet_until == Mono::NEVER { "a pause" } else { "a long phase" };
            return Some(format!("rank {} announced {stated}", self.number(rank).0));
        }
        let traced = (0..self.probes.len()).filter(living).find(|r| self.state(*r) == ProcessState::Traced);
        traced.map(|rank| format!("a debugger holds rank {}", self.number(rank).0))
    }

    /// The shortest time without any movement before anything is confirmed.
    pub(super) fn confirmation(&self) -> Span {
        let half = self.phases.median(PhaseId::STEP).map_or(0, |median| median.0 / 2);
        self.phases.limits().confirm.max(Span(half))
    }

    /// What the suspects are doing, with its limit: of several the one with the most room.
    pub(super) fn usual(&self, suspects: &Suspects) -> (PhaseId, Limit) {
        let phase_of = |rank: &u32| self.phase(*rank as usize);
        let phase = suspects
            .among
            .iter()
            .map(phase_of)
            .max_by_key(|phase| self.phases.limit(*phase).span)
            .unwrap_or(PhaseId::STEP);
        (phase, self.phases.limit(phase))
    }

    /// How much longer than usual the suspect with the most room takes; zero if it does not.
    pub(super) fn overdue(&self, now: Mono, suspects: &Suspects) -> Span {
        suspects
            .among
            .iter()
            .map(|rank| {
                let since = self.ranks[*rank as usize].sample.since.max(self.restarted).max(self.began);
                now.since(since).minus(self.phases.limit(self.phase(*rank as usize)).span)
            })
            .min()
            .unwrap_or_default()
    }

    /// How long nothing may move before it is a hang, and why.
    pub(super) fn patience(&self, now: Mono, suspects: &Suspects) -> (Span, String) {
        let mut limit = self.confirmation();
        let mut why = String::new();
        let mut wait = |span: Span, reason: String| {
            if span > limit {
                (limit, why) = (span, reason);
            }
        };
        // A rank in a long phase may be what the others wait for, whatever else it looks like.
        for rank in (0..self.ranks.len()).filter(|rank| self.lives(*rank)) {
            let sample = &self.ranks[rank].sample;
            let first = sample.step.is_none()
                && (sample.registered || self.newest_step().is_none())
                && !self.prints_nothing(rank);
            let long = if first { Some(PhaseId::FIRST_STEP) } else { sample.long };
            if let Some(phase) = long.filter(|_| !sample.closed) {
                let name = self.phases.name(phase);
                wait(self.phases.limit(phase).span, format!("{} is in {name}", self.number(rank)));
            }
        }
        let limits = self.phases.limits();
        let (phase, usual) = self.usual(suspects);
        if usual.from == LimitFrom::Given {
            return (limit, why);
        }
        if matches!(suspects.kind, HangKind::Network | HangKind::BlockedIo | HangKind::SilentHost)
            || suspects.among.iter().any(|rank| self.state(*rank as usize) == ProcessState::Uninterruptible)
        {
            wait(limits.passing, "such a wait often ends by itself".to_owned());
        }
        let may_be_at_a_longer_step = !self.would_be_seen_at_work() && !self.devices_came_to_rest();
        if suspects.kind == HangKind::AllStill && may_be_at_a_longer_step {
            // A curriculum lengthens sequences for all ranks at once: the devices may be in a longer step while all
            // processes wait.
            let grown = self
                .phases
                .median(phase)
                .map_or(0, |median| median.0.saturating_mul(GROWS_AT_ONCE_TWICE) / 2);
            wait(Span(grown), "all ranks are alike, and steps may have become longer at once".to_owned());
        }
        if self.probed && suspects.kind != HangKind::Network {
            let longest = self.phases.longest(phase);
            let room = Span(longest.0.saturating_mul(5)).min(limits.most(longest));
            for rank in suspects.among.iter().map(|rank| *rank as usize).filter(|rank| self.lives(*rank)) {
                let who = self.number(rank);
                match self.activity(rank) {
                    Some(Activity::Still) => {}
                    Some(Activity::Spinning) => {
                        wait(limits.spinning.max(room), format!("{who} uses CPU time"))
                    }
                    Some(Activity::Working) => {
                        wait(limits.working.max(room), format!("{who} reads, writes or touches new memory"));
                    }
                    None => wait(
                        self.silence(now).plus(Span(1)),
                        format!("the activity of {who} is unknown so far"),
                    ),
                }
            }
        }
        (limit, why)
    }

    /// Whether a longer step of this job would show in its processes. If it would, idle processes are not in one.
    pub(super) fn would_be_seen_at_work(&self) -> bool {
        let mut living = (0..self.ranks.len()).filter(|rank| self.lives(*rank)).peekable();
        living.peek().is_some()
            && living.all(|rank| {
                self.activity(rank) == Some(Activity::Still)
                    && self.probes[rank].works_in_the_open(self.began, self.moved)
            })
    }

    /// Whether the devices became idle after the last movement. If so, they are not in a longer step either.
    fn devices_came_to_rest(&self) -> bool {
        self.devices_rest.is_some_and(|since| since >= self.moved.after(REPORTED_LATE))
    }
}
