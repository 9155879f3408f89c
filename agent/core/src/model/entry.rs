//! What the journal holds: facts, health changes, verdicts, decisions and outcomes, each with a place, a time
//! and a boot id. Entries are never changed. Everything shown of a job or a host is computed from them.
//!
//! The JSON form of these types is the journal's file format (`docs/reference/journal.md`): fields and variants
//! are added, never renamed or removed.

mod bits;
mod exit_status;

use serde::{Deserialize, Serialize};

pub use exit_status::{ExitStatus, signal_name};

use crate::base::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use crate::base::time::{Mono, Span, Stamp};
use crate::model::finding::Finding;
use crate::model::hang::{Hang, PlaceGroup, Waits};
use crate::model::health::HealthChange;
use crate::model::host_context::HostEvidence;
use crate::model::kernel::{KernelReport, Sxid, Xid};
use crate::model::observation::Observation;
use crate::model::policy::{Experience, Settings};
use crate::model::verdict::{Decision, Outcome, Verdict};

/// One line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Position in the journal that holds it, from 1, without gaps; the cursor of readers.
    pub seq: u64,
    /// When it happened.
    pub at: Stamp,
    /// The boot in which `at.mono` counts.
    pub boot: BootId,
    /// The job it belongs to; none for the host's own entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobId>,
    /// The position in the launcher's own journal, where the agent took the entry over from a launcher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_seq: Option<u64>,
    /// What happened.
    pub body: Body,
}

/// The kinds of entries, in the order in which data flows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Body {
    /// Something that was observed.
    Fact(Fact),
    /// A component of the host changed its state.
    Health(HealthChange),
    /// What a failure means.
    Verdict(Verdict),
    /// What is done about it.
    Decision(Decision),
    /// What came of it.
    Outcome(Outcome),
    /// Something is wrong with a job although none of its ranks has failed.
    Finding(Finding),
}

