//! The policy's types in the journal: rungs, budgets, settings, kinds of causes, and the experience with rungs. The
//! decisions are in `recovery::policy`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::rung::{Rung, Rungs};
use crate::time::Span;
use crate::verdict::Cause;

/// How many restarts are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Restarts allowed per window.
    pub max_restarts: u32,
    /// The window; `None` means the whole life of the job.
    pub window: Option<Span>,
}

/// What the user allows the policy to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The budget of all restarts.
    pub budget: Budget,
    /// Additional budgets of restarts by kind of cause.
    pub by_cause: BTreeMap<CauseKind, Budget>,
    /// The rungs that are always available; ranks that wait in their processes make more available.
    pub rungs: Rungs,
    /// How long to wait for a host that is not ready; `None` to restart without a check.
    pub ready_within: Option<Span>,
    /// The exit status that asks the scheduler to start the job on another host.
    pub hand_back_exit: i32,
    /// Whether decisions are only reported: the job then ends at its first failure.
    pub dry_run: bool,
    /// A number of the job that makes its delays differ from those of other jobs.
    pub seed: u64,
}

/// EX_TEMPFAIL of sysexits.h: try again later or elsewhere.
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

/// Kinds of causes that share budgets and experience.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// A rank raised.
    Exception,
    /// A rank exited with a code and left no note.
    ExitCode,
    /// A signal ended a rank.
    Signal,
    /// The OOM killer killed a rank.
    OutOfMemory,
    /// Ranks were alive and made no progress.
    Hang,
    /// A host with ranks was lost.
    HostLost,
    /// Ranks could not be started.
    Start,
}

impl CauseKind {
    /// All kinds.
    pub const ALL: [CauseKind; 7] = [
        CauseKind::Exception,
        CauseKind::ExitCode,
        CauseKind::Signal,
        CauseKind::OutOfMemory,
        CauseKind::Hang,
        CauseKind::HostLost,
        CauseKind::Start,
    ];

    /// The kind of a cause.
    pub fn from_cause(cause: &Cause) -> CauseKind {
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

    /// Its name on the command line.
    pub fn as_str(self) -> &'static str {
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

    /// Parses a kind's name.
    pub fn parse(word: &str) -> Option<CauseKind> {
        CauseKind::ALL.into_iter().find(|kind| kind.as_str() == word)
    }
}

/// The maximum weight of the experience with a rung, in restarts.
pub const MAX_EXPERIENCE_WEIGHT: f64 = 8.0;

/// Maximum recorded duration, in seconds.
pub const MAX_DURATION_SECONDS: f64 = 1e6;

/// The experience with a rung.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experience {
    /// The kind of cause.
    pub cause: CauseKind,
    /// The rung.
    pub rung: Rung,
    /// How often it was taken; older tries count less, so it may be fractional.
    pub tried: f64,
    /// After how many of these all ranks completed a step.
    pub helped: f64,
    /// Seconds from the fault to that step; the newest counts most. 0 if it never helped.
    pub seconds: f64,
}

impl Experience {
    /// Whether the values are possible: the file may be corrupt.
    pub fn is_sound(&self) -> bool {
        let within = |number: f64, most: f64| number.is_finite() && (0.0..=most).contains(&number);
        within(self.tried, MAX_EXPERIENCE_WEIGHT)
            && within(self.helped, self.tried)
            && within(self.seconds, MAX_DURATION_SECONDS)
    }
}
