//! The contents of PyTorch's flight recorder of one rank: its newest collectives by process group.
//!
//! A dump is a pickle of dicts and lists, or the same as JSON (`json`). Only the progress of the rank in each group
//! is kept. An operation counts as complete when the recorder has retired it or marks it complete. `dumps` compares
//! the records of all ranks.

mod dumps;
mod json;

pub use dumps::{BlockedCollective, held_up};

use std::collections::{BTreeMap, BTreeSet};

use crate::collective_counters::SourceCounters;
use crate::counters::Count;
use mainstay_model::id::Rank;
use mainstay_wire::pickle::{Node, Pickle, PickleError};

/// A dump of the 2000 operations that the recorder keeps by default has about two megabytes with stacks.
pub const DUMP_BYTES: usize = 64 << 20;

/// Why a dump cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlightError {
    /// Longer than any dump that PyTorch writes.
    #[error("a dump of {0} bytes is refused: at most {DUMP_BYTES} are read")]
    TooLong(usize),
    /// It is not a pickle, or contains something other than dicts and lists.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// It is not JSON, or too large.
    #[error("it is not JSON that can be read: {0}")]
    Json(String),
    /// It contains no list of operations.
    #[error("it holds no list of operations")]
    NoEntries,
}

/// The progress of a rank in its process groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlightRecord {
    /// By the group's name, which is the same on all its ranks.
    pub groups: BTreeMap<String, GroupProgress>,
    /// When the newest operation was entered, in nanoseconds since 1970; 0 if the recorder did not store it.
    pub newest: u64,
}

/// The progress of a rank in one process group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupProgress {
    /// The number of the newest collective that the rank entered.
    pub entered: u64,
    /// The number of the last collective up to which all are complete.
    pub completed: u64,
    /// The newest operation: `all_reduce of [[8]] Float`.
    pub operation: String,
    /// A hash of what must be equal on all ranks for the newest operation; 0 if unknown.
    pub signature: u64,
    /// Whether it is the group of all ranks.
    pub is_world: bool,
    /// Its ranks, if the recorder knows them.
    pub ranks: Vec<u32>,
    /// The oldest operations that the rank entered and that are not complete, by number.
    pub open: BTreeMap<u64, String>,
}

/// The most open operations that are kept for a group. A rank waits in the oldest; NCCL operations are launched ahead
/// of it.
const MOST_OPEN: usize = 256;

/// How many bytes of a file [`looks_like_one`] reads.
pub const BEGINNING: usize = 4096;

/// Whether a file that starts with these bytes may be a flight record, by content and not by name: any pickle, or a
/// JSON object with the recorder's own keys.
#[must_use]
pub fn looks_like_one(begin: &[u8]) -> bool {
    if let [0x80, 2..=5, ..] = begin {
        return true;
    }
    let begin = begin.get(..BEGINNING).unwrap_or(begin);
    let text = String::from_utf8_lossy(begin);
    let keys = ["\"pg_config\"", "\"pg_status\"", "\"collective_seq_id\"", "\"nccl_comm_state\""];
    text.trim_start_matches('\u{feff}').trim_start().starts_with('{')
        && text.contains("\"entries\"")
        && keys.iter().any(|key| text.contains(key))
}

impl FlightRecord {
    /// Reads a dump in either form.
    ///
    /// # Errors
    /// [`FlightError`]: the bytes are not a dump.
    pub fn read(bytes: &[u8]) -> Result<FlightRecord, FlightError> {
        if bytes.len() > DUMP_BYTES {
            return Err(FlightError::TooLong(bytes.len()));
        }
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        let pickle = match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
            Some(b'{') => json::read(bytes).map_err(|error| FlightError::Json(error.to_string()))?,
            _ => Pickle::read(bytes)?,
        };
        let root = pickle.root();
        let Some(Node::Sequence(entries)) = pickle.item(root, "entries") else {
            return Err(FlightError::NoEntries);
        };
        let mut record = FlightRecord::default();
        let mut oldest_open: BTreeMap<String, u64> = BTreeMap::new();
        for entry in entries.iter().map(|entry| Entry { pickle: &pickle, node: pickle.node(*entry) }) {
            // Sends and receives have a separate numbering, which only two ranks share.
            if entry.flag("is_p2p") {
                continue;
            }
            let (Some((name, description)), Some(number)) =
                (entry.group(), entry.number("collective_seq_id"))
            else {
                continue;
            };
            record.newest = record.newest.max(entry.number("time_created_ns").unwrap_or(0));
            let is_open = !entry.flag("retired") && entry.text("state") != Some("completed");
            if is_open {
                let oldest = oldest_open.entry(name.clone()).or_insert(number);
                *oldest = number.min(*oldest);
            }
            let standing = record.groups.entry(name).or_default();
            if is_open {
                standing.open.insert(number, entry.operation().0);
                if standing.open.len() > MOST_OPEN {
                    standing.open.pop_last();
                }
            }
            standing.is_world |= description == "default_pg";
            if number >= standing.entered {
                standing.entered = number;
                (standing.operation, standing.signature) = entry.operation();
            }
        }
        for (name, standing) in &mut record.groups {
            let open = oldest_open.get(name).map(|oldest| oldest.saturating_sub(1));
            standing.completed = open.unwrap_or(standing.entered);
            standing.ranks = ranks_of(&pickle, name);
        }
        Ok(record)
    }
}

