//! Something that is wrong with a job although none of its ranks has failed: it is slow, or its numbers are sick.
//!
//! A failure ends an attempt and is decided on; a finding is told, with what it costs, and lasts until it is over.

use serde::{Deserialize, Serialize};

use crate::base::id::{Attempt, Rank};
use crate::model::verdict::FaultDomain;

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// A rank takes longer than its peers for the same work.
    SlowRank,
    /// All ranks of a host do.
    SlowHost,
    /// A communicator's transfers take longer than those of its like.
    SlowLink,
    /// A pipeline stage has more work than the others.
    StageImbalance,
    /// Another rank is the slowest in each step: the data is spread unevenly.
    DataImbalance,
    /// The loss is far above that of the last steps.
    LossSpike,
    /// The gradient norm is far above that of the last steps, of the job or of a rank's replicas.
    GradNormSpike,
    /// A loss or a gradient norm is infinite or not a number.
    NotANumber,
    /// Replicas that should be the same are not, and it cannot be told which is right.
    ReplicasDiffer,
    /// One replica differs from the majority: possible silent data corruption.
    SilentCorruption,
}

impl FindingKind {
    /// The word for it in the journal, the API and metrics.
    pub fn word(self) -> &'static str {
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
        }
    }
}

/// Something that is wrong with a job that runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Its number within the job, from 1; that it is over is told under the same number.
    pub finding: u64,
    /// The attempt in which it was seen.
    pub attempt: Attempt,
    /// What was found.
    pub what: FindingKind,
    /// Whether it is over. What follows is then as it was while it lasted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub over: bool,
    /// One line for the person on call.
    pub headline: String,
    /// Whose fault it is.
    pub domain: FaultDomain,
    /// How sure, from 0 to 1.
    pub confidence: f64,
    /// Where it is: one rank, or all of a host or stage; empty if it is in no rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<Rank>,
    /// The rank's device, if it is about one that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The host, if it is about one that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The pipeline stage, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    /// The first step at which it was so.
    pub since_step: u64,
    /// The step at which it was told; when it is over, the first step at which it no longer was so.
    pub step: u64,
    /// How much shorter a step would be without it, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_percent: Option<f64>,
    /// What it rests on, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
    /// The last step at which the replicas agreed; checkpoints after it are doubtful.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_agreed_step: Option<u64>,
    /// Steps after it that are known to have been checkpointed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubtful_steps: Vec<u64>,
}

impl Finding {
    /// What stood when the job failed, in a sentence.
    pub fn stood(&self) -> String {
        format!("since step {} of this attempt: {}", self.since_step, self.headline)
    }
}

/// Something that is known of a host or a device and may explain why it is slow: clocks held down, a narrow PCIe
/// link, a storm of memory errors, processor time stolen, another process on the GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// The host; none for the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The device; none if it concerns the whole host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// What it is about, in a word; a reading of the same that moved on is no news.
    #[serde(default)]
    pub about: String,
    /// What is known, in one line with source, reading and limit.
    pub fact: String,
}
