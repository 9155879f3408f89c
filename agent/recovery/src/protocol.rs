//! What the hosts of a job report to it, and what it orders them to do: one form in the job's state machine, in the
//! group of its hosts, in each launcher, and in the messages between launchers.

pub mod as_json;
mod copy_list;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use mainstay_checkpoint::inventory::{Copy, StepKey};
use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::{Fact, StepDone};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Action, Verdict};

use crate::job::Summary;
use crate::policy::Advice;

/// Something that a host saw or did. The last variants, from [`Event::Saved`] on, concern only the host whose launcher
/// runs the job and cannot be sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A fact; it is recorded in the journal.
    Fact(#[serde(with = "as_json")] Fact),
    /// Ranks completed steps, which are too many for the journal.
    Steps {
        /// The attempt.
        attempt: Attempt,
        /// The steps of each rank, oldest first.
        #[serde(with = "as_json")]
        ranks: Vec<(Rank, Vec<StepDone>)>,
    },
    /// A rank declared its role: ranks of one role and stage do the same work.
    Role {
        /// The attempt.
        attempt: Attempt,
        /// The rank.
        rank: Rank,
        /// Any text; empty if there is only one role.
        role: String,
        /// Its pipeline stage.
        stage: Option<u32>,
    },
    /// Answers [`Command::Open`].
    Opened {
        /// The attempt.
        attempt: Attempt,
        /// The port, or why there is none.
        port: Result<u16, String>,
    },
    /// Answers [`Command::Gather`].
    Holding {
        /// The attempt that follows.
        attempt: Attempt,
        /// The shards of the host's own ranks, and those stored for others.
        #[serde(with = "copy_list")]
        copies: Vec<Copy>,
    },
    /// Answers [`Command::Seat`].
    Seated {
        /// The attempt that follows.
        attempt: Attempt,
        /// The seat.
        seat: Seat,
    },
    /// Answers [`Command::Bring`].
    Brought {
        /// The attempt.
        attempt: Attempt,
        /// The step.
        step: StepKey,
        /// Why a shard is missing. `None` if all are there.
        error: Option<String>,
    },
    /// Answers [`Command::Look`].
    Looked {
        /// The launcher that was checked.
        launcher: String,
        /// The result.
        sight: ProbeResult,
    },
    /// All ranks have saved a step, and it was sealed.
    #[serde(skip)]
    Saved {
        /// The attempt.
        attempt: Attempt,
        /// The step.
        step: u64,
        /// By rank, in order: the checksums of its shard's chunks.
        shards: Vec<(Rank, Vec<u64>)>,
    },
    /// State of the host and its devices that may explain why ranks are slow.
    #[serde(skip)]
    RankContext(SlowdownHints),
    /// Answers [`Command::Consult`]: `None` if there is no agent or it did not answer in time.
    #[serde(skip)]
    AgentEvidence(Option<AgentEvidence>),
    /// Answers [`Command::AskPolicy`].
    #[serde(skip)]
    PolicyAnswer {
        /// The failure.
        incident: Incident,
        /// As in [`PolicyAnswer`](crate::policy::PolicyAnswer).
        advice: Result<Option<Advice>, String>,
    },
    /// Host evidence about a failure after its decision. Ignored for any but the last failure.
    #[serde(skip)]
    LateEvidence {
        /// The failure.
        incident: Incident,
        /// All evidence of the host so far.
        host_evidence: HostEvidence,
    },
    /// Resources that the next ranks need and that the launcher sees in use; sent before each ruling.
    #[serde(skip)]
    Held(Vec<String>),
    /// The time of a [`Command::Wake`] has come.
    #[serde(skip)]
    Wake,
}

impl Event {
    /// Whether it concerns only the host whose launcher runs the job.
    pub fn is_of_leader(&self) -> bool {
        matches!(
            self,
            Event::Saved { .. }
                | Event::RankContext(_)
                | Event::AgentEvidence(_)
                | Event::PolicyAnswer { .. }
                | Event::LateEvidence { .. }
                | Event::Held(_)
                | Event::Wake
        )
    }
}

/// The agent's evidence about a failure, or what a replay has of it.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentEvidence {
    /// The incident that the agent was asked about. Answers to others are ignored.
    pub incident: Incident,
    /// An action that replaces the job's own decision. Agents leave that to the launcher: only a replay sets it, to
    /// continue as the recorded run did.
    pub instead: Option<(Action, String)>,
    /// The host's evidence about the failure.
    pub host_evidence: HostEvidence,
}

