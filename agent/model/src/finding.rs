//! A problem of a running job in which no rank has failed: it is slow, or its loss, gradients or parameters are wrong.
//!
//! A failure ends an attempt and leads to a decision. A finding is reported, with its cost, and lasts until it is over.

use serde::{Deserialize, Serialize};

use crate::id::{Attempt, Rank};
use crate::verdict::FaultDomain;

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// A rank takes longer than its peers for the same work.
    SlowRank,
    /// All ranks of a host take longer than their peers.
    SlowHost,
    /// A communicator's transfers take longer than those of similar communicators.
    SlowLink,
    /// A pipeline stage has more work than the others.
    StageImbalance,
    /// In each step another rank is the slowest: the data is spread unevenly.
    DataImbalance,
    /// The loss is far above that of the last steps.
    LossSpike,
    /// The gradient norm is far above that of the last steps, for the job or for one rank compared with its replicas.
    GradNormSpike,
    /// A loss or a gradient norm is infinite or NaN.
    NotANumber,
    /// Replicas that should be equal differ, and it is unknown which is right.
    ReplicasDiffer,
    /// One replica differs from the majority: possible silent data corruption.
    SilentCorruption,
    /// The file system of the checkpoints does not answer.
    SilentFileSystem,
}

impl FindingKind {
    /// Its name in the journal, the API and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            FindingKind::SlowRank => "slow_rank",
            FindingKind::SlowHost => "slow_host",
            FindingKind::SlowLink => "slow_link",
            FindingKind::StageImbalance => "stage_imbalance",
            FindingKind::DataImbalance => "data_imbalance",
            FindingKind::LossSpike => "loss_spike",
            FindingKind::GradNormSpike => "grad_norm_spike",
            FindingKind::NotANumber => "not_a_number",
            FindingKind::ReplicasDiffer => "replicas_differ",
            FindingKind::SilentCorruption => "silent_corruption",
            FindingKind::SilentFileSystem => "silent_file_system",
        }
    }
}

/// A problem of a running job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Its number within the job, from 1; its end is reported under the same number.
    pub finding: u64,
    /// The attempt in which it was seen.
    pub attempt: Attempt,
    /// The kind.
    pub what: FindingKind,
    /// Whether it is over. The other fields then describe it as it was before it ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub over: bool,
    /// One line for the person on call.
    pub headline: String,
    /// The fault domain.
    pub domain: FaultDomain,
    /// Confidence, from 0 to 1.
    pub confidence: f64,
    /// The affected ranks: one, or all of a host or stage; empty if it affects no particular rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<Rank>,
    /// The rank's device, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The host, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The pipeline stage, if it concerns one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    /// The first step with the problem.
    pub since_step: u64,
    /// The step at which it was reported; once it is over, the first step without the problem.
    pub step: u64,
    /// How much shorter a step would be without it, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_percent: Option<f64>,
    /// The evidence, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
    /// The last step at which the replicas agreed; checkpoints after it are doubtful.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_agreed_step: Option<u64>,
    /// Later steps that are known to have been checkpointed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubtful_steps: Vec<u64>,
}

impl Finding {
    /// The finding as it was when the job failed, in a sentence.
    pub fn stood(&self) -> String {
        format!("since step {} of this attempt: {}", self.since_step, self.headline)
    }
}

/// A condition of a host or a device that may explain slowness: low clocks, a narrow PCIe link, a storm of memory
/// errors, steal time, another process on the GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// The host; `None` if the job has only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The device; `None` if it concerns the whole host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// A keyword for its subject; a changed reading with the same keyword is not news.
    #[serde(default)]
    pub about: String,
    /// The condition, in one line with source, reading and limit.
    pub fact: String,
}
