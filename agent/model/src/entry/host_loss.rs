//! The kinds of losses of a host.

use serde::{Deserialize, Serialize};

/// What is known of a lost host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostLoss {
    /// No host reaches it.
    Unreachable,
    /// Its kernel accepts connections and no launcher answers.
    Unresponsive,
    /// Its launcher is gone.
    LauncherGone,
    /// Other hosts reach it, and it does not follow its leader.
    NotFollowing,
    /// It left the job, or its messages contradict each other.
    Left,
    /// It led the job, and another host replaced it.
    ReplacedLeader,
    /// Nothing: no host could check it in time, or the entry is of another version.
    #[default]
    #[serde(other)]
    Unknown,
}

impl HostLoss {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
    pub(crate) fn is_unknown(&self) -> bool {
        *self == HostLoss::Unknown
    }
}
