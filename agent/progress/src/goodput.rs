//! Time accounting as a ledger: each nanosecond of a job belongs to one state, and the parts add up.
//!
//! The job moves from state to state by [`Ledger::enter`]. Time accounted as training is then divided, step by step,
//! into progress, checkpoints and repeated work. After Wongpanich et al.'s ML Productivity Goodput and ByteRobust's
//! ETTR: productive time over wall time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use mainstay_model::entry::StepDone;
use mainstay_model::time::{Mono, Span};

/// What the job spends its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeCategory {
    /// Steps that count: productive time.
    Training,
    /// Inside the trainer's sections named `checkpoint`.
    Checkpointing,
    /// From the start of the processes to their first contact: interpreter, imports.
    Starting,
    /// From the first contact to the end of the first step: process groups, model, lazy compilation.
    Initialising,
    /// Before the first step, in sections named `restore`.
    Restoring,
    /// Repeated steps, and the unfinished part of a step that a fault cut off.
    LostWork,
    /// From a fault to its detection.
    Undetected,
    /// From the detection until no process of the attempt is left.
    Stopping,
    /// From there to the start of the next attempt.
    Deciding,
    /// From the last step to the end of the job.
    Finishing,
    /// What a finding costs: steps took longer than without it. Only in books over a journal.
    Slowdown,
    /// Hosts meet before an attempt. Only in books over a journal.
    Rendezvous,
    /// A host is missing or not ready. Only in books over a journal.
    Waiting,
    /// No launcher of the job runs, between two launches. Only in books over a journal.
    Idle,
    /// Ranks without heartbeats run: whether they train is unknown. Only in books over a journal.
    Unmeasured,
}

impl TimeCategory {
    /// All categories, the productive one first.
    pub const ALL: [TimeCategory; 15] = [
        TimeCategory::Training,
        TimeCategory::Slowdown,
        TimeCategory::Checkpointing,
        TimeCategory::LostWork,
        TimeCategory::Undetected,
        TimeCategory::Stopping,
        TimeCategory::Deciding,
        TimeCategory::Waiting,
        TimeCategory::Rendezvous,
        TimeCategory::Starting,
        TimeCategory::Initialising,
        TimeCategory::Restoring,
        TimeCategory::Finishing,
        TimeCategory::Idle,
        TimeCategory::Unmeasured,
    ];

    /// Its name in files, JSON and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            TimeCategory::Training => "training",
            TimeCategory::Checkpointing => "checkpointing",
            TimeCategory::Starting => "starting",
            TimeCategory::Initialising => "initialising",
            TimeCategory::Restoring => "restoring",
            TimeCategory::LostWork => "lost_work",
            TimeCategory::Undetected => "undetected",
            TimeCategory::Stopping => "stopping",
            TimeCategory::Deciding => "deciding",
            TimeCategory::Finishing => "finishing",
            TimeCategory::Slowdown => "slowdown",
            TimeCategory::Rendezvous => "rendezvous",
            TimeCategory::Waiting => "waiting",
            TimeCategory::Idle => "idle",
            TimeCategory::Unmeasured => "unmeasured",
        }
    }
}

impl std::fmt::Display for TimeCategory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TimeCategory::LostWork => "lost work",
            TimeCategory::Undetected => "fault undetected",
            TimeCategory::Waiting => "waiting for hosts",
            TimeCategory::Slowdown => "slowed down",
            TimeCategory::Idle => "between launches",
            TimeCategory::Unmeasured => "running without heartbeats",
            of => of.as_str(),
        })
    }
}

/// The time account of one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    began: Mono,
    state: TimeCategory,
    since: Mono,
    booked: BTreeMap<TimeCategory, Span>,
    /// Time accounted as training that was repeated or cut off.
    lost: Span,
    /// Time accounted as training in sections named `checkpoint`.
    saved: Span,
    /// Time accounted as initialising in sections named `restore`.
    #[serde(default)]
    restored: Span,
    /// The newest step completed by the lead rank in any attempt.
    reached: Option<u64>,
    /// The newest step completed before the current attempt.
    reached_before: Option<u64>,
    /// The highest number of a completed step, as the program or the hook counts; and the same before the current
    /// attempt.
    highest: (Option<u64>, Option<u64>),
    /// Whether any rank ever sent a heartbeat. Without heartbeats training time is unknown.
    #[serde(rename = "heard")]
    measured: bool,
    last_step_end: Option<Mono>,
    steps: u64,
    steps_lost: u64,
    /// Whether steps of a later attempt were counted by a hook.
    #[serde(default)]
    counted: bool,
    saves: u64,
    /// The part of `saved` that the journal has.
    #[serde(default)]
    saved_recorded: Span,
    /// The part of `saves` that the journal has.
    #[serde(default)]
    saves_recorded: u64,
}

