//! What a failure means, what is done about it and what came of it.

use serde::{Deserialize, Serialize};

use crate::base::id::{Attempt, Incident, Rank};
use crate::base::time::{Mono, Span};
use crate::model::hang::HangKind;
use crate::model::rung::Rung;

/// Whose fault a failure was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultDomain {
    /// The training program, its configuration or its data.
    User,
    /// A device or the host.
    Hardware,
    /// Network, storage, scheduling.
    Infrastructure,
    /// The software the program stands on.
    Platform,
    /// It cannot be told from what was seen.
    Unknown,
}

impl std::fmt::Display for FaultDomain {
    /// In plain words: "the training program's fault".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FaultDomain::User => "the training program's fault",
            FaultDomain::Hardware => "the hardware's fault",
            FaultDomain::Infrastructure => "the infrastructure's fault",
            FaultDomain::Platform => "the platform's fault",
            FaultDomain::Unknown => "fault unknown",
        })
    }
}

/// What kind of end a failure was, as far as one host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Cause {
    /// The rank raised and said so.
    Exception {
        /// Type of the exception.
        exception: String,
        /// Type, message and innermost frames with numbers and paths masked: equal for the same bug.
        fingerprint: String,
    },
    /// The rank exited with a code and left no note.
    ExitCode {
        /// The code.
        code: i32,
    },
    /// A signal ended the rank.
    Signal {
        /// The signal.
        signal: i32,
    },
    /// The kernel's OOM killer was at work when the rank was killed.
    OutOfMemory,
    /// The rank's host was lost, and the rank with it.
    HostLost {
        /// The host's name.
        host: String,
    },
    /// The ranks could not be started.
    StartFailed,
    /// Ranks lived and did not move.
    Hang {
        /// Of what kind.
        hang: HangKind,
        /// Where: rank and section. Equal for the same hang.
        place: String,
    },
}

impl Cause {
    /// Signals that programs hardly send themselves: HUP, INT, QUIT, KILL, USR1, USR2, TERM, and what XCPU, STOP and the like
    /// are sent for. A crash in native code ends by others.
    const FROM_OUTSIDE: [i32; 11] = [1, 2, 3, 9, 10, 12, 15, 19, 20, 24, 25];

    /// Whether the program has no part in it: a signal from outside, or a host that was lost.
    pub fn is_from_outside(&self) -> bool {
        self.is_signal_from_outside() || matches!(self, Cause::HostLost { .. })
    }

    /// Whether a signal ended the rank that somebody else sent: a person, a scheduler or another program.
    pub fn is_signal_from_outside(&self) -> bool {
        matches!(self, Cause::Signal { signal } if Cause::FROM_OUTSIDE.contains(signal))
    }
}

/// A judgement with its evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Which failure.
    pub incident: Incident,
    /// The attempt that failed.
    pub attempt: Attempt,
    /// One line for the person on call.
    pub headline: String,
    /// What kind of end it was.
    pub cause: Cause,
    /// Whose fault it was.
    pub domain: FaultDomain,
    /// What went wrong, as `docs/reference/attribution.md` names it (`user_code`, `fabric`, …); none if it cannot
    /// be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Whether the same would come again in the same place.
    #[serde(default)]
    pub deterministic: bool,
    /// What speaks against it.
    #[serde(flatten)]
    pub doubts: Doubts,
    /// How sure, from 0 to 1: of the domain, or where that is unknown of the culprit.
    pub confidence: f64,
    /// How sure, from 0 to 1, that it began with the culprit; none where no rank is named and in journals of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub culprit_confidence: Option<f64>,
    /// Where it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub culprit: Option<Rank>,
    /// Ranks that ended because of the culprit, not on their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<Rank>,
    /// The step at which the culprit stood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Where in its data the culprit read, if it told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<u64>,
    /// Whether the culprit sent heartbeats: only then does no step mean that it completed none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub heartbeats: bool,
    /// Whether the program cannot run at all: all ranks ended by themselves before a first step, of its text, its arguments, or
    /// of a file or module that is missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cannot_run: bool,
    /// When the fault happened or was first to be seen: the kernel's time of death or the note's time.
    pub fault_at: Mono,
    /// When the launcher knew.
    pub detected_at: Mono,
    /// What it rests on, one sentence each, lines of logs quoted.
    pub evidence: Vec<String>,
}

/// What a judgement has against it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubts {
    /// What speaks for something else, one sentence each, lines of logs quoted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub against: Vec<String>,
    /// What would change the judgement, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub would_change: Vec<String>,
}

