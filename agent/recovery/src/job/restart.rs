//! A restart by a mild rung has a time limit. If it has not completed a step by then, the next rung replaces it.

use std::collections::BTreeMap;

use crate::policy::{self, Rung};
use mainstay_diagnosis::root_rank::hung;
use mainstay_hang::{Hang, HangKind};
use mainstay_model::entry::Fact;
use mainstay_model::id::{Attempt, Incident};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::Verdict;

/// The event that records, also for a replay, that a restart was abandoned.
const EVENT: &str = "restart_too_long";

/// How the ranks are started next, and how long the present start may take.
#[derive(Clone, Debug)]
pub(super) struct Restart {
    /// The rung that starts the next attempt.
    pub(super) rung: Rung,
    /// The longest that a start of all or some ranks took until all had completed a step.
    pub(super) longest: Option<Span>,
    /// When the restart in progress is abandoned if it has not completed a step.
    pub(super) until: Option<(Mono, Overdue)>,
    /// The restart that was abandoned.
    pub(super) overdue: Option<Overdue>,
}

impl Restart {
    pub(super) fn new() -> Restart {
        Restart { rung: Rung::All, longest: None, until: None, overdue: None }
    }

    /// Ranks were started, to recover from a failure or not. Returns the time by which they must
    /// have completed a step.
    pub(super) fn begin(&mut self, at: Mono, recovers: bool) -> Option<Mono> {
        let within = policy::patience(self.rung, self.longest).filter(|_| recovers);
        self.overdue = None;
        self.until = within.map(|within| (at.after(within), Overdue { rung: self.rung, within }));
        self.until.as_ref().map(|(until, _)| *until)
    }

    /// The restart that the journal records as abandoned.
    pub(super) fn recorded(&self, seen: &Observation) -> Option<Overdue> {
        let within = seen.values.get("within_ns").filter(|_| seen.event == EVENT)?.parse().ok()?;
        Some(Overdue { rung: self.rung, within: Span(within) })
    }
}

/// A restart that was abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overdue {
    rung: Rung,
    within: Span,
}

impl Overdue {
    /// The verdict on an attempt that began at `began`.
    pub(super) fn verdict(self, incident: Incident, attempt: Attempt, began: Mono, at: Mono) -> Verdict {
        let hang = Hang {
            kind: HangKind::AllStill,
            culprits: Vec::new(),
            hosts: Vec::new(),
            victims: Vec::new(),
            since: began,
            confirmed: at,
            phase: "first_step".to_owned(),
            limit: self.within,
            step: None,
            confidence: 0.5,
            evidence: vec![self.describe()],
        };
        Verdict { headline: self.describe(), ..hung(incident, attempt, &hang, Vec::new()) }
    }

    fn describe(self) -> String {
        format!(
            "after {}, the ranks did not all complete a step within {}",
            self.rung.describe(),
            self.within
        )
    }

    pub(super) fn observed(self) -> Fact {
        Fact::Observed(Observation {
            component: "job".to_owned(),
            event: EVENT.to_owned(),
            weight: Weight::Warning,
            detail: self.describe(),
            values: BTreeMap::from([("within_ns".to_owned(), self.within.0.to_string())]),
        })
    }
}