/// Something that was observed. A closed list: a new fact must be thought about wherever facts are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Fact {
    /// The agent began to watch this host.
    AgentStarted {
        /// Version of the agent.
        version: String,
        /// Its process.
        pid: Pid,
    },
    /// The agent was asked to stop and did so in order.
    AgentStopped,
    /// The kernel killed processes for lack of memory since the last sample.
    OutOfMemoryKills {
        /// How many.
        count: u64,
    },
    /// The driver reported an error of a GPU.
    Xid(Xid),
    /// The driver reported an error of an NVSwitch.
    Sxid(Sxid),
    /// The kernel reported something of the host.
    KernelReport(KernelReport),
    /// Lines of a storm in the kernel log that were counted and not looked at one by one.
    KernelLinesLeftOut {
        /// Which kind of lines.
        of: String,
        /// How many.
        count: u64,
    },
    /// The kernel overwrote records of its log before they were read.
    KernelLogGap {
        /// How many; none if the kernel only says that there were some.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        records: Option<u64>,
    },
    /// A room that watches a component saw something happen to it.
    Observed(Observation),
    /// The host said what it knows of a failure of the job.
    #[serde(rename = "host_testified")]
    HostEvidenceReported {
        /// Which failure.
        incident: Incident,
        /// What it knows.
        #[serde(rename = "testimony")]
        host_evidence: HostEvidence,
    },
    /// A call into the GPUs' driver has not returned in time.
    GpuDriverSilent {
        /// When it began.
        since: Mono,
    },
    /// The GPUs' driver answers again.
    GpuDriverAnswered {
        /// How long it was silent.
        after: Span,
    },
    /// A launcher began a job.
    JobStarted(JobSpec),
    /// All ranks of an attempt were started.
    AttemptStarted {
        /// Which attempt.
        attempt: Attempt,
        /// `MASTER_PORT` of this attempt: each attempt has its own store.
        master_port: u16,
        /// The processes, by rank.
        ranks: Vec<StartedRank>,
    },
    /// Ranks could not be started at all.
    StartFailed {
        /// Which attempt.
        attempt: Attempt,
        /// The operation, the object and the error.
        error: String,
    },
    /// A rank's heartbeat client connected to its page.
    RankConnected {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Name and version of the client.
        client: String,
    },
    /// A rank's heartbeat client refused its page; the rank trains on without heartbeats.
    RankRefused {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Why, and what to do.
        reason: String,
    },
    /// Heartbeat pages could not be made; the job runs without heartbeats.
    PagesUnavailable {
        /// Path and error.
        reason: String,
    },
    /// Every rank that sends heartbeats has completed a step in this attempt.
    RanksStepping {
        /// Which attempt.
        attempt: Attempt,
        /// The first step that all completed.
        step: u64,
    },
    /// How far the job is; recorded from time to time, not for each step.
    Progress {
        /// Which attempt.
        attempt: Attempt,
        /// The newest step that all ranks completed.
        step: u64,
        /// Loss of that step on the lowest rank that gives one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loss: Option<f64>,
    },
    /// A rank left an exit note that says it raised; its process may still be on its way out.
    RankRaised {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Its process.
        pid: Pid,
        /// What it wrote.
        note: Note,
        /// Where in its data it read, if it told.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<u64>,
    },
    /// A rank failed and its process is ending: it runs nothing any more, but the kernel still takes its memory and devices
    /// apart. Seen by the lifeline of its heartbeat page, before its exit.
    RankEnding {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Its process.
        pid: Pid,
        /// How it will have ended.
        status: ExitStatus,
    },
    /// A rank's process ended.
    RankExited {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Its process.
        pid: Pid,
        /// How it ended.
        status: ExitStatus,
        /// The last step it completed in this attempt, if it sent heartbeats.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step: Option<u64>,
        /// Where in its data it read, if it told.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<u64>,
        /// Whether we had told it to stop before.
        after_stop: bool,
        /// Last lines of its standard error, for the judges and for people.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stderr_tail: Vec<String>,
        /// Last lines of its standard output: NCCL writes its warnings there, and many programs their log.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stdout_tail: Vec<String>,
        /// When each line of `stderr_tail` was written; empty where that is not known.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stderr_times: Vec<LineTime>,
        /// The same of `stdout_tail`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stdout_times: Vec<LineTime>,
    },
    /// A host of the job was lost, and its ranks with it: each has a `RankExited` after this.
    HostLost {
        /// In which attempt; there may be none of its ranks.
        attempt: Attempt,
        /// Its name.
        host: String,
        /// Its node rank.
        node_rank: u32,
        /// Its ranks that ran.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ranks: Vec<Rank>,
        /// For people: "host b (node rank 1, ranks 2 to 3)".
        named: String,
        /// How that was seen.
        how: String,
    },
    /// The job goes on with another number of ranks: a lost host was not waited for any longer, or hosts joined.
    WorldChanged {
        /// From which attempt on.
        attempt: Attempt,
        /// Ranks until then.
        before: u32,
        /// Ranks from then on.
        now: u32,
        /// The hosts in the order of their ranks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        hosts: Vec<String>,
        /// Why, for people.
        why: String,
    },
    /// Ranks live and do not move.
    RanksHung {
        /// Which attempt.
        attempt: Attempt,
        /// What was found.
        hang: Box<Hang>,
        /// Whether the ranks are stopped for it; without it is only told.
        acts: bool,
    },
    /// Ranks that were taken to hang moved again before anything was done.
    HangPassed {
        /// Which attempt.
        attempt: Attempt,
        /// How long after it was confirmed.
        after: Span,
    },
    /// What the ranks were at was written down before they were stopped.
    EvidenceTaken {
        /// Which attempt.
        attempt: Attempt,
        /// The file that holds it, if it could be written.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file: Option<String>,
        /// The ranks by where they stand, the fewest first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        groups: Vec<PlaceGroup>,
        /// Whom the ranks wait for by counters that were asked for then.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        waits: Vec<Waits>,
        /// Other findings, one sentence each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        summary: Vec<String>,
        /// How long it took.
        took: Span,
    },
    /// No process of the attempt is left, children and orphans included, but those of ranks that wait to go on in them.
    AttemptEnded {
        /// Which attempt.
        attempt: Attempt,
        /// Processes beyond the ranks that had to be killed (DataLoader workers and other orphans).
        orphans_killed: u32,
        /// Ranks that have left the attempt and wait in their processes for the next.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        waiting: Vec<Rank>,
    },
    /// The launcher was asked to stop.
    StopRequested {
        /// By which signal (`SIGTERM`), or by whom.
        by: String,
        /// The status with which the launcher will exit.
        exit: i32,
    },
    /// The launcher of a job vanished without ending it; its ranks were taken along.
    LauncherLost {
        /// Its process.
        pid: Pid,
    },
    /// The launcher found the host's agent and reports to it from here on.
    AgentFound {
        /// Version of the agent.
        version: String,
    },
    /// The launcher lost its agent and decides alone until the agent is back.
    AgentLost {
        /// What was seen.
        reason: String,
    },
    /// The job is over.
    JobEnded {
        /// The status with which the launcher exits.
        exit: i32,
        /// Why, in plain words.
        reason: String,
    },
}

