//! The words of the policy that stand in the journal: rungs, budgets, settings, kinds of causes, and what was learned of rungs.
//! What is decided with them is in `recovery::policy`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::base::time::Span;
pub use crate::model::rung::{Rung, Rungs};
use crate::model::verdict::Cause;

/// How often restarts are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Restarts allowed per window.
    pub max_restarts: u32,
    /// The window; none means the whole life of the job.
    pub window: Option<Span>,
}

/// What the user lets the policy do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Of all restarts.
    pub budget: Budget,
    /// Of restarts for causes of a kind, beside that.
    pub by_cause: BTreeMap<CauseKind, Budget>,
    /// What there are hands for in any case; ranks that wait in their processes open more.
    pub rungs: Rungs,
    /// How long a host that is not ready is waited for; none to restart without looking.
    pub ready_within: Option<Span>,
    /// The status that asks the scheduler to start the job again elsewhere.
    pub hand_back_exit: i32,
    /// Whether it is only said what would be done: the job then ends at its first failure.
    pub dry_run: bool,
    /// The job's own number, by which its waits differ from those of other jobs.
    pub seed: u64,
}

/// EX_TEMPFAIL of sysexits.h: not now and here, but later or elsewhere.
pub const HAND_BACK_EXIT: i32 = 75;

impl From<Budget> for Settings {
    fn from(budget: Budget) -> Settings {
        Settings {
            budget,
            by_cause: BTreeMap::new(),
            rungs: Rungs::ONE_HOST,
            ready_within: Some(Span::seconds(60)),
            hand_back_exit: HAND_BACK_EXIT,
            dry_run: false,
            seed: 0,
        }
    }
}

/// Causes that are counted and learned about together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// A rank raised.
    Exception,
    /// A rank exited with a code and without a word.
    ExitCode,
    /// A signal ended a rank.
    Signal,
    /// The kernel killed a rank for lack of memory.
    OutOfMemory,
    /// Ranks lived and did not move.
    Hang,
    /// The host of ranks was lost.
    HostLost,
    /// Ranks could not be started.
    Start,
}

impl CauseKind {
    /// All of them.
    pub const ALL: [CauseKind; 7] = [
        CauseKind::Exception,
        CauseKind::ExitCode,
        CauseKind::Signal,
        CauseKind::OutOfMemory,
        CauseKind::Hang,
        CauseKind::HostLost,
        CauseKind::Start,
    ];

    /// The kind of this cause.
    pub fn of(cause: &Cause) -> CauseKind {
        match cause {
            Cause::Exception { .. } => CauseKind::Exception,
            Cause::ExitCode { .. } => CauseKind::ExitCode,
            Cause::Signal { .. } => CauseKind::Signal,
            Cause::OutOfMemory => CauseKind::OutOfMemory,
            Cause::Hang { .. } => CauseKind::Hang,
            Cause::HostLost { .. } => CauseKind::HostLost,
            Cause::StartFailed => CauseKind::Start,
        }
    }

    /// Its word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            CauseKind::Exception => "exception",
            CauseKind::ExitCode => "exit_code",
            CauseKind::Signal => "signal",
            CauseKind::OutOfMemory => "out_of_memory",
            CauseKind::Hang => "hang",
            CauseKind::HostLost => "host_lost",
            CauseKind::Start => "start",
        }
    }

    /// The kind of this word.
    pub fn parse(word: &str) -> Option<CauseKind> {
        CauseKind::ALL.into_iter().find(|kind| kind.word() == word)
    }
}

/// What was learned of a rung counts as much as so many restarts, however many there were.
pub(crate) const MOST: f64 = 8.0;

/// Nothing that is kept took longer, in seconds.
pub(crate) const LONGEST: f64 = 1e6;

/// What was learned of a rung.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experience {
    /// Against causes of which kind.
    pub cause: CauseKind,
    /// Which rung.
    pub rung: Rung,
    /// How often it was taken; weighed down, so that it is no whole number.
    pub tried: f64,
    /// How often all ranks then completed a step.
    pub helped: f64,
    /// What it took from the fault to that step, in seconds; the newest count most. Nothing where it never helped.
    pub seconds: f64,
}

impl Experience {
    /// Whether it can be: of a file that somebody may have spoilt.
    pub fn is_sound(&self) -> bool {
        let within = |number: f64, most: f64| number.is_finite() && (0.0..=most).contains(&number);
        within(self.tried, MOST) && within(self.helped, self.tried) && within(self.seconds, LONGEST)
    }
}