/// The time accounting of a job at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeAccounting {
    /// From the start of the job to this moment.
    pub wall: Span,
    /// The time per category; the sum is `wall`.
    pub parts: BTreeMap<TimeCategory, Span>,
    /// Training over wall time, 0 to 1. `None` if no rank sent heartbeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<f64>,
    /// Distinct steps completed.
    pub steps: u64,
    /// Repeated steps: an earlier attempt had completed a step with that number.
    pub steps_lost: u64,
    /// The program does not number its steps. After a restart they were counted from 0 again, as if it had started from
    /// the beginning: if it resumed from a checkpoint, `steps_lost` is too high and `goodput` too low.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub counted: bool,
    /// Steps that include time in a checkpoint.
    #[serde(default)]
    pub saves: u64,
}

impl Ledger {
    /// Opens the account of a job that starts now.
    pub fn open(at: Mono) -> Ledger {
        Ledger {
            began: at,
            state: TimeCategory::Starting,
            since: at,
            booked: BTreeMap::new(),
            lost: Span::default(),
            saved: Span::default(),
            restored: Span::default(),
            reached: None,
            reached_before: None,
            highest: (None, None),
            measured: false,
            last_step_end: None,
            steps: 0,
            steps_lost: 0,
            counted: false,
            saves: 0,
            saved_recorded: Span::default(),
            saves_recorded: 0,
        }
    }

    /// From `at` on the time counts for `state`. A time before the last change counts as that of the change.
    pub fn enter(&mut self, at: Mono, state: TimeCategory) {
        let at = at.max(self.since);
        self.measured |= matches!(state, TimeCategory::Initialising | TimeCategory::Training);
        let cut_off = self.state == TimeCategory::Training && state != TimeCategory::Training;
        self.book(self.state, at.since(self.since));
        if cut_off && state == TimeCategory::Undetected {
            self.charge_unfinished_step(at);
        }
        self.state = state;
        self.since = at;
    }

    /// The same with its times converted to another clock.
    #[must_use]
    pub fn on_clock(self, at: &dyn Fn(Mono) -> Mono) -> Ledger {
        Ledger {
            began: at(self.began),
            since: at(self.since),
            last_step_end: self.last_step_end.map(at),
            ..self
        }
    }

    /// The present state.
    pub fn state(&self) -> TimeCategory {
        self.state
    }

    /// The highest number of a step that was completed before the current attempt.
    pub fn highest_before(&self) -> Option<u64> {
        self.highest.1
    }

    /// The newest step that the lead rank completed in any attempt. If steps are counted from 0 in each process, the
    /// total number of steps.
    pub fn reached(&self) -> Option<u64> {
        self.reached
    }

    /// Starts a new attempt: steps up to the newest one so far are repeated.
    pub fn begin_attempt(&mut self) {
        self.reached_before = self.reached;
        self.highest.1 = self.highest.0;
        self.last_step_end = None;
    }

    /// The lead rank completed a step.
    pub fn step(&mut self, done: &StepDone) {
        // The duration of a first step cannot be separated from the setup before it, and is accounted as setup.
        let mut length = if done.first { Span::default() } else { done.end.since(done.start) };
        if self.last_step_end.is_none() {
            self.restored = self.restored.plus(Span(done.restore_ns));
            length = length.minus(Span(done.restore_ns).min(length));
        }
        // Counted steps start at 0 in each process. Whether the program resumed from a checkpoint is unknown. For the
        // policy each step is progress, so that no job is stopped that advances. Goodput counts no number twice.
        let number = match self.reached_before {
            Some(reached) if done.counted => done.step.saturating_add(reached).saturating_add(1),
            _ => done.step,
        };
        self.counted |= done.counted && self.reached_before.is_some();
        if self.highest.1.is_some_and(|highest| done.step <= highest) {
            self.steps_lost += 1;
            self.lost = self.lost.plus(length);
        } else {
            self.steps += 1;
            self.saved = self.saved.plus(Span(done.checkpoint_ns.min(length.0)));
            self.saves += u64::from(done.checkpoint_ns.min(length.0) > 0);
        }
        self.reached = self.reached.max(Some(number));
        self.highest.0 = self.highest.0.max(Some(done.step));
        self.last_step_end = Some(done.end);
    }

    /// The time in sections named `checkpoint` since the last call, and the number of steps with such time, for the
    /// journal.
    pub fn take_saved(&mut self) -> (Span, u64) {
        let before = std::mem::replace(&mut self.saved_recorded, self.saved);
        let saves_before = std::mem::replace(&mut self.saves_recorded, self.saves);
        (self.saved.minus(before), self.saves.saturating_sub(saves_before))
    }

