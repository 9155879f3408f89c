//! The diagnosis of a failure, the decision and the outcome.

use serde::{Deserialize, Serialize};

use crate::hang::HangKind;
use crate::id::{Attempt, Incident, Rank};
use crate::rung::Rung;
use crate::time::{Mono, Span};

/// The party that has to act on a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultDomain {
    /// The training program, its configuration or its data.
    User,
    /// A device or the host.
    Hardware,
    /// Network, storage, scheduling.
    Infrastructure,
    /// The software below the training program.
    Platform,
    /// Unknown from what was seen.
    Unknown,
}

impl FaultDomain {
    /// All domains.
    pub const ALL: [FaultDomain; 5] = [
        FaultDomain::User,
        FaultDomain::Hardware,
        FaultDomain::Infrastructure,
        FaultDomain::Platform,
        FaultDomain::Unknown,
    ];

    /// The domain with that name.
    pub fn named(name: &str) -> Option<FaultDomain> {
        FaultDomain::ALL.into_iter().find(|domain| domain.name() == name)
    }

    /// Its name in files and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FaultDomain::User => "user",
            FaultDomain::Hardware => "hardware",
            FaultDomain::Infrastructure => "infrastructure",
            FaultDomain::Platform => "platform",
            FaultDomain::Unknown => "unknown",
        }
    }
}

impl std::fmt::Display for FaultDomain {
    /// In words: "the training program's fault".
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

/// How a failure ended the ranks, as far as one host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Cause {
    /// The rank raised an exception and left a note.
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
    /// The OOM killer was active when the rank was killed.
    OutOfMemory,
    /// The rank's host was lost with the rank. In a verdict without a rank: no host took its place in time.
    HostLost {
        /// The host's name.
        host: String,
    },
    /// The ranks could not be started.
    StartFailed,
    /// Ranks were alive and made no progress.
    Hang {
        /// The kind of hang.
        hang: HangKind,
        /// The place: rank and section. Equal for the same hang.
        place: String,
    },
}

impl Cause {
    /// Signals that programs rarely send to themselves: HUP, INT, QUIT, KILL, USR1, USR2, TERM, and those like XCPU and
    /// STOP. A crash in native code raises other signals.
    const FROM_OUTSIDE: [i32; 11] = [1, 2, 3, 9, 10, 12, 15, 19, 20, 24, 25];

    /// Whether the program has no part in it: a signal from outside, or a lost host.
    pub fn is_from_outside(&self) -> bool {
        self.is_signal_from_outside() || matches!(self, Cause::HostLost { .. })
    }

    /// Whether the rank was ended by a signal from outside: from a person, a scheduler or another program.
    pub fn is_signal_from_outside(&self) -> bool {
        matches!(self, Cause::Signal { signal } if Cause::FROM_OUTSIDE.contains(signal))
    }
}

/// A diagnosis with its evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The failure.
    pub incident: Incident,
    /// The attempt that failed.
    pub attempt: Attempt,
    /// One line for the person on call.
    pub headline: String,
    /// How it ended.
    pub cause: Cause,
    /// The fault domain.
    pub domain: FaultDomain,
    /// The failure class of `docs/reference/attribution.md` (`user_code`, `fabric`, …); `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Whether the failure would recur at the same place.
    #[serde(default)]
    pub deterministic: bool,
    /// The counter-evidence.
    #[serde(flatten)]
    pub doubts: Doubts,
    /// Confidence from 0 to 1: in the domain, or in the culprit if the domain is unknown.
    pub confidence: f64,
    /// Confidence, from 0 to 1, that the failure started with the culprit; `None` without a culprit and in journals of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub culprit_confidence: Option<f64>,
    /// The rank where it started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub culprit: Option<Rank>,
    /// The host on which the culprit ran, in a job of several hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Ranks that failed as a consequence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<Rank>,
    /// The culprit's step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The culprit's position in its data, if reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<u64>,
    /// Whether the culprit sent heartbeats: only then does a missing step mean that it completed none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub heartbeats: bool,
    /// Whether the program cannot run at all: all ranks ended by themselves before a first step, because of a syntax
    /// error, their arguments, or a missing file or module.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cannot_run: bool,
    /// When the fault happened or first became visible: the kernel's time of the exit, or the note's time.
    pub fault_at: Mono,
    /// When the launcher detected it.
    pub detected_at: Mono,
    /// The evidence, one sentence each, with quoted log lines.
    pub evidence: Vec<String>,
}

