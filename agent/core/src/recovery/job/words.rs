//! What a job is told and what it answers.

use serde::{Deserialize, Serialize};

use crate::base::id::{Attempt, Incident, Rank};
use crate::base::time::Mono;
use crate::host::contention::SlowdownHints;
use crate::model::entry::{Body, Fact, StepDone};
use crate::model::host_context::HostEvidence;
use crate::model::verdict::{Action, Verdict};

/// What the launcher tells the job.
#[derive(Clone, Debug)]
pub enum Input {
    /// Something was observed; it goes into the journal.
    Fact(Fact),
    /// A rank completed steps; these are too many for the journal.
    Steps {
        /// In which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// The steps, oldest first.
        done: Vec<StepDone>,
    },
    /// A rank said what it is: ranks of one role and stage do the same work.
    Role {
        /// In which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
        /// Any text; empty if there is but one role.
        role: String,
        /// Its pipeline stage.
        stage: Option<u32>,
    },
    /// All ranks have saved a step, and what they saved was sealed.
    Saved {
        /// In which attempt.
        attempt: Attempt,
        /// Which step.
        step: u64,
        /// By rank, in their order: the checksums of its shard's chunks.
        shards: Vec<(Rank, Vec<u64>)>,
    },
    /// What is known of the host and its devices that may explain why ranks are slow.
    RankContext(SlowdownHints),
    /// The agent's evidence about a failure; none if there is no agent or it did not answer in time.
    Ruling(Option<Ruling>),
    /// What the host has to say of a failure that was decided on already; of any but the last one it is ignored.
    LateEvidence {
        /// Which failure.
        incident: Incident,
        /// All that the host has said of it by now.
        host_evidence: HostEvidence,
    },
    /// What the launcher itself sees held that the next ranks need; told before a ruling, each time.
    Held(Vec<String>),
    /// The time of an [`Order::LookAgain`] has come.
    LookAgain,
}

/// The agent's evidence about a failure, or what a replay has of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Ruling {
    /// The incident that the agent was asked about; an answer to another one is ignored.
    pub incident: Incident,
    /// What is done in place of the job's own decision. Agents leave that to the launcher: only a replay sets it, to
    /// go on as the recorded run went on.
    pub instead: Option<(Action, String)>,
    /// What the host has to say of the failure.
    pub host_evidence: HostEvidence,
}

/// What the job asks of the launcher.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "outputs are few and soon taken; most are records")]
pub enum Output {
    /// To be written into the journal.
    Record(Body),
    /// To be carried out.
    Order(Order),
}

/// What the launcher's hands are to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Start all ranks; answered by `AttemptStarted` or `StartFailed`.
    StartRanks(Attempt),
    /// Start the ranks that are gone, and have those that wait in their processes go on; answered as `StartRanks`.
    StartRound(Attempt),
    /// End one of the ranks that wait in their processes, which is not to go on in it; answered by `AttemptEnded` once more.
    EndRank {
        /// Of which attempt.
        attempt: Attempt,
        /// Which rank.
        rank: Rank,
    },
    /// Stop what is left of the attempt, its whole process tree; answered by `AttemptEnded`.
    StopRanks {
        /// Which attempt.
        attempt: Attempt,
        /// Why, which sets the grace that the ranks are given.
        why: StopWhy,
    },
    /// Write down what all ranks of the attempt are at; answered by `EvidenceTaken` or `HangPassed`.
    TakeEvidence(Attempt),
    /// Ask the agent for its evidence; answered by [`Input::Ruling`]. Of a restart that was ordered the incident is
    /// [`Incident::ORDERED`].
    Consult(Box<Verdict>),
    /// Come back at that time; answered by [`Input::LookAgain`].
    LookAgain {
        /// When.
        at: Mono,
    },
    /// The job is over.
    Finish {
        /// The status with which the launcher exits.
        exit: i32,
    },
}

/// Why ranks are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopWhy {
    /// A rank failed; the others can only wait for it. Ranks that can stay in their processes leave the attempt in them.
    Fault,
    /// Ranks that wait in their processes are not to go on in them.
    Dismissed,
    /// The launcher was asked to stop: the ranks may want to save.
    Requested,
    /// A person wants all ranks started anew.
    Ordered,
    /// All ranks are done; what they left behind has to go.
    Done,
}