    /// The time accounting at `at`.
    pub fn accounting(&self, at: Mono) -> TimeAccounting {
        let at = at.max(self.since);
        let mut parts = self.booked.clone();
        let open = parts.entry(self.state).or_default();
        *open = open.plus(at.since(self.since));
        // Steps are seen later than states change. No more can be moved out of training than was accounted there.
        for (state, of, charged) in [
            (TimeCategory::LostWork, TimeCategory::Training, self.lost),
            (TimeCategory::Checkpointing, TimeCategory::Training, self.saved),
            (TimeCategory::Restoring, TimeCategory::Initialising, self.restored),
        ] {
            let whole = parts.entry(of).or_default();
            let moved = charged.min(*whole);
            *whole = whole.minus(moved);
            parts.insert(state, moved);
        }
        let training = parts.get(&TimeCategory::Training).copied().unwrap_or_default();
        parts.retain(|_, span| span.0 > 0);
        let wall = at.since(self.began);
        let share = if wall.0 == 0 { 0.0 } else { training.0 as f64 / wall.0 as f64 };
        let goodput = self.measured.then_some(share);
        TimeAccounting {
            wall,
            parts,
            goodput,
            steps: self.steps,
            steps_lost: self.steps_lost,
            counted: self.counted,
            saves: self.saves,
        }
    }

    /// Accounts the part of a step that a fault cut off as lost work.
    fn charge_unfinished_step(&mut self, fault_at: Mono) {
        if let Some(end) = self.last_step_end {
            self.lost = self.lost.plus(fault_at.since(end));
        }
    }

