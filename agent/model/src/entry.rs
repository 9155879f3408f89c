//! The entries of the journal: facts, health changes, verdicts, decisions and outcomes, each with a place, a time and a
//! boot id. Entries never change. Everything shown about a job or a host is computed from them.
//!
//! The JSON form of these types is the journal's file format (`docs/reference/journal.md`): fields and variants are
//! added, never renamed or removed.

mod bits;
mod exit_status;
mod host_loss;
mod host_of_ranks;

use serde::{Deserialize, Serialize};

pub use exit_status::{ExitStatus, signal_name};
pub use host_loss::HostLoss;
pub use host_of_ranks::HostOfRanks;

use crate::finding::Finding;
use crate::hang::{Hang, PlaceGroup, Waits};
use crate::health::HealthChange;
use crate::host_context::HostEvidence;
use crate::id::{Attempt, BootId, Incident, JobId, Pid, Rank};
use crate::kernel::{KernelReport, Sxid, Xid};
use crate::observation::Observation;
use crate::policy::{Experience, Settings};
use crate::time::{Mono, Span, Stamp};
use crate::verdict::{Decision, Outcome, Verdict};

/// One line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Position in this journal, from 1, without gaps. Readers use it as a cursor.
    pub seq: u64,
    /// When it happened.
    pub at: Stamp,
    /// The boot whose monotonic clock `at.mono` uses.
    pub boot: BootId,
    /// The job it belongs to; `None` for the host's own entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobId>,
    /// The position in the launcher's own journal, if the agent copied the entry from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_seq: Option<u64>,
    /// What happened.
    pub body: Body,
}

/// The kinds of entries, in the order of the data flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Body {
    /// An observation.
    Fact(Fact),
    /// A component of the host changed its state.
    Health(HealthChange),
    /// What a failure means.
    Verdict(Verdict),
    /// The action for the failure.
    Decision(Decision),
    /// The result of the decision.
    Outcome(Outcome),
    /// A problem of a job in which no rank has failed.
    Finding(Finding),
}