/// The counters of all ranks by their recorders. Ranks without a record have no counters. A member of a group that
/// its own recorder does not list has entered nothing there.
pub fn counted(all: &[Rank], records: &BTreeMap<Rank, FlightRecord>) -> SourceCounters {
    let mut groups: BTreeMap<&str, (u64, BTreeSet<Rank>)> = BTreeMap::new();
    for record in records.values() {
        for (name, standing) in &record.groups {
            let next = groups.len() as u64 + 1;
            let (_, members) = groups.entry(name).or_insert((next, BTreeSet::new()));
            if standing.is_world {
                members.extend(all);
            }
            members.extend(standing.ranks.iter().map(|rank| Rank(*rank)));
        }
    }
    let counts_of = |rank: &Rank| {
        let progress_of = |(name, (comm, members)): (&&str, &(u64, BTreeSet<Rank>))| {
            let standing = records.get(rank).and_then(|record| record.groups.get(*name));
            match standing {
                Some(standing) => Some(Count {
                    comm: *comm,
                    entered: standing.entered,
                    completed: standing.completed.min(standing.entered),
                    signature: standing.signature,
                }),
                None => members.contains(rank).then_some(Count { comm: *comm, ..Count::default() }),
            }
        };
        (*rank, groups.iter().filter_map(progress_of).collect())
    };
    SourceCounters {
        counts: all.iter().map(counts_of).collect(),
        silent: all.iter().copied().filter(|rank| !records.contains_key(rank)).collect(),
        names: groups.iter().map(|(name, (comm, _))| (*comm, format!("process group {name}"))).collect(),
    }
}

struct Entry<'a> {
    pickle: &'a Pickle,
    node: &'a Node,
}

impl<'a> Entry<'a> {
    fn text(&self, name: &str) -> Option<&'a str> {
        match self.pickle.item(self.node, name) {
            Some(Node::Text(text)) => Some(text),
            _ => None,
        }
    }

    fn flag(&self, name: &str) -> bool {
        matches!(self.pickle.item(self.node, name), Some(Node::Bool(true)))
    }

    fn number(&self, name: &str) -> Option<u64> {
        match self.pickle.item(self.node, name) {
            Some(Node::Int(number)) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// Name and description of its process group.
    fn group(&self) -> Option<(String, &'a str)> {
        let Some(Node::Sequence(parts)) = self.pickle.item(self.node, "process_group") else { return None };
        let mut texts = parts.iter().map(|part| match self.pickle.node(*part) {
            Node::Text(text) => Some(text.as_str()),
            _ => None,
        });
        let name = texts.next()??;
        Some((name.to_owned(), texts.next().flatten().unwrap_or("")))
    }

    /// The operation as text, and a hash of what must be equal on all ranks.
    fn operation(&self) -> (String, u64) {
        let whole = self.text("profiling_name").unwrap_or("");
        let kind = whole.rsplit(':').next().unwrap_or(whole);
        let sizes =
            self.pickle.item(self.node, "input_sizes").map_or(String::new(), |node| self.written(node));
        let types =
            self.pickle.item(self.node, "input_dtypes").map_or(String::new(), |node| self.written(node));
        let words = format!("{kind} of {sizes} {types}");
        // For these operations all ranks pass inputs of one size. For others (scatter, all_to_all) sizes may differ.
        let even = [
            "all_reduce",
            "allreduce",
            "broadcast",
            "reduce",
            "reduce_scatter",
            "_reduce_scatter_base",
            "_all_gather_base",
            "all_gather_into_tensor",
            "all_gather_into_tensor_coalesced",
            "reduce_scatter_tensor_coalesced",
        ];
        let same = if even.contains(&kind) { words.as_str() } else { kind };
        (words.clone(), if kind.is_empty() { 0 } else { hash(same).max(1) })
    }

    /// A shortened list of numbers, texts and lists.
    fn written(&self, node: &Node) -> String {
        match node {
            Node::Int(number) => number.to_string(),
            Node::Text(text) => text.chars().take(40).collect(),
            Node::Sequence(parts) => {
                let shown = parts.iter().take(8).map(|part| match self.pickle.node(*part) {
                    // Dumps have at most two levels. This also ends a list that contains itself.
                    Node::Sequence(inner) => {
                        let numbers = inner.iter().take(8).map(|part| match self.pickle.node(*part) {
                            Node::Int(number) => number.to_string(),
                            _ => "?".to_owned(),
                        });
                        format!("[{}]", numbers.collect::<Vec<_>>().join(", "))
                    }
                    Node::Int(number) => number.to_string(),
                    Node::Text(text) => text.chars().take(40).collect(),
                    _ => "?".to_owned(),
                });
                shown.collect::<Vec<_>>().join(", ")
            }
            _ => String::new(),
        }
    }
}

/// The ranks of a group, which the recorder stores as text: `[0, 1, 2]`.
fn ranks_of(pickle: &Pickle, name: &str) -> Vec<u32> {
    let configured = pickle.item(pickle.root(), "pg_config").and_then(|groups| pickle.item(groups, name));
    match configured.and_then(|group| pickle.item(group, "ranks")) {
        Some(Node::Text(text)) => {
            text.trim_matches(['[', ']']).split(',').filter_map(|rank| rank.trim().parse().ok()).collect()
        }
        Some(Node::Sequence(ranks)) => {
            let number = |id: &usize| match pickle.node(*id) {
                Node::Int(rank) => u32::try_from(*rank).ok(),
                _ => None,
            };
            ranks.iter().filter_map(number).collect()
        }
        _ => Vec::new(),
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
