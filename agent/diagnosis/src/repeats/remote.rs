//! Failures that hosts report to each other: only hashes and numbers, no text of a program or its output. A failure that the same
//! program had on another host before is not caused by this one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{FailurePosition, was_changed};
use mainstay_model::repeats::OnHost;
use mainstay_model::time::Wall;

/// Maximum number of failures that a host reports, the newest.
pub const MAX_REPORTED: usize = 64;

/// A failure, as a host reports it to others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteFailure {
    /// The owner and the program, as a hash.
    pub program: String,
    /// A hash of its command and files, if they could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// The failure's fingerprint as a hash.
    pub fingerprint: String,
    /// Where in the training it failed.
    #[serde(default, rename = "place")]
    pub position: FailurePosition,
    /// When the verdict was given, by that host's clock.
    pub at: Wall,
}

/// Failures of other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteFailures {
    /// The number of agents of other hosts that respond and receive the failures of this host.
    pub answered_by: u32,
    /// The failures they reported, by host.
    pub failures: BTreeMap<String, Vec<RemoteFailure>>,
}

impl RemoteFailures {
    /// The hosts on which this program had the same failure before `began`, each once. Simultaneous failures on several hosts are one
    /// failure of one job.
    pub(super) fn before(&self, now: &RemoteFailure, began: Wall) -> Vec<OnHost> {
        let same = |failure: &&RemoteFailure| {
            let changed = was_changed(failure.content.as_ref(), now.content.as_ref());
            failure.program == now.program
                && failure.fingerprint == now.fingerprint
                && !changed
                && failure.at < began
        };
        let on_host = |(host, failures): (&String, &Vec<RemoteFailure>)| {
            let mut so = failures.iter().filter(same).peekable();
            so.peek()?;
            Some(OnHost { host: host.clone(), at_this_place: so.any(|then| then.position.is(now.position)) })
        };
        self.failures.iter().filter_map(on_host).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(position: FailurePosition, at: i64) -> RemoteFailure {
        RemoteFailure {
            program: "p".into(),
            content: Some("c".into()),
            fingerprint: "f".into(),
            position,
            at: Wall(at),
        }
    }

    fn at(step: u64) -> FailurePosition {
        FailurePosition { step: Some(step), data: None, heartbeats: true }
    }

    fn known(failure: RemoteFailure) -> RemoteFailures {
        RemoteFailures { answered_by: 1, failures: BTreeMap::from([("b".to_owned(), vec![failure])]) }
    }

    #[test]
    fn the_same_program_with_the_same_failure_before_this_run_counts_and_nothing_else_does() {
        let now = remote(at(7), 100);
        let seen = |failure: RemoteFailure| known(failure).before(&now, Wall(50));
        let on_b = |at_this_place| vec![OnHost { host: "b".to_owned(), at_this_place }];
        assert_eq!(seen(remote(at(7), 10)), on_b(true));
        assert_eq!(seen(remote(at(8), 10)), on_b(false));
        assert_eq!(
            seen(RemoteFailure { content: None, ..remote(at(7), 10) }),
            on_b(true),
            "what cannot be read is no change"
        );
        for other in [
            RemoteFailure { program: "q".into(), ..remote(at(7), 10) },
            RemoteFailure { content: Some("d".into()), ..remote(at(7), 10) },
            RemoteFailure { fingerprint: "g".into(), ..remote(at(7), 10) },
            remote(at(7), 60),
        ] {
            assert_eq!(seen(other.clone()), [], "{other:?}");
        }
    }
}