/// An observation. The list is closed, so that a new fact must be handled wherever facts are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Fact {
    /// The agent started on this host.
    AgentStarted {
        /// Version of the agent.
        version: String,
        /// Its PID.
        pid: Pid,
    },
    /// The agent was asked to stop and stopped cleanly.
    AgentStopped,
    /// The kernel killed processes because of low memory since the last sample.
    OutOfMemoryKills {
        /// How many.
        count: u64,
    },
    /// The driver reported a GPU error.
    Xid(Xid),
    /// The driver reported an NVSwitch error.
    Sxid(Sxid),
    /// The kernel reported an event on the host.
    KernelReport(KernelReport),
    /// Lines of a storm in the kernel log that were counted and not parsed one by one.
    KernelLinesLeftOut {
        /// The kind of lines.
        of: String,
        /// How many.
        count: u64,
    },
    /// The kernel overwrote records of its log before they were read.
    KernelLogGap {
        /// How many; `None` if the kernel does not report the number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        records: Option<u64>,
    },
    /// A sensor observed an event on a component.
    Observed(Observation),
    /// The host reported evidence about a failure of the job.
    #[serde(rename = "host_testified")]
    HostEvidenceReported {
        /// The failure.
        incident: Incident,
        /// The evidence.
        #[serde(rename = "testimony")]
        host_evidence: HostEvidence,
    },
    /// A call into the GPU driver did not return in time.
    GpuDriverSilent {
        /// When the call started.
        since: Mono,
    },
    /// The GPU driver answers again.
    GpuDriverAnswered {
        /// How long it did not answer.
        after: Span,
    },
    /// A launcher started a job.
    JobStarted(JobSpec),
    /// All ranks of an attempt were started.
    AttemptStarted {
        /// Which attempt.
        attempt: Attempt,
        /// `MASTER_PORT` of this attempt: each attempt has its own store.
        master_port: u16,
        /// The processes, by rank.
        ranks: Vec<StartedRank>,
        /// The hosts of the ranks, in the order of their node ranks; empty in a job of one host.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        hosts: Vec<HostOfRanks>,
    },
    /// Ranks could not be started.
    StartFailed {
        /// Which attempt.
        attempt: Attempt,
        /// The operation, the object and the error.
        error: String,
        /// Lost hosts whose place no host took in time, if that is the reason.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        missing: Vec<String>,
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
    /// Heartbeat pages could not be created; the job runs without heartbeats.
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
        /// Whether steps are counted from 0 in each process.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        counted: bool,
        /// The time in sections named `restore` before the first step, on the rank whose steps count.
        #[serde(default, skip_serializing_if = "Span::is_zero")]
        restoring: Span,
    },
    /// The job's progress; recorded from time to time, not for each step.
    Progress {
        /// Which attempt.
        attempt: Attempt,
        /// The newest step that all ranks completed.
        step: u64,
        /// The loss of that step on the lowest rank that reports one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loss: Option<f64>,
        /// The time in sections named `checkpoint` since the last entry of this kind, on the rank whose steps count.
        #[serde(default, skip_serializing_if = "Span::is_zero")]
        saving: Span,
        /// The number of steps that include this time.
        #[serde(default, skip_serializing_if = "is_zero")]
        saves: u64,
    },
    /// A rank left an exit note about an exception; its process may still be exiting.
    RankRaised {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Its PID.
        pid: Pid,
        /// The note.
        note: Note,
        /// Its position in its data, if reported.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<u64>,
    },
    /// A rank failed and its process is exiting: it no longer runs code, but the kernel has not released its memory and
    /// devices yet. Detected by the lifeline of its heartbeat page, before the exit.
    RankEnding {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Its PID.
        pid: Pid,
        /// The expected exit status.
        status: ExitStatus,
    },
    /// A rank's process ended.
    RankExited {
        /// Which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Its PID.
        pid: Pid,
        /// The exit status.
        status: ExitStatus,
        /// The last step it completed in this attempt, if it sent heartbeats.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step: Option<u64>,
        /// Its position in its data, if reported.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<u64>,
        /// Whether the launcher had stopped it.
        after_stop: bool,
        /// Last lines of its standard error, for attribution and for people.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stderr_tail: Vec<String>,
        /// Last lines of its standard output: NCCL writes its warnings there, and many programs their log.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stdout_tail: Vec<String>,
        /// When each line of `stderr_tail` was written; empty if unknown.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stderr_times: Vec<LineTime>,
        /// When each line of `stdout_tail` was written; empty if unknown.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        stdout_times: Vec<LineTime>,
    },
    /// A host of the job was lost with its ranks: each of them has a `RankExited` after this.
    HostLost {
        /// The attempt; the host may have no rank in it.
        attempt: Attempt,
        /// Its name.
        host: String,
        /// Its node rank.
        node_rank: u32,
        /// Its running ranks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ranks: Vec<Rank>,
        /// A description: "host b (node rank 1, ranks 2 to 3)".
        named: String,
        /// The kind of loss.
        #[serde(default, skip_serializing_if = "HostLoss::is_unknown")]
        loss: HostLoss,
        /// How the loss was detected.
        how: String,
    },
    /// The job continues with another number of ranks: a lost host did not return in time, or hosts joined.
    WorldChanged {
        /// The first attempt with the new number.
        attempt: Attempt,
        /// The number of ranks before.
        before: u32,
        /// The number of ranks from then on.
        now: u32,
        /// The hosts in the order of their ranks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        hosts: Vec<String>,
        /// The reason.
        why: String,
    },
    /// Ranks are alive and make no progress.
    RanksHung {
        /// Which attempt.
        attempt: Attempt,
        /// The hang.
        hang: Box<Hang>,
        /// Whether the ranks are stopped because of it. If not, it is only reported.
        acts: bool,
    },
    /// Hung ranks made progress again before any action.
    HangPassed {
        /// Which attempt.
        attempt: Attempt,
        /// The time since the hang was confirmed.
        after: Span,
    },
    /// The state of the ranks was recorded before they were stopped.
    EvidenceTaken {
        /// Which attempt.
        attempt: Attempt,
        /// The file with the evidence, if it could be written.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file: Option<String>,
        /// The ranks by their position in the code, smallest group first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        groups: Vec<PlaceGroup>,
        /// The ranks that others wait for, by counters that were read for this.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        waits: Vec<Waits>,
        /// Other findings, one sentence each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        summary: Vec<String>,
        /// How long it took.
        took: Span,
    },
    /// No process of the attempt is left, including children and orphans, except those of ranks that wait for the next
    /// attempt.
    AttemptEnded {
        /// Which attempt.
        attempt: Attempt,
        /// Processes other than ranks that had to be killed (DataLoader workers and other orphans).
        orphans_killed: u32,
        /// Ranks that left the attempt and wait in their processes for the next one.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        waiting: Vec<Rank>,
    },
    /// The launcher was asked to stop.
    StopRequested {
        /// The signal (`SIGTERM`), or who asked.
        by: String,
        /// The status with which the launcher will exit.
        exit: i32,
    },
    /// The launcher of a job vanished without ending it; its ranks were ended.
    LauncherLost {
        /// Its PID.
        pid: Pid,
    },
    /// The launcher found the host's agent and reports to it from now on.
    AgentFound {
        /// Version of the agent.
        version: String,
    },
    /// The launcher lost its agent and decides alone until the agent returns.
    AgentLost {
        /// The reason.
        reason: String,
    },
    /// The job is over.
    JobEnded {
        /// The status with which the launcher exits.
        exit: i32,
        /// The reason.
        reason: String,
    },
}