impl Verdict {
    /// A verdict that names no culprit, domain or evidence, on a failure that happened and was
    /// detected at `at`.
    pub fn new(
        incident: Incident,
        attempt: Attempt,
        cause: Cause,
        headline: impl Into<String>,
        at: Mono,
    ) -> Verdict {
        Verdict {
            incident,
            attempt,
            headline: headline.into(),
            cause,
            domain: FaultDomain::Unknown,
            class: None,
            deterministic: false,
            doubts: Doubts::default(),
            confidence: 0.0,
            culprit_confidence: None,
            culprit: None,
            host: None,
            victims: Vec::new(),
            step: None,
            data: None,
            heartbeats: false,
            cannot_run: false,
            fault_at: at,
            detected_at: at,
            evidence: Vec::new(),
        }
    }

    /// Whether the job failed because a disk, a quota or another resource was used up. The user has to act (the domain), but the program
    /// has no error.
    pub fn resource_ran_out(&self) -> bool {
        self.domain == FaultDomain::User && matches!(self.class.as_deref(), Some("storage" | "host_resource"))
    }

    /// The host on which the failure started, in a job of several hosts: that of the culprit, or a lost one.
    pub fn host_at_fault(&self) -> Option<&String> {
        self.host.as_ref().or(match &self.cause {
            Cause::HostLost { host } => Some(host),
            _ => None,
        })
    }

    /// Whether the failure implicates the host of its culprit: a fault of the hardware or of the software below the
    /// program. A hang alone shows no fault of a host, and neither does what would recur on any host.
    pub fn implicates_host(&self) -> bool {
        let of_the_host = matches!(self.domain, FaultDomain::Hardware | FaultDomain::Platform);
        let recurs_anywhere = self.deterministic || self.cannot_run;
        let is_hang = matches!(self.cause, Cause::Hang { .. });
        of_the_host && self.culprit.is_some() && !recurs_anywhere && !is_hang
    }

    /// The host that another try of the job should leave out, after a decision by this rule. `here` is the host that
    /// decided, if its name is known.
    pub fn host_to_exclude(&self, rule: Rule, here: Option<&str>) -> Option<String> {
        let host = match rule {
            Rule::HostUnfit | Rule::AnotherHost => here,
            _ if self.implicates_host() => self.host.as_deref().or(here),
            _ => self.missing_host(),
        };
        host.map(str::to_owned)
    }

    /// The lost host whose place no host took in time, if that is the failure.
    pub fn missing_host(&self) -> Option<&str> {
        match &self.cause {
            Cause::HostLost { host } if self.culprit.is_none() => Some(host),
            _ => None,
        }
    }
}

/// Doubts about a verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubts {
    /// Evidence for other causes, one sentence each, with quoted log lines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub against: Vec<String>,
    /// What would change the verdict, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub would_change: Vec<String>,
}

