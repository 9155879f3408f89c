//! Earlier failures of the same kind: where in its work a job failed, and how often, here and on other hosts.

use serde::{Deserialize, Serialize};

use crate::model::verdict::Verdict;

/// Where in its work a job failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The step at which the culprit stood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Where in its data it read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<u64>,
    /// Whether it sent heartbeats: only then does no step mean that it completed none.
    #[serde(default)]
    pub heartbeats: bool,
}

impl Place {
    /// That of a verdict.
    pub fn of(verdict: &Verdict) -> Place {
        Place { step: verdict.step, data: verdict.data, heartbeats: verdict.heartbeats }
    }

    /// Whether both are the same, as far as ranks tell.
    pub fn is(self, other: Place) -> bool {
        let same_data = self.data.is_some() && self.data == other.data;
        same_data || (self.heartbeats && other.heartbeats && self.step == other.step)
    }
}

/// Earlier failures with the same fingerprint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenBefore {
    /// In this job, whatever its run.
    #[serde(default)]
    pub in_this_job: u32,
    /// Of those at the step of the present one.
    #[serde(default)]
    pub at_this_step: u32,
    /// Of those at other steps where the same data was read.
    #[serde(default, skip_serializing_if = "is_none")]
    pub at_this_data: u32,
    /// Of those at the step of the present one where other data was read.
    #[serde(default, skip_serializing_if = "is_none")]
    pub at_other_data: u32,
    /// Of those in other boots of the host: whatever passes with a restart of the host had passed.
    #[serde(default)]
    pub in_other_boots: u32,
    /// Other jobs on this host that failed so: of another user, or of another program.
    #[serde(default)]
    pub other_jobs: u32,
    /// Of those in this job, those of earlier runs at the same step or the same data.
    #[serde(default, skip_serializing_if = "is_none")]
    pub in_earlier_runs: u32,
    /// Other hosts on which this program failed so before this run began.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<OnHost>,
    /// Agents of other hosts that answer, and hear of this failure.
    #[serde(default, skip_serializing_if = "is_none")]
    #[serde(rename = "heard_by")]
    pub answered_by: u32,
}

impl SeenBefore {
    /// Counts a failure of this job at `then`, now that it fails at `now`.
    pub fn count(&mut self, then: Place, now: Place) {
        let data = then.data.zip(now.data).map(|(then, now)| then == now);
        self.in_this_job += 1;
        self.at_this_step += u32::from(then.step == now.step);
        self.at_this_data += u32::from(then.step != now.step && data == Some(true));
        self.at_other_data += u32::from(then.step == now.step && data == Some(false));
    }

    /// The other hosts on which it came at the same step or the same data.
    pub fn elsewhere_at_this_place(&self) -> impl Iterator<Item = &str> {
        self.elsewhere.iter().filter(|of| of.at_this_place).map(|of| of.host.as_str())
    }

    /// Whether there was none.
    pub fn is_nothing(&self) -> bool {
        self.in_this_job == 0 && self.other_jobs == 0 && self.elsewhere.is_empty()
    }
}

/// A host on which the same program failed so before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnHost {
    /// Its name.
    pub host: String,
    /// Whether that was at the same step or the same data.
    #[serde(default)]
    pub at_this_place: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_none(count: &u32) -> bool {
    *count == 0
}