impl Fact {
    /// Ranks could not be started, and no host was missing.
    pub fn start_failed(attempt: Attempt, error: String) -> Fact {
        Fact::StartFailed { attempt, error, missing: Vec::new() }
    }
}

/// What a launcher was asked to run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The command of each rank.
    pub command: Vec<String>,
    /// Total number of ranks.
    pub world_size: u32,
    /// Number of ranks on this host.
    pub local_world_size: u32,
    /// The first rank of this host.
    pub first_rank: Rank,
    /// Restarts allowed per window.
    pub max_restarts: u32,
    /// The launcher's PID.
    pub launcher: Pid,
    /// The user that the job runs as.
    pub uid: u32,
    /// The run directory with the logs and the launcher's journal.
    pub run_dir: String,
    /// The working directory of the launcher; empty in journals of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub started_in: String,
    /// The run that its checkpoints belong to, `NAME~ID`; empty in journals of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
    /// The ranks' checkpoint directory.
    pub checkpoint_dir: String,
    /// The directory of the heartbeat pages, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_dir: Option<String>,
    /// A hash of what the job runs: its command and the files of its program. `None` if they cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Box<str>>,
    /// The policy's settings; `None` in journals of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Settings>,
    /// The experience with rungs from earlier runs of the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Experience>,
    /// Whether another host leads the job when this launcher starts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows: bool,
    /// Whose job it is; empty in journals of earlier versions.
    #[serde(default, skip_serializing_if = "JobOwner::is_unknown")]
    pub owner: Box<JobOwner>,
}

/// Whose job it is, as far as the launcher's environment shows. Unknown values are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobOwner {
    /// The user's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// The job of Slurm.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub slurm_job_id: String,
    /// Its name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub slurm_job_name: String,
    /// Its partition.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub slurm_partition: String,
    /// The namespace of Kubernetes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod of the launcher.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
}

impl JobOwner {
    fn is_unknown(&self) -> bool {
        *self == Self::default()
    }

    /// Reads the environment of a launcher. In a pod the host's name is the pod's, unless the variable `POD_NAME` says
    /// otherwise; `mounted_namespace` is what Kubernetes mounts into each pod.
    pub fn read(variable: impl Fn(&str) -> Option<String>, mounted_namespace: Option<String>) -> JobOwner {
        let first = |names: &[&str]| {
            let values = names.iter().filter_map(|name| variable(name));
            values.map(|value| value.trim().to_owned()).find(|value| !value.is_empty())
        };
        let in_pod = first(&["KUBERNETES_SERVICE_HOST"]).is_some();
        let pod: &[&str] = if in_pod { &["POD_NAME", "HOSTNAME"] } else { &["POD_NAME"] };
        let mounted = mounted_namespace.filter(|_| in_pod).map(|namespace| namespace.trim().to_owned());
        JobOwner {
            user: first(&["SLURM_JOB_USER", "USER", "LOGNAME"]).unwrap_or_default(),
            slurm_job_id: first(&["SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"]).unwrap_or_default(),
            slurm_job_name: first(&["SLURM_JOB_NAME"]).unwrap_or_default(),
            slurm_partition: first(&["SLURM_JOB_PARTITION"]).unwrap_or_default(),
            namespace: first(&["POD_NAMESPACE"]).or(mounted).unwrap_or_default(),
            pod: first(pod).unwrap_or_default(),
        }
    }
}

/// A rank's process at its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StartedRank {
    /// Which rank.
    pub rank: Rank,
    /// Its index on this host (`LOCAL_RANK`).
    pub local_rank: u32,
    /// Its PID, which is also its process group.
    pub pid: Pid,
    /// Its heartbeat page, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
    /// When the process started, in clock ticks since the boot of its host. A PID alone may later be that of another
    /// process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ticks: Option<u64>,
}