/// The action: a rung of the ladder, or waiting before one is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Action {
    /// Start again in the same processes.
    RestartInProcess {
        /// The new attempt.
        attempt: Attempt,
    },
    /// Restart the ranks that are gone or excluded; the others wait for them in their processes.
    RespawnRanks {
        /// The new attempt.
        attempt: Attempt,
    },
    /// Restart this host's ranks; those of other hosts wait in their processes.
    RespawnHost {
        /// The new attempt.
        attempt: Attempt,
    },
    /// Restart all ranks.
    RestartInJob {
        /// The new attempt.
        attempt: Attempt,
    },
    /// Replace this host by a spare host.
    ReplaceHost {
        /// The new attempt.
        attempt: Attempt,
    },
    /// Continue with fewer ranks.
    Shrink {
        /// The new attempt.
        attempt: Attempt,
    },
    /// Exit so that the scheduler starts the job on another host.
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
    /// The action for a rung: `attempt` is the attempt it starts, `exit` the status with which the launcher exits.
    pub fn from_rung(rung: Rung, attempt: Attempt, exit: i32) -> Action {
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

    /// The rung of the action; `None` for waiting.
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

    /// The attempt that it starts.
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

    /// The status with which the launcher exits.
    pub fn exit(self) -> Option<i32> {
        match self {
            Action::HandBack { exit } | Action::Stop { exit } => Some(exit),
            _ => None,
        }
    }

    /// Its name in the journal and the API.
    pub fn as_str(self) -> &'static str {
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

/// The rule of the policy that led to a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Another start would fail in the same way.
    CannotStart,
    /// No host took the place of a lost one.
    HostMissing,
    /// The program cannot run.
    CannotRun,
    /// The program fails by itself before its first step.
    FailsByItself,
    /// The same failure occurred at the same place on another host.
    FailedElsewhere,
    /// The same failure recurred at the same place: another host shows whether this host is at fault.
    AnotherHost,
    /// The same failure recurred at the same place.
    Recurred,
    /// Restarts brought no progress.
    NoProgress,
    /// A budget of restarts is used up.
    Budget,
    /// The host is not fit for a restart, or was not ready in time.
    HostUnfit,
    /// The host is not ready for a restart yet.
    HostNotReady,
    /// Nothing can be restarted on this host.
    NothingToRestart,
    /// The rung that is expected to restore the job soonest.
    Restart,
    /// The user's own policy.
    UserPolicy,
    /// The leader is lost, and no other host can lead the job.
    LeaderLost,
    /// Unknown: the entry is of another version.
    #[default]
    #[serde(other)]
    Unknown,
}

impl Rule {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
    fn is_unknown(&self) -> bool {
        *self == Rule::Unknown
    }
}

/// Who decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidedBy {
    /// The launcher.
    Launcher,
    /// In journals up to 0.1.0: the launcher, with evidence from the agent.
    Agent,
}

/// The policy's decision on a verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// The failure.
    pub incident: Incident,
    /// The action.
    pub action: Action,
    /// The delay: each of several restarts without progress waits longer than the one before.
    #[serde(default, skip_serializing_if = "Span::is_zero")]
    pub after: Span,
    /// The rule that applied.
    #[serde(default, skip_serializing_if = "Rule::is_unknown")]
    pub rule: Rule,
    /// The reason.
    pub why: String,
    /// Who decided.
    pub by: DecidedBy,
    /// Whether the agent's evidence about the host was used.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub agent_evidence: bool,
}

impl Decision {
    /// Whether the agent's evidence about the host was used, also in journals of older versions.
    pub fn used_agent_evidence(&self) -> bool {
        self.agent_evidence || self.by == DecidedBy::Agent
    }
}

/// The result of a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The failure.
    pub incident: Incident,
    /// The new attempt.
    pub attempt: Attempt,
    /// The first step that all ranks completed again.
    pub step: u64,
    /// The newest step reached before the failure.
    pub reached_before: u64,
    /// Steps that were computed again.
    pub steps_lost: u64,
    /// Steps are counted from 0 in each process, so the number of repeated steps is unknown.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub counted: bool,
    /// From the fault until the last new process was started.
    pub to_ranks_started: Span,
    /// From the fault until a heartbeat client was connected on every rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_ranks_connected: Option<Span>,
    /// From the fault until all ranks completed the first step.
    pub to_first_step: Span,
}

impl Outcome {
    /// The outcome in one line.
    pub fn describe(&self) -> String {
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
