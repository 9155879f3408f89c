//! Describes a hang: its kind, the culprits, the victims and their positions in the code.

use serde::{Deserialize, Serialize};

use crate::id::Rank;
use crate::time::{Mono, Span};

/// The kind of a hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HangKind {
    /// A rank's process was stopped by a signal.
    Stopped,
    /// A rank's client never connected while the others wait for it.
    NeverRegistered,
    /// A rank has finished while the others wait for it.
    FinishedEarly,
    /// A rank waits for data.
    DataInput,
    /// A rank waits for a device or a file system.
    BlockedIo,
    /// A rank does not return from its own code, outside any collective.
    UserCode,
    /// Ranks entered collectives that do not match.
    Mismatch,
    /// All ranks entered a collective and none left it.
    Network,
    /// A rank from which nothing arrives any more, like its host.
    SilentHost,
    /// Heartbeats but no steps.
    Livelock,
    /// No rank makes progress, and nothing distinguishes the ranks.
    AllStill,
}

impl HangKind {
    /// The text that follows a rank's name.
    pub fn of_a_rank(self) -> &'static str {
        match self {
            HangKind::Stopped => "is stopped by a signal",
            HangKind::NeverRegistered => "has never registered",
            HangKind::FinishedEarly => "has finished while the others wait for it",
            HangKind::DataInput => "waits for data",
            HangKind::BlockedIo => "waits for a device or a file system",
            HangKind::UserCode => "is stuck in the program's code",
            HangKind::Mismatch => "entered a collective that does not fit those of the others",
            HangKind::Network => "waits in a collective that all have entered",
            HangKind::SilentHost => "no longer reports",
            HangKind::Livelock => "sends heartbeats and completes no step",
            HangKind::AllStill => "shows no activity",
        }
    }
}

/// The phase of ranks that send no heartbeats: they are judged by the activity of their processes.
pub const ACTIVITY: &str = "activity";

/// The section of ranks whose steps are known only from lines of their output.
pub const OUTPUT_LINES: &str = "output lines";

/// A confirmed hang.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hang {
    /// The kind.
    pub kind: HangKind,
    /// The ranks where it started; empty if nothing distinguishes the ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub culprits: Vec<Rank>,
    /// The hosts of these ranks, in a job of several hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Ranks that wait for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<Rank>,
    /// When any rank last made progress.
    pub since: Mono,
    /// When it was confirmed.
    pub confirmed: Mono,
    /// The phase of the culprits: `first_step`, `step`, or a section; [`ACTIVITY`] without heartbeats.
    pub phase: String,
    /// How long the phase may take.
    pub limit: Span,
    /// The last step that the culprits completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Confidence in the culprits, from 0 to 1.
    pub confidence: f64,
    /// The evidence, one sentence each.
    pub evidence: Vec<String>,
}

impl Hang {
    /// One line for the person on call.
    pub fn headline(&self) -> String {
        let after = match self.step {
            Some(step) => format!(" after step {step}"),
            // Without heartbeats the progress is unknown.
            None if self.phase == ACTIVITY => String::new(),
            None => " before the first step".to_owned(),
        };
        let at = match self.phase.as_str() {
            "step" | "first_step" | ACTIVITY => String::new(),
            OUTPUT_LINES => ", judged by printed lines".to_owned(),
            section => format!(", in section {section}"),
        };
        let on = match self.hosts.as_slice() {
            [] => String::new(),
            [host] => format!(" on host {host}"),
            hosts => format!(" on hosts {}", hosts.join(", ")),
        };
        match self.culprits.as_slice() {
            [] if self.kind == HangKind::Network => {
                format!("all ranks hang in a collective{after}: all have entered it and none has left")
            }
            [] => format!(
                "all ranks hang{after}{at}: no rank makes progress, and no difference between them is visible"
            ),
            [rank] => format!("{rank}{on} hangs{after}{at}: it {}", self.kind.of_a_rank()),
            ranks => format!("{}{on} hang{after}{at}: each {}", listed(ranks), self.kind.of_a_rank()),
        }
    }
}

/// Evidence that the network between two addresses is cut, at least in one direction. Callers replace an address by
/// words that also have the name of its host.
pub fn no_acknowledgement(rank: Rank, from: &str, to: &str, retransmissions: u32) -> String {
    format!("{rank} on {from}{NO_ACKNOWLEDGEMENT}{to} after {retransmissions} retransmissions")
}

const NO_ACKNOWLEDGEMENT: &str = " gets no acknowledgement from ";

/// Whether a sentence is that of [`no_acknowledgement`].
pub fn is_no_acknowledgement(sentence: &str) -> bool {
    sentence.contains(NO_ACKNOWLEDGEMENT)
}

/// Ranks at the same position in the code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceGroup {
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// The position: the innermost Python frame of the main thread, or the kernel function that it waits in.
    pub place: String,
}

impl std::fmt::Display for PlaceGroup {
    /// "7 ranks (0-4, 6, 7) in all_reduce (distributed_c10d.py:2501)".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ranks.as_slice() {
            [rank] => write!(f, "{rank} in {}", self.place),
            ranks => {
                let numbers = listed(ranks);
                let numbers = numbers.strip_prefix("ranks ").unwrap_or(&numbers);
                write!(f, "{} ranks ({numbers}) in {}", ranks.len(), self.place)
            }
        }
    }
}

/// What one source reports about who waits for whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// The kind of hang according to the source; `None` if it only knows whom all wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<HangKind>,
    /// The ranks that the others wait for; empty if it is no rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub culprits: Vec<Rank>,
    /// The report in one sentence, with its source.
    #[serde(rename = "told")]
    pub reported: String,
}

/// "ranks 0-3, 7".
pub fn listed(ranks: &[Rank]) -> String {
    let mut sorted: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for rank in sorted {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => parts.push((rank, rank)),
        }
    }
    let shown = parts.iter().take(16).map(|(first, last)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    });
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if parts.len() > 16 {
        text.push_str(", …");
    }
    format!("{} {text}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_runs() {
        let ranks = |numbers: &[u32]| listed(&numbers.iter().map(|n| Rank(*n)).collect::<Vec<_>>());
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[7, 1, 0, 2, 3, 9]), "ranks 0-3, 7, 9");
    }
}
