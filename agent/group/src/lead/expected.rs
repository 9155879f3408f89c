//! What all launchers of a job have in common. One with another program or another number of ranks would train something
//! else, as soon as it gets ranks.

use crate::wire::{Join, PROTOCOL};

/// What the leader expects of other launchers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The leader's own description.
    pub leader: Join,
    /// Whether the user admits launchers with another program or another number of ranks.
    pub mixed: bool,
}

impl Expected {
    /// Why a launcher cannot take part in this job at all. `None` if it can.
    pub fn refusal(&self, join: &Join) -> Option<String> {
        if join.protocol != PROTOCOL {
            // The rest of a join with another protocol cannot be understood.
            return Some(format!(
                "it runs Mainstay {} with protocol {} between launchers; the leader has {} with protocol {PROTOCOL}: \
                 install the same version on all hosts",
                join.version,
                join.protocol,
                env!("CARGO_PKG_VERSION")
            ));
        }
        let range = |(least, most): (u32, u32)| match least == most {
            true => least.to_string(),
            false => format!("{least}:{most}"),
        };
        let hosts = self.leader.hosts;
        (join.hosts != hosts).then(|| {
            format!("it was started with --nnodes {}, the leader with {}", range(join.hosts), range(hosts))
        })
    }

    /// Why a launcher that has no ranks yet is not admitted: it would run something else. `None` if it is.
    pub fn difference(&self, join: &Join) -> Option<String> {
        let differences = self.differences(join);
        if self.mixed || differences.is_empty() {
            return None;
        }
        let id = &self.leader.run_id;
        Some(format!(
            "{}. Start it as on host {}; give another job its own --rdzv-id (this one has {id}); to admit hosts that \
             differ, start all hosts with --rdzv-conf mixed=on",
            differences.join(", and "),
            self.leader.host
        ))
    }

    /// In what a launcher differs, for people.
    pub fn differences(&self, join: &Join) -> Vec<String> {
        let Join { host, ranks, command, script, .. } = &self.leader;
        let differ = |theirs: &str, ours: &str| !theirs.is_empty() && !ours.is_empty() && theirs != ours;
        let mut differences = Vec::new();
        if join.ranks != *ranks {
            differences
                .push(format!("it has {} ranks (--nproc-per-node), host {host} has {ranks}", join.ranks));
        }
        if differ(&join.command, command) {
            differences.push(format!("its command differs from that of host {host}"));
        }
        if differ(&join.script, script) {
            differences.push(format!(
                "its script differs from that of host {host} (content hash {}, there {})",
                short(&join.script),
                short(script)
            ));
        }
        differences
    }
}

/// The part of a hash that people compare.
fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_that_would_run_something_else_is_refused_unless_the_user_admits_it() {
        let text = |text: &str| text.to_owned();
        let leader =
            Join { host: text("a"), ranks: 2, command: text("c1"), script: text("s1"), ..Join::default() };
        let expected = Expected { leader: leader.clone(), mixed: false };
        let same = Join { host: text("b"), ..leader };
        assert_eq!(expected.difference(&same), None);
        // An older version does not send what it runs.
        assert_eq!(expected.difference(&Join { command: text(""), script: text(""), ..same.clone() }), None);
        for other in [
            Join { ranks: 1, ..same.clone() },
            Join { command: text("c2"), ..same.clone() },
            Join { script: text("s2"), ..same },
        ] {
            let why = expected.difference(&other).expect("a difference");
            assert!(why.contains("host a") && !why.contains("this host"), "{why}");
            let mixed = Expected { mixed: true, ..expected.clone() };
            assert_eq!((mixed.difference(&other), mixed.differences(&other).len()), (None, 1));
        }
    }
}
