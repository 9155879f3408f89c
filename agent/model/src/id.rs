//! Identifiers as newtypes, so that a rank cannot be confused with a process id.

use serde::{Deserialize, Serialize};

/// A rank of a job, counted over all hosts (`RANK`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl std::fmt::Display for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// How often the ranks were started before: 0 for the first start (`TORCHELASTIC_RESTART_COUNT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attempt(pub u32);

impl Attempt {
    /// The attempt that follows this one.
    pub fn next(self) -> Attempt {
        Attempt(self.0.saturating_add(1))
    }
}

impl std::fmt::Display for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "attempt {}", self.0)
    }
}

/// A process id of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pid(pub i32);

/// A job's name, unique on the host: the launcher's run id.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl JobId {
    /// Maximum length of a name in bytes.
    pub const MAX_BYTES: usize = 128;

    /// What is wrong with a name, which becomes a part of paths, labels and log lines. `None` if it is valid.
    #[must_use]
    pub fn problem(name: &str) -> Option<String> {
        if name.is_empty() || name.len() > JobId::MAX_BYTES {
            return Some(format!(
                "the name has {} bytes and must have 1 to {}",
                name.len(),
                JobId::MAX_BYTES
            ));
        }
        if name.chars().any(char::is_control) {
            return Some("the name has control characters".to_owned());
        }
        (name == "." || name.contains(".."))
            .then(|| "the name has `..`, which leads out of directories".to_owned())
    }
}

impl std::fmt::Display for JobId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The kernel's boot id: monotonic times of different boots cannot be compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BootId(pub String);

/// The number of a failure within its job, from 1: verdict, decision and outcome of one failure share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incident(pub u64);

impl Incident {
    /// No failure, but an order from a person.
    pub const ORDERED: Incident = Incident(0);
}