/// When a line of a rank's output was written, and the job's progress after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineTime {
    /// When the launcher first saw the line in the file. It was written then or before.
    pub at: Mono,
    /// Steps of this attempt that started after `at` and were completed; `None` if the progress is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps_after: Option<u64>,
}

impl LineTime {
    /// How long before a failure the line appeared, and how many steps were completed in between: "1.50 s and 2 steps
    /// before the failure".
    pub fn before_failure(self, failed_at: Mono) -> String {
        let span = failed_at.since(self.at);
        match self.steps_after {
            // The launcher reads files a few times per second: it may see a line after the failure.
            None | Some(0) if span == Span::default() => "at the failure".to_owned(),
            None | Some(0) => format!("{span} before the failure"),
            Some(1) => format!("{span} and 1 step before the failure"),
            Some(steps) => format!("{span} and {steps} steps before the failure"),
        }
    }
}

/// What a rank reports about its own end (the page's exit note).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Note {
    /// Type of the exception with its module: `builtins.ValueError`.
    pub exception: String,
    /// Its message.
    pub message: String,
    /// Its traceback, innermost frames last; the start may be cut off.
    pub traceback: String,
    /// The last step that the rank completed, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// When the rank wrote it, on the host's monotonic clock.
    pub at: Mono,
    /// The error file that it was made from, if the rank wrote no note on its page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// A step that a rank completed, from its page's ring. Used by the judges and the time accounting, not stored in the
/// journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepDone {
    /// The step's number as the trainer counts.
    pub step: u64,
    /// When it started: at the end of the previous step, or when the client connected.
    pub start: Mono,
    /// When it was completed.
    pub end: Mono,
    /// Whether it is the first of its process and so includes imports and setup.
    pub first: bool,
    /// Whether its number was counted from 0 in this process, and so does not show the job's progress.
    pub counted: bool,
    /// Nanoseconds spent in sections named `checkpoint`.
    pub checkpoint_ns: u64,
    /// Nanoseconds spent in sections named `restore`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub restore_ns: u64,
    /// How its time was spent.
    pub spent: Spent,
    /// Its loss, if reported.
    #[serde(default, with = "bits", skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Its gradient norm, if reported.
    #[serde(default, with = "bits", skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// The digest of the parameters after it, if reported.
    pub digest: Option<u64>,
}

/// How the time of a step was spent, by the names of its sections (`docs/reference/stragglers.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Nanoseconds of waiting for other ranks.
    pub wait_ns: u64,
    /// Nanoseconds of work that is not part of every step: checkpoints, evaluation.
    pub pause_ns: u64,
    /// Nanoseconds without communication with other ranks: the forward pass, data loading.
    pub alone_ns: u64,
}

/// By reference, as serde asks.
fn is_zero(of: &u64) -> bool {
    *of == 0
}

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

#[cfg(test)]
mod tests {
    use super::JobOwner;

    fn read(variables: &[(&str, &str)], mounted: Option<&str>) -> JobOwner {
        let value = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        JobOwner::read(value, mounted.map(str::to_owned))
    }

    #[test]
    fn the_owner_of_a_job_is_read_from_slurm_and_kubernetes() {
        let slurm = [("USER", ""), ("LOGNAME", "ada"), ("SLURM_JOB_ID", "81"), ("HOSTNAME", "node-1")];
        let ada = JobOwner { user: "ada".into(), slurm_job_id: "81".into(), ..JobOwner::default() };
        assert_eq!(read(&slurm, Some("left over")), ada);
        let submitted = [
            ("USER", "root"),
            ("SLURM_JOB_USER", "ada"),
            ("SLURM_JOB_ID", "81"),
            ("SLURM_JOB_NAME", "llm"),
            ("SLURM_JOB_PARTITION", "h100"),
        ];
        let named = JobOwner { slurm_job_name: "llm".into(), slurm_partition: "h100".into(), ..ada };
        assert_eq!(read(&submitted, None), named);
        let array = [("SLURM_JOB_ID", "82"), ("SLURM_ARRAY_JOB_ID", "80")];
        assert_eq!(read(&array, None).slurm_job_id, "80");
        let pod = [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("HOSTNAME", "train-0")];
        let train = JobOwner { namespace: "research".into(), pod: "train-0".into(), ..JobOwner::default() };
        assert_eq!(read(&pod, Some("research\n")), train);
        let named = [pod[0], pod[1], ("POD_NAME", "other-0"), ("POD_NAMESPACE", "given")];
        let given = JobOwner { namespace: "given".into(), pod: "other-0".into(), ..JobOwner::default() };
        assert_eq!(read(&named, Some("research")), given);
    }
}
