//! A restart by a mild rung has a time limit. If it has not completed a step by then, the next rung replaces it.

use std::collections::BTreeMap;

use crate::policy::{self, Rung};
use mainstay_diagnosis::root_rank::hung;
use mainstay_hang::{Hang, HangKind};
use mainstay_model::entry::{Body, Fact};
use mainstay_model::observation::HostsEvent;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Verdict;

use super::problems::{FILE_SYSTEM_ANSWERS, FILE_SYSTEM_SILENT};
use super::{Command, EXHAUSTED, Job, ORDERS, Output, Phase, RANK_EXCLUDED, RESTART_ORDERED, SAVE_ORDERED};

/// The event that records, also for a replay, that a restart was abandoned.
const EVENT: &str = "restart_too_long";

/// A restart that was abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overdue {
    rung: Rung,
    within: Span,
}

impl Job {
    /// Requests a wake-up for the time by which the restart must have completed a step.
    pub(super) fn time_restart(&mut self, at: Mono, out: &mut Vec<Output>) {
        let recovers = self.incidents.last().is_some_and(|incident| incident.first_step_at.is_none());
        let within = policy::patience(self.rung, self.longest_start).filter(|_| recovers);
        self.restart_until = within.map(|within| (at.after(within), Overdue { rung: self.rung, within }));
        if let Some((until, _)) = self.restart_until {
            out.push(Output::Command(Command::Wake { at: until }));
        }
    }

    pub(super) fn look_after_restart(&mut self, at: Mono, out: &mut Vec<Output>) {
        match self.restart_until {
            Some((until, _)) if at < until => out.push(Output::Command(Command::Wake { at: until })),
            // A hang has its own evidence and is judged by that.
            Some((_, overdue)) if !self.stepping && self.hang.is_none() => {
                out.push(Output::Record(Body::Fact(overdue.observed())));
                self.give_up(at, overdue, out);
            }
            Some(_) | None => {}
        }
    }

    /// Handles orders of people, and the journal's record of an abandoned restart.
    pub(super) fn observed(&mut self, at: Mono, seen: &Observation, out: &mut Vec<Output>) {
        let ordered =
            seen.component == ORDERS && matches!(seen.event.as_str(), RESTART_ORDERED | RANK_EXCLUDED);
        if ordered || HostsEvent::WorldGrows.is(seen) {
            return self.restart_ordered(at, out);
        }
        if seen.component == ORDERS
            && seen.event == SAVE_ORDERED
            && let Some(exit) = seen.values.get("exit").and_then(|exit| exit.parse().ok())
        {
            return self.save_ordered(exit, out);
        }
        if matches!(seen.event.as_str(), FILE_SYSTEM_SILENT | FILE_SYSTEM_ANSWERS) {
            self.file_system_observed(seen, out);
        }
        if seen.event == EXHAUSTED {
            self.exhausted = Some(seen.detail.clone());
        }
        if seen.event == EVENT
            && self.phase == Phase::Running
            && let Some(within) = seen.values.get("within_ns").and_then(|nanos| nanos.parse().ok())
        {
            self.give_up(at, Overdue { rung: self.rung, within: Span(within) }, out);
        }
    }

    fn give_up(&mut self, at: Mono, overdue: Overdue, out: &mut Vec<Output>) {
        self.restart_until = None;
        self.overdue = Some(overdue);
        self.failure(at, at, out);
    }

    pub(super) fn took_too_long(&self, at: Mono, restart: Overdue) -> Verdict {
        let hang = Hang {
            kind: HangKind::AllStill,
            culprits: Vec::new(),
            hosts: Vec::new(),
            victims: Vec::new(),
            since: self.attempt_began,
            confirmed: at,
            phase: "first_step".to_owned(),
            limit: restart.within,
            step: None,
            confidence: 0.5,
            evidence: vec![restart.describe()],
        };
        let verdict = hung(self.next_incident(), self.attempt, &hang, Vec::new());
        Verdict { headline: restart.describe(), ..verdict }
    }
}

impl Overdue {
    fn describe(self) -> String {
        format!(
            "after {}, the ranks did not all complete a step within {}",
            self.rung.describe(),
            self.within
        )
    }

    fn observed(self) -> Fact {
        Fact::Observed(Observation {
            component: "job".to_owned(),
            event: EVENT.to_owned(),
            weight: Weight::Warning,
            detail: self.describe(),
            values: BTreeMap::from([("within_ns".to_owned(), self.within.0.to_string())]),
        })
    }
}
