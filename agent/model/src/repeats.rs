//! Earlier failures of the same kind: at which step or data the job failed, and how often, here and on other hosts.

use serde::{Deserialize, Serialize};

use crate::verdict::Verdict;

/// The position in its work at which a job failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailurePosition {
    /// The culprit's step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Its position in its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<u64>,
    /// Whether it sent heartbeats: only then does a missing step mean that it completed none.
    #[serde(default)]
    pub heartbeats: bool,
}

impl FailurePosition {
    /// The position in a verdict.
    pub fn from_verdict(verdict: &Verdict) -> FailurePosition {
        FailurePosition { step: verdict.step, data: verdict.data, heartbeats: verdict.heartbeats }
    }

    /// Whether both positions are equal, as far as ranks report them.
    pub fn is(self, other: FailurePosition) -> bool {
        let same_data = self.data.is_some() && self.data == other.data;
        same_data || (self.heartbeats && other.heartbeats && self.step == other.step)
    }
}

/// Earlier failures with the same fingerprint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenBefore {
    /// In this job, in any run.
    #[serde(default)]
    pub in_this_job: u32,
    /// Among those, failures at the present step.
    #[serde(default)]
    pub at_this_step: u32,
    /// Among those, failures at other steps with the same data.
    #[serde(default, skip_serializing_if = "is_none")]
    pub at_this_data: u32,
    /// Among those, failures at the present step with other data.
    #[serde(default, skip_serializing_if = "is_none")]
    pub at_other_data: u32,
    /// Among those, failures in other boots of the host: a reboot did not help.
    #[serde(default)]
    pub in_other_boots: u32,
    /// Other jobs on this host with this failure: of another user, or of another program.
    #[serde(default)]
    pub other_jobs: u32,
    /// Among those in this job, failures of earlier runs at the same step or the same data.
    #[serde(default, skip_serializing_if = "is_none")]
    pub in_earlier_runs: u32,
    /// Other hosts on which this program had this failure before this run started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<OnHost>,
    /// Agents of other hosts that answer and receive this failure.
    #[serde(default, skip_serializing_if = "is_none")]
    #[serde(rename = "heard_by")]
    pub answered_by: u32,
}

impl SeenBefore {
    /// Counts a failure of this job at `then`, given the present failure at `now`.
    pub fn count(&mut self, then: FailurePosition, now: FailurePosition) {
        let data = then.data.zip(now.data).map(|(then, now)| then == now);
        self.in_this_job += 1;
        self.at_this_step += u32::from(then.step == now.step);
        self.at_this_data += u32::from(then.step != now.step && data == Some(true));
        self.at_other_data += u32::from(then.step == now.step && data == Some(false));
    }

    /// The other hosts with the failure at the same step or the same data.
    pub fn elsewhere_at_this_place(&self) -> impl Iterator<Item = &str> {
        self.elsewhere.iter().filter(|of| of.at_this_place).map(|of| of.host.as_str())
    }

    /// Whether there are no earlier failures.
    pub fn is_nothing(&self) -> bool {
        self.in_this_job == 0 && self.other_jobs == 0 && self.elsewhere.is_empty()
    }
}

/// A host on which the same program had this failure before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnHost {
    /// Its name.
    pub host: String,
    /// Whether it was at the same step or the same data.
    #[serde(default)]
    pub at_this_place: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_none(count: &u32) -> bool {
    *count == 0
}