    fn book(&mut self, state: TimeCategory, span: Span) {
        let booked = self.booked.entry(state).or_default();
        *booked = booked.plus(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn step(number: u64, start: u64, end: u64) -> StepDone {
        StepDone { step: number, start: Mono(start), end: Mono(end), ..StepDone::default() }
    }

    #[test]
    fn repeated_steps_of_a_program_that_does_not_number_its_own_are_unknown() {
        let counted = |number| StepDone { counted: true, ..step(number, 100 * number, 100 * number + 100) };
        let mut ledger = Ledger::open(Mono(0));
        ledger.begin_attempt();
        ledger.enter(Mono(100), TimeCategory::Training);
        (1..=12).for_each(|number| ledger.step(&counted(number)));
        assert!(!ledger.accounting(Mono(2000)).counted, "without a restart there is nothing to repeat");
        ledger.begin_attempt();
        (1..=10).for_each(|number| ledger.step(&counted(number)));
        let accounting = ledger.accounting(Mono(3000));
        assert_eq!((accounting.counted, accounting.steps, accounting.steps_lost), (true, 12, 10));
        // The next leader of the job knows it too.
        let handed_over: Ledger = serde_json::from_str(&serde_json::to_string(&ledger).unwrap()).unwrap();
        assert_eq!(handed_over, ledger);
    }

    #[test]
    fn a_fault_costs_its_detection_the_restart_and_the_repeated_steps() {
        let mut ledger = Ledger::open(Mono(0));
        ledger.begin_attempt();
        ledger.enter(Mono(100), TimeCategory::Initialising);
        ledger.enter(Mono(200), TimeCategory::Training);
        ledger.step(&step(1, 200, 300));
        ledger.step(&StepDone { checkpoint_ns: 40, ..step(2, 300, 400) });
        ledger.step(&step(3, 400, 500));
        ledger.enter(Mono(550), TimeCategory::Undetected);
        ledger.enter(Mono(560), TimeCategory::Stopping);
        ledger.enter(Mono(600), TimeCategory::Deciding);
        ledger.enter(Mono(610), TimeCategory::Starting);
        ledger.begin_attempt();
        ledger.enter(Mono(700), TimeCategory::Training);
        ledger.step(&step(3, 700, 800));
        ledger.step(&step(4, 800, 900));
        ledger.enter(Mono(900), TimeCategory::Finishing);
        let accounting = ledger.accounting(Mono(1000));
        let part = |spending| accounting.parts.get(&spending).map(|span| span.0);
        assert_eq!(part(TimeCategory::Training), Some(200 + 60 + 100));
        assert_eq!(part(TimeCategory::Checkpointing), Some(40));
        assert_eq!(part(TimeCategory::LostWork), Some(50 + 100));
        assert_eq!(part(TimeCategory::Undetected), Some(10));
        assert_eq!((accounting.steps, accounting.steps_lost, accounting.goodput), (4, 1, Some(0.36)));
    }

    #[test]
    fn a_restore_is_a_part_of_the_start_and_of_the_first_step_of_a_rank_that_stayed() {
        let mut ledger = Ledger::open(Mono(0));
        ledger.begin_attempt();
        ledger.enter(Mono(100), TimeCategory::Initialising);
        ledger.enter(Mono(400), TimeCategory::Training);
        ledger.step(&StepDone { first: true, restore_ns: 250, ..step(8, 100, 400) });
        ledger.step(&StepDone { restore_ns: 70, ..step(9, 400, 500) });
        ledger.enter(Mono(500), TimeCategory::Undetected);
        ledger.begin_attempt();
        ledger.enter(Mono(500), TimeCategory::Initialising);
        ledger.enter(Mono(560), TimeCategory::Training);
        ledger.step(&StepDone { restore_ns: 60, ..step(9, 500, 600) });
        let accounting = ledger.accounting(Mono(600));
        let part = |category| accounting.parts.get(&category).map(|span| span.0);
        assert_eq!(part(TimeCategory::Restoring), Some(250 + 60));
        assert_eq!(part(TimeCategory::Initialising), Some(50));
        // A load between two steps is a part of the second one.
        assert_eq!((part(TimeCategory::Training), part(TimeCategory::LostWork)), (Some(100), Some(40)));
    }

    #[test]
    fn steps_that_are_counted_from_zero_again_are_repeated_and_still_progress() {
        let mut ledger = Ledger::open(Mono(0));
        for attempt in 0..3 {
            ledger.begin_attempt();
            for number in 0..5 {
                ledger.enter(Mono(attempt * 100), TimeCategory::Training);
                let start = attempt * 100 + number * 10;
                ledger.step(&StepDone { counted: true, ..step(number, start, start + 10) });
            }
            ledger.enter(Mono(attempt * 100 + 50), TimeCategory::Deciding);
        }
        let accounting = ledger.accounting(Mono(300));
        assert_eq!((accounting.steps, accounting.steps_lost), (5, 10));
        assert_eq!(accounting.parts.get(&TimeCategory::LostWork), Some(&Span(100)));
        assert_eq!(accounting.parts.get(&TimeCategory::Training), Some(&Span(50)));
        // The policy must not consider a job stuck that may have resumed.
        assert_eq!(ledger.reached(), Some(14));
        ledger.begin_attempt();
        assert_eq!(ledger.reached(), Some(14), "an attempt without a step is no progress");
    }

    #[test]
    fn a_program_that_restarts_from_zero_is_productive_only_beyond_its_last_step() {
        let mut ledger = Ledger::open(Mono(0));
        for (attempt, steps) in [(0, 10), (1, 12)] {
            ledger.begin_attempt();
            for number in 0..steps {
                ledger.step(&step(number, attempt * 1000 + number * 10, attempt * 1000 + number * 10 + 10));
            }
        }
        let accounting = ledger.accounting(Mono(2000));
        assert_eq!((accounting.steps, accounting.steps_lost), (12, 10));
    }

    #[test]
    fn a_job_without_heartbeats_has_no_goodput() {
        let mut ledger = Ledger::open(Mono(0));
        ledger.begin_attempt();
        ledger.enter(Mono(90), TimeCategory::Undetected);
        let silent = ledger.accounting(Mono(100));
        assert_eq!(silent.goodput, None);
        assert!(!serde_json::to_string(&silent).expect("books are JSON").contains("goodput"));
        ledger.enter(Mono(100), TimeCategory::Initialising);
        assert_eq!(ledger.accounting(Mono(200)).goodput, Some(0.0));
    }

    fn spending() -> impl Strategy<Value = TimeCategory> {
        prop::sample::select(vec![
            TimeCategory::Training,
            TimeCategory::Starting,
            TimeCategory::Initialising,
            TimeCategory::Undetected,
            TimeCategory::Stopping,
            TimeCategory::Deciding,
            TimeCategory::Finishing,
        ])
    }

    proptest! {
        /// For any events in any order at any times, the parts add up to the wall time.
        #[test]
        fn the_parts_add_up_to_the_wall_time(
            changes in prop::collection::vec((0u64..10_000, spending()), 0..40),
            steps in prop::collection::vec((0u64..50, 0u64..10_000, 0u64..5_000, 0u64..9_000, 0u64..9_000), 0..40),
            end in 0u64..20_000,
        ) {
            let mut ledger = Ledger::open(Mono(0));
            let mut steps = steps.into_iter();
            for (at, state) in changes {
                ledger.enter(Mono(at), state);
                if state == TimeCategory::Starting {
                    ledger.begin_attempt();
                }
                if let Some((number, start, length, checkpoint_ns, restore_ns)) = steps.next() {
                    ledger.step(&StepDone { checkpoint_ns, restore_ns, ..step(number, start, start + length) });
                }
            }
            let accounting = ledger.accounting(Mono(end));
            let sum: u64 = accounting.parts.values().map(|span| span.0).sum();
            prop_assert_eq!(sum, accounting.wall.0);
            prop_assert!(accounting.goodput.is_none_or(|goodput| goodput <= 1.0));
        }
    }
}