/// What is to be done: a rung of the ladder, or waiting before one is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Action {
    /// Begin again in the same processes.
    RestartInProcess {
        /// The attempt that begins.
        attempt: Attempt,
    },
    /// Start the ranks anew that are gone or excluded; the others wait for them in their processes.
    RespawnRanks {
        /// The attempt that begins.
        attempt: Attempt,
    },
    /// Start this host's ranks anew; those of other hosts wait in their processes.
    RespawnHost {
        /// The attempt that begins.
        attempt: Attempt,
    },
    /// Start all ranks again.
    RestartInJob {
        /// The attempt that begins.
        attempt: Attempt,
    },
    /// Have a spare host take this one's place.
    ReplaceHost {
        /// The attempt that begins.
        attempt: Attempt,
    },
    /// Go on with fewer ranks.
    Shrink {
        /// The attempt that begins.
        attempt: Attempt,
    },
    /// End the job so that the scheduler starts it again elsewhere.
    HandBack {
        /// The status with which the launcher exits.
        exit: i32,
    },
    /// End the job: a restart cannot help or is not allowed.
    Stop {
        /// The status with which the launcher exits.
        exit: i32,
    },
    /// Wait, because the host is not ready for a restart; another decision follows.
    Wait,
}

impl Action {
    /// What takes this rung: `attempt` begins by it, or `exit` is the status with which the launcher ends.
    pub fn of(rung: Rung, attempt: Attempt, exit: i32) -> Action {
        match rung {
            Rung::InProcess => Action::RestartInProcess { attempt },
            Rung::Ranks => Action::RespawnRanks { attempt },
            Rung::Host => Action::RespawnHost { attempt },
            Rung::All => Action::RestartInJob { attempt },
            Rung::Replace => Action::ReplaceHost { attempt },
            Rung::Shrink => Action::Shrink { attempt },
            Rung::HandBack => Action::HandBack { exit },
            Rung::Stop => Action::Stop { exit },
        }
    }

    /// The rung that it takes; none while it is waited.
    pub fn rung(self) -> Option<Rung> {
        Some(match self {
            Action::RestartInProcess { .. } => Rung::InProcess,
            Action::RespawnRanks { .. } => Rung::Ranks,
            Action::RespawnHost { .. } => Rung::Host,
            Action::RestartInJob { .. } => Rung::All,
            Action::ReplaceHost { .. } => Rung::Replace,
            Action::Shrink { .. } => Rung::Shrink,
            Action::HandBack { .. } => Rung::HandBack,
            Action::Stop { .. } => Rung::Stop,
            Action::Wait => return None,
        })
    }

    /// The attempt that begins by it.
    pub fn attempt(self) -> Option<Attempt> {
        match self {
            Action::RestartInProcess { attempt }
            | Action::RespawnRanks { attempt }
            | Action::RespawnHost { attempt }
            | Action::RestartInJob { attempt }
            | Action::ReplaceHost { attempt }
            | Action::Shrink { attempt } => Some(attempt),
            Action::HandBack { .. } | Action::Stop { .. } | Action::Wait => None,
        }
    }

    /// The status with which the launcher exits by it.
    pub fn exit(self) -> Option<i32> {
        match self {
            Action::HandBack { exit } | Action::Stop { exit } => Some(exit),
            _ => None,
        }
    }

    /// Its word in the journal and the API.
    pub fn word(self) -> &'static str {
        match self {
            Action::RestartInProcess { .. } => "restart_in_process",
            Action::RespawnRanks { .. } => "respawn_ranks",
            Action::RespawnHost { .. } => "respawn_host",
            Action::RestartInJob { .. } => "restart_in_job",
            Action::ReplaceHost { .. } => "replace_host",
            Action::Shrink { .. } => "shrink",
            Action::HandBack { .. } => "hand_back",
            Action::Stop { .. } => "stop",
            Action::Wait => "wait",
        }
    }
}

/// Who decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidedBy {
    /// The launcher alone: there is no agent, or it did not answer in time.
    Launcher,
    /// The launcher with its agent's consent or at its ruling.
    Agent,
}

/// What the policy makes of a verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Which failure.
    pub incident: Incident,
    /// What is to be done.
    pub action: Action,
    /// How long it is held back: the next of several restarts without progress comes later than the one before.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub after: Span,
    /// Why, in plain words.
    pub why: String,
    /// Who decided.
    pub by: DecidedBy,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
fn is_nothing(span: &Span) -> bool {
    span.0 == 0
}

/// What came of a decision to restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Which failure.
    pub incident: Incident,
    /// The attempt that began.
    pub attempt: Attempt,
    /// The first step that all ranks completed again.
    pub step: u64,
    /// The newest step that had been reached before the failure.
    pub reached_before: u64,
    /// Steps done again.
    pub steps_lost: u64,
    /// Steps are counted anew in each process: how many were done again is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub counted: bool,
    /// From the fault to the last of the new processes being started.
    pub to_ranks_started: Span,
    /// From the fault to the first heartbeat client that connected, on every rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_ranks_connected: Option<Span>,
    /// From the fault to the first step that all ranks completed.
    pub to_first_step: Span,
}

impl Outcome {
    /// In one line, for people.
    pub fn reported(&self) -> String {
        let Outcome { step, to_first_step, steps_lost, .. } = self;
        let again = match (steps_lost, self.counted) {
            (0, false) => "no step is done again".to_owned(),
            (0, true) => "the number of repeated steps is unknown".to_owned(),
            (1, _) => "1 step is done again".to_owned(),
            (steps, false) => format!("{steps} steps are done again"),
            (steps, true) => {
                format!("{steps} steps are done again unless the program resumed from a checkpoint")
            }
        };
        format!("training again at step {step}, {to_first_step} after the failure; {again}")
    }
}
