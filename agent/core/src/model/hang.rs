//! What is said of a hang: its kind, the ranks that began it, the ranks that wait, and where they stand.

use serde::{Deserialize, Serialize};

use crate::base::id::Rank;
use crate::base::time::{Mono, Span};

/// Of what kind a hang is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HangKind {
    /// A rank's process was stopped by a signal.
    Stopped,
    /// A rank's client never connected while the others wait for it.
    NeverRegistered,
    /// A rank is done while the others wait for it.
    FinishedEarly,
    /// A rank waits for data.
    DataInput,
    /// A rank waits for a device or a file system.
    BlockedIo,
    /// A rank does not come out of its own code, into which no collective reaches.
    UserCode,
    /// Ranks entered collectives that do not fit together.
    Mismatch,
    /// All ranks entered a collective and none left it.
    Network,
    /// A rank of which nothing is heard any more, with its host.
    SilentHost,
    /// Beats and no step.
    Livelock,
    /// Nothing moves, and nothing tells the ranks apart.
    AllStill,
}

impl HangKind {
    /// In plain words, after a rank's name.
    pub fn of_a_rank(self) -> &'static str {
        match self {
            HangKind::Stopped => "is stopped by a signal",
            HangKind::NeverRegistered => "has never registered",
            HangKind::FinishedEarly => "has finished while the others wait for it",
            HangKind::DataInput => "waits for data",
            HangKind::BlockedIo => "waits for a device or a file system",
            HangKind::UserCode => "does not come out of its own code",
            HangKind::Mismatch => "entered a collective that does not fit those of the others",
            HangKind::Network => "waits in a collective that all have entered",
            HangKind::SilentHost => "is not heard of any more",
            HangKind::Livelock => "beats and completes no step",
            HangKind::AllStill => "stands still",
        }
    }
}

/// What stands for the phase of ranks that send no heartbeats: they are judged by what their processes do.
pub const ACTIVITY: &str = "activity";

/// A hang that is confirmed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hang {
    /// Of what kind.
    pub kind: HangKind,
    /// Where it began; empty if nothing tells the ranks apart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub culprits: Vec<Rank>,
    /// Ranks that wait for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<Rank>,
    /// When anything in the job last moved.
    pub since: Mono,
    /// When it was confirmed.
    pub confirmed: Mono,
    /// What the culprits are at: `first_step`, `step`, or a section; [`ACTIVITY`] where there are no heartbeats.
    pub phase: String,
    /// How long that may take.
    pub limit: Span,
    /// The last step that the culprits completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// How sure of the culprits, from 0 to 1.
    pub confidence: f64,
    /// What it rests on, one sentence each.
    pub evidence: Vec<String>,
}

impl Hang {
    /// One line for the person on call.
    pub fn headline(&self) -> String {
        let after = match self.step {
            Some(step) => format!(" after step {step}"),
            // Without heartbeats nobody knows how far it was.
            None if self.phase == ACTIVITY => String::new(),
            None => " before the first step".to_owned(),
        };
        let at = match self.phase.as_str() {
            "step" | "first_step" | ACTIVITY => String::new(),
            section => format!(", in section {section}"),
        };
        match self.culprits.as_slice() {
            [] if self.kind == HangKind::Network => {
                format!("all ranks hang in a collective{after}: all have entered it and none has left")
            }
            [] => format!("all ranks hang{after}{at}: nothing moves, and nothing tells them apart"),
            [rank] => format!("{rank} hangs{after}{at}: it {}", self.kind.of_a_rank()),
            ranks => format!("{} hang{after}{at}: each {}", listed(ranks), self.kind.of_a_rank()),
        }
    }
}

/// Ranks that stand in the same place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceGroup {
    /// Which.
    pub ranks: Vec<Rank>,
    /// Where: the innermost Python frame of the main thread, or what the kernel has it wait in.
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

/// What a witness says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Of what kind it takes the hang to be; none if it knows only whom all wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<HangKind>,
    /// Whom the others wait for; empty if it is no rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub culprits: Vec<Rank>,
    /// In one sentence, with who says so.
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