/// What a launcher was asked to run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The command of each rank.
    pub command: Vec<String>,
    /// Ranks in all.
    pub world_size: u32,
    /// Ranks on this host.
    pub local_world_size: u32,
    /// The first rank of this host.
    pub first_rank: Rank,
    /// Restarts allowed per window.
    pub max_restarts: u32,
    /// The launcher's process.
    pub launcher: Pid,
    /// The user the job runs as.
    pub uid: u32,
    /// Where logs and the launcher's journal are.
    pub run_dir: String,
    /// The directory in which the launcher was started; empty in journals of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub started_in: String,
    /// The run that its checkpoints belong to, `NAME~ID`; empty in journals of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
    /// Where the ranks keep their checkpoints.
    pub checkpoint_dir: String,
    /// Where the heartbeat pages are, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_dir: Option<String>,
    /// What the job runs, as one number: its command and the files of its program. None if they cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// What the policy may do; a journal without it is of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Settings>,
    /// What earlier runs of the job learned of rungs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Experience>,
}

/// A rank's process at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartedRank {
    /// Which rank.
    pub rank: Rank,
    /// Its place on this host (`LOCAL_RANK`).
    pub local_rank: u32,
    /// Its process, which leads its own process group.
    pub pid: Pid,
    /// Its heartbeat page, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
}

/// When a line of a rank's output was written, and how far the job went after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineTime {
    /// When the launcher first saw the line in the file. It was written then or before.
    pub at: Mono,
    /// Steps of this attempt that began after `at` and were completed; none where no progress is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps_after: Option<u64>,
}

impl LineTime {
    /// How long before a failure the line was there, and how many steps were done in between: "1.50 s and 2 steps before the
    /// failure".
    pub fn before_failure(self, failed_at: Mono) -> String {
        let span = failed_at.since(self.at);
        match self.steps_after {
            // The launcher looks at files a few times a second: it may see a line after the failure.
            None | Some(0) if span == Span::default() => "at the failure".to_owned(),
            None | Some(0) => format!("{span} before the failure"),
            Some(1) => format!("{span} and 1 step before the failure"),
            Some(steps) => format!("{span} and {steps} steps before the failure"),
        }
    }
}

/// What a rank says of its own end (the page's exit note).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Note {
    /// Type of the exception with its module: `builtins.ValueError`.
    pub exception: String,
    /// Its message.
    pub message: String,
    /// Its traceback, innermost frames last; may lack its beginning.
    pub traceback: String,
    /// The last step that the rank completed, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// When the rank wrote it, on the host's monotonic clock.
    pub at: Mono,
    /// The error file that it was made of, where the rank wrote no note on its page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// A step that a rank completed, from its page's ring. An input of the judges and the ledger, not of the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepDone {
    /// The step's number as the trainer counts.
    pub step: u64,
    /// When it began: the end of the step before, or the first contact.
    pub start: Mono,
    /// When it was complete.
    pub end: Mono,
    /// Whether it is the first of its process, and so began with imports and setup.
    pub first: bool,
    /// Whether its number was counted from 0 in this process, and so says nothing of how far the job is.
    pub counted: bool,
    /// Nanoseconds of it that went into sections named `checkpoint`.
    pub checkpoint_ns: u64,
    /// Where its time went.
    pub spent: Spent,
    /// Its loss, where given.
    #[serde(default, with = "bits", skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Its gradient norm, where given.
    #[serde(default, with = "bits", skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// The digest of the parameters after it, where given.
    pub digest: Option<u64>,
}

/// Where the time of a step went, by what the names of its sections say (`docs/reference/stragglers.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Nanoseconds of waiting for other ranks.
    pub wait_ns: u64,
    /// Nanoseconds of what is not part of every step: checkpoints, evaluation.
    pub pause_ns: u64,
    /// Nanoseconds in which nothing is exchanged with other ranks: the forward pass, fetching data.
    pub alone_ns: u64,
}

/// The incident an entry belongs to, for the bodies that have one.
impl Body {
    /// The failure that this entry is about.
    pub fn incident(&self) -> Option<Incident> {
        match self {
            Body::Verdict(verdict) => Some(verdict.incident),
            Body::Decision(decision) => Some(decision.incident),
            Body::Outcome(outcome) => Some(outcome.incident),
            Body::Fact(_) | Body::Health(_) | Body::Finding(_) => None,
        }
    }
}
