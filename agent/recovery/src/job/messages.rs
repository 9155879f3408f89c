//! The inputs and outputs of a job.

use serde::{Deserialize, Serialize};

use mainstay_health::host::contention::SlowdownHints;
use mainstay_model::entry::{Body, Fact, StepDone};
use mainstay_model::host_context::HostEvidence;
use mainstay_model::id::{Attempt, Incident, Rank};
use mainstay_model::time::Mono;
use mainstay_model::verdict::{Action, Verdict};

/// An input from the launcher.
#[derive(Clone, Debug)]
pub enum Input {
    /// A fact; it is recorded in the journal.
    Fact(Fact),
    /// A rank completed steps, which are too many for the journal.
    Steps {
        /// The attempt.
        attempt: Attempt,
        /// The rank.
        rank: Rank,
        /// The steps, oldest first.
        done: Vec<StepDone>,
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
    /// All ranks have saved a step, and it was sealed.
    Saved {
        /// The attempt.
        attempt: Attempt,
        /// The step.
        step: u64,
        /// By rank, in order: the checksums of its shard's chunks.
        shards: Vec<(Rank, Vec<u64>)>,
    },
    /// State of the host and its devices that may explain why ranks are slow.
    RankContext(SlowdownHints),
    /// The agent's evidence about a failure. `None` if there is no agent or it did not answer in time.
    AgentEvidence(Option<AgentEvidence>),
    /// Host evidence about a failure after its decision. Ignored for any but the last failure.
    LateEvidence {
        /// The failure.
        incident: Incident,
        /// All evidence of the host so far.
        host_evidence: HostEvidence,
    },
    /// Resources that the next ranks need and that the launcher sees in use; sent before each ruling.
    Held(Vec<String>),
    /// The time of an [`Order::Wake`] has come.
    Wake,
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

/// An output of the job for the launcher.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "outputs are few and soon taken; most are records")]
pub enum Output {
    /// To be recorded in the journal.
    Record(Body),
    /// To be carried out.
    Order(Order),
}

/// An order that the launcher carries out.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Start all ranks; answered by `AttemptStarted` or `StartFailed`.
    StartRanks(Attempt),
    /// Start the missing ranks, and let those that wait in their processes continue; answered as `StartRanks`.
    StartRound(Attempt),
    /// End one of the ranks that wait in their processes, so that it does not continue; answered by another
    /// `AttemptEnded`.
    EndRank {
        /// The attempt.
        attempt: Attempt,
        /// The rank.
        rank: Rank,
    },
    /// Stop what is left of the attempt, its whole process tree; answered by `AttemptEnded`.
    StopRanks {
        /// The attempt.
        attempt: Attempt,
        /// The reason, which sets the grace period of the ranks.
        why: StopWhy,
    },
    /// Ask all ranks to save after the same step and to end. Nothing waits for it.
    AskToSave(Attempt),
    /// Record what all ranks of the attempt are doing; answered by `EvidenceTaken` or `HangPassed`.
    TakeEvidence(Attempt),
    /// Ask the agent for its evidence; answered by [`Input::AgentEvidence`]. For an ordered restart the incident is
    /// [`Incident::ORDERED`].
    Consult(Box<Verdict>),
    /// Wake the job at this time; answered by [`Input::Wake`].
    Wake {
        /// The time.
        at: Mono,
    },
    /// The job is over.
    Finish {
        /// The exit status of the launcher.
        exit: i32,
    },
}

/// Why ranks are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