/// An order for a host. Those from [`Command::Consult`] on are only for the host whose launcher runs the job and cannot
/// be sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Start the ranks; answered by `AttemptStarted` or `StartFailed`. The job sets the first two fields, the group the
    /// others.
    Start {
        /// The attempt.
        attempt: Attempt,
        /// Whether ranks that wait in their processes continue in them, and only missing ones are started.
        in_process: bool,
        /// `MASTER_ADDR`.
        master_addr: String,
        /// `MASTER_PORT`.
        master_port: u16,
        /// The step from which all ranks resume. `None` if they determine it themselves.
        resume: Option<StepKey>,
        /// How many ranks ran before, if the number differed in this run.
        before: Option<u32>,
    },
    /// End a rank that waits in its process, so that it does not continue; answered by another `AttemptEnded`.
    EndRank {
        /// The attempt.
        attempt: Attempt,
        /// The rank.
        rank: Rank,
    },
    /// Stop what is left of the attempt, its whole process tree; answered by `AttemptEnded`.
    Stop {
        /// The attempt.
        attempt: Attempt,
        /// The reason, which sets the grace period of the ranks.
        why: StopWhy,
        /// The step after which ranks are asked to save in place: the same on all hosts. Set by the group.
        save_after: Option<u64>,
    },
    /// Ask all ranks to save and to end; unlike [`Command::Stop`] it stops none, and nothing waits for it.
    AskToSave {
        /// The attempt.
        attempt: Attempt,
        /// The step after which all ranks save: the same on all hosts. Set by the group.
        save_after: Option<u64>,
    },
    /// Record what all ranks are doing; answered by `EvidenceTaken` or `HangPassed`.
    TakeEvidence {
        /// The attempt.
        attempt: Attempt,
    },
    /// The job is over.
    Finish {
        /// The exit status of each launcher.
        exit: i32,
        /// The summary of the job. Set by the group.
        #[serde(with = "as_json")]
        summary: Option<Box<Summary>>,
    },
    /// Take other ranks; answered by [`Event::Seated`]. None of the host's ranks runs at that time.
    Seat {
        /// The attempt that follows.
        attempt: Attempt,
        /// The new seat.
        seat: Seat,
    },
    /// Reserve a port for the ranks' store; answered by [`Event::Opened`].
    Open {
        /// The attempt.
        attempt: Attempt,
    },
    /// Report which shards of checkpoints are on this host; answered by [`Event::Holding`].
    Gather {
        /// The attempt that follows.
        attempt: Attempt,
        /// The addresses where the launchers of all hosts store copies for each other.
        peers: Vec<String>,
    },
    /// Fetch the shards of this host's ranks, from wherever they are; answered by [`Event::Brought`].
    Bring {
        /// The attempt.
        attempt: Attempt,
        /// The step.
        step: StepKey,
    },
    /// A save is due on all ranks.
    SaveDue {
        /// The attempt.
        attempt: Attempt,
        /// The step after which to save.
        step: u64,
    },
    /// Check whether another launcher is alive; answered by [`Event::Looked`].
    Look {
        /// The launcher to check.
        launcher: String,
        /// `HOST:PORT` where it listens.
        address: String,
    },
    /// Ask the agent for its evidence; answered by [`Event::AgentEvidence`]. For an ordered restart the incident is
    /// [`Incident::ORDERED`].
    #[serde(skip)]
    Consult(Box<Verdict>),
    /// Ask the user's own policy; answered by [`Event::PolicyAnswer`].
    #[serde(skip)]
    AskPolicy {
        /// The failure.
        incident: Incident,
        /// The case, as [`question`](crate::policy::question) has it.
        case: Value,
    },
    /// Wake the job at this time; answered by [`Event::Wake`].
    #[serde(skip)]
    Wake {
        /// The time.
        at: Mono,
    },
}

impl Command {
    /// The job's order to start all ranks.
    pub fn start(attempt: Attempt) -> Command {
        Command::start_as(attempt, false)
    }

    /// The job's order to start the missing ranks, and to let those that wait in their processes continue.
    pub fn start_round(attempt: Attempt) -> Command {
        Command::start_as(attempt, true)
    }

    fn start_as(attempt: Attempt, in_process: bool) -> Command {
        let (master_addr, master_port, resume, before) = (String::new(), 0, None, None);
        Command::Start { attempt, in_process, master_addr, master_port, resume, before }
    }

    /// The order to stop an attempt.
    pub fn stop(attempt: Attempt, why: StopWhy) -> Command {
        Command::Stop { attempt, why, save_after: None }
    }

    /// The job's order to ask all ranks to save and to end.
    pub fn ask_to_save(attempt: Attempt) -> Command {
        Command::AskToSave { attempt, save_after: None }
    }

    /// The job's order to end with this status.
    pub fn finish(exit: i32) -> Command {
        Command::Finish { exit, summary: None }
    }
}

/// Why ranks are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopWhy {
    /// A rank failed, and the others can only wait for it. Ranks that can keep their processes leave the attempt in
    /// them.
    Fault,
    /// Ranks that wait in their processes must not continue in them.
    Dismissed,
    /// The launcher was asked to stop: the ranks may want to save.
    Requested,
    /// A person ordered a restart of all ranks.
    Ordered,
    /// All ranks are done; leftover processes are removed.
    Done,
}

impl StopWhy {
    /// Whether ranks are asked to save before they end.
    pub fn lets_save(self) -> bool {
        matches!(self, StopWhy::Requested | StopWhy::Ordered)
    }
}

/// The position of a host in the job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// `GROUP_RANK`.
    pub group_rank: u32,
    /// `GROUP_WORLD_SIZE`.
    pub group_world_size: u32,
    /// `RANK` of the host's first rank.
    pub first_rank: u32,
    /// `WORLD_SIZE`.
    pub world_size: u32,
}

/// What a check of a launcher finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ProbeResult {
    /// A launcher of the job answers.
    Answers,
    /// The kernel accepts connections, but no launcher answers on them.
    Accepts,
    /// The host answers that no process listens there.
    Refuses,
    /// Nothing answers.
    Silent,
}
