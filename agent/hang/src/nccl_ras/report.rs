//! The report of NCCL's RAS service about a job, for all versions: text of 2.24 to 2.28, JSON of later ones.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Count, SourceCounters};
use mainstay_model::id::Rank;

/// One report. It covers one job: that of the process that answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RasReport {
    /// NCCL's version: `2.28.9`.
    pub version: String,
    /// The communicators. The text form lists only those with something to report.
    pub communicators: Vec<Communicator>,
    /// Communicators without problems, which are not listed one by one.
    pub in_order: u32,
    /// Processes that the others no longer wait for.
    pub dead: Processes,
    /// Processes that did not answer this time.
    pub missing: Processes,
    /// Answers that timed out while the report was made.
    pub timeouts: u32,
}

/// Processes. The text form may give only their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processes {
    /// The number of processes.
    pub count: u32,
    /// The processes that the report names.
    pub named: Vec<Process>,
}

/// A process of the job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// The address of its host.
    pub host: String,
    /// Its PID on that host.
    pub pid: i32,
}

/// A rank of a communicator. It is not the job's rank; its process identifies that.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommRank {
    /// Its number in the communicator.
    pub rank: u32,
    /// Its process, if reported.
    pub process: Option<Process>,
    /// The CUDA device number in that process.
    pub gpu: Option<u32>,
}

impl RasReport {
    /// The operations that each process has launched, by communicator, as the judge of hangs expects them.
    ///
    /// NCCL reports what was launched, not what was completed. But no collective completes before all ranks have
    /// launched it. So the count of the rank that is furthest behind counts as completed by all, and ranks that have
    /// launched more are waiting. Ranks that the text form reports only as the majority are left out.
    pub fn counts(&self) -> BTreeMap<Process, Vec<Count>> {
        let mut counts: BTreeMap<Process, Vec<Count>> = BTreeMap::new();
        for communicator in &self.communicators {
            let Ok(comm) = u64::from_str_radix(&communicator.hash, 16) else { continue };
            let mut launched: BTreeMap<&CommRank, u64> = BTreeMap::new();
            let mut least = 0_u64;
            for operation in &communicator.operations {
                least =
                    least.saturating_add(operation.groups.iter().map(|group| group.value).min().unwrap_or(0));
                for group in &operation.groups {
                    for rank in &group.named {
                        let sum = launched.entry(rank).or_default();
                        *sum = sum.saturating_add(group.value);
                    }
                }
            }
            for (rank, entered) in launched {
                let Some(process) = rank.process.clone() else { continue };
                let count = Count { comm, entered, completed: least.min(entered), signature: 0 };
                counts.entry(process).or_default().push(count);
            }
        }
        counts
    }
}

impl RasReport {
    /// The counts of ranks, by the PIDs of their processes on this host. Ranks that the service does not know, or
    /// that did not answer it, are silent.
    pub fn counted(&self, ranks: &BTreeMap<i32, Rank>) -> SourceCounters {
        let mut counted = SourceCounters::default();
        let all: BTreeSet<Rank> = ranks.values().copied().collect();
        counted.counts.extend(all.iter().map(|rank| (*rank, Vec::new())));
        let rank_of =
            |rank: &CommRank| rank.process.as_ref().and_then(|process| ranks.get(&process.pid)).copied();
        for communicator in &self.communicators {
            let Ok(comm) = u64::from_str_radix(&communicator.hash, 16) else { continue };
            counted.names.insert(comm, format!("communicator {}", communicator.hash));
            let missing = communicator.missing.iter().filter(|(_, why)| *why != Missing::NotMember);
            let missing: BTreeSet<Rank> = missing.filter_map(|(rank, _)| rank_of(rank)).collect();
            // The text form does not name the majority. It is the rest, if all ranks are members and all of them are
            // ours.
            let is_of_all = communicator.size.is_some_and(|size| size as usize == all.len());
            let mut launched: BTreeMap<Rank, u64> = BTreeMap::new();
            let mut least = 0_u64;
            for operation in &communicator.operations {
                least =
                    least.saturating_add(operation.groups.iter().map(|group| group.value).min().unwrap_or(0));
                let mut rest: BTreeSet<Rank> = if is_of_all { &all - &missing } else { BTreeSet::new() };
                for rank in operation.groups.iter().flat_map(|group| &group.named) {
                    rank_of(rank).map(|rank| rest.remove(&rank));
                }
                for group in &operation.groups {
                    let named: Vec<Rank> = group.named.iter().filter_map(rank_of).collect();
                    let of_group = if group.named.is_empty() {
                        std::mem::take(&mut rest)
                    } else {
                        named.into_iter().collect()
                    };
                    for rank in of_group {
                        let sum = launched.entry(rank).or_default();
                        *sum = sum.saturating_add(group.value);
                    }
                }
            }
            let none = missing.iter().map(|rank| (*rank, 0));
            for (rank, entered) in launched.into_iter().chain(none) {
                let count = Count { comm, entered, completed: least.min(entered), signature: 0 };
                counted.counts.entry(rank).or_default().push(count);
            }
            counted.silent.extend(missing);
        }
        let unknown = counted.counts.iter().filter(|(_, counts)| counts.is_empty()).map(|(rank, _)| *rank);
        let unknown: Vec<Rank> = unknown.collect();
        counted.silent.extend(unknown);
        counted
    }

    /// The whole report as lines, for the evidence file.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!("NCCL {}, {} communicators in order", self.version, self.in_order)];
        for (what, processes) in [("dead", &self.dead), ("not answering", &self.missing)] {
            if processes.count > 0 {
                let named: Vec<String> = processes
                    .named
                    .iter()
                    .map(|process| format!("{} on {}", process.pid, process.host))
                    .collect();
                lines.push(format!("{} processes {what}: {}", processes.count, named.join(", ")));
            }
        }
        for communicator in &self.communicators {
            let hash = &communicator.hash;
            for operation in &communicator.operations {
                for group in &operation.groups {
                    let named: Vec<String> = group.named.iter().map(CommRank::to_string).collect();
                    let (name, count, ranks) = (&operation.name, group.value, group.ranks);
                    lines.push(format!(
                        "{hash} {name}: {count} launched by {ranks} ranks: {}",
                        named.join(", ")
                    ));
                }
            }
            for group in &communicator.states {
                lines.push(format!("{hash}: {} ranks {:?}", group.ranks, group.value));
            }
            for (rank, why) in &communicator.missing {
                lines.push(format!("{hash}: no report of {rank}: {why:?}"));
            }
            for error in &communicator.errors {
                lines.push(format!("{hash}: {} ranks reported {}", error.ranks, error.value.what));
            }
        }
        lines
    }
}

/// A communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Communicator {
    /// Its name: 16 hex digits.
    pub hash: String,
    /// The number of its ranks. `None` if not reported.
    pub size: Option<u32>,
    /// Ranks without data, with the reason.
    pub missing: Vec<(CommRank, Missing)>,
    /// The number of such ranks; the text form may name fewer.
    pub missing_count: u32,
    /// How many operations of each kind the ranks have launched. The text form lists only kinds in which they differ.
    pub operations: Vec<Operation>,
    /// The states of its ranks, the most frequent first. The text form lists them only if they differ.
    pub states: Vec<Group<State>>,
    /// Errors that ranks reported.
    pub errors: Vec<Group<RankError>>,
}

/// Why there is no data of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// Its process did not answer this time.
    Unresponsive,
    /// The others no longer wait for its process.
    Dead,
    /// Its process answered and does not have this communicator, or no longer has it.
    NotMember,
}

/// A kind of operation, with the ranks grouped by how many they have launched. Launched is not completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// `AllReduce`; `collective` for NCCL 2.24, which does not name the kind.
    pub name: String,
    /// By count, the most frequent first.
    pub groups: Vec<Group<u64>>,
}

/// Ranks that have something in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group<T> {
    /// What they have in common.
    pub value: T,
    /// How many they are.
    pub ranks: u32,
    /// The ranks that the report names: JSON names all, the text form only the minority.
    pub named: Vec<CommRank>,
}

/// The state of a rank in its communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// It does not know this communicator, or no longer knows it.
    NoComm,
    /// It is being set up.
    Init,
    /// In use.
    Running,
    /// It is being finalized.
    Finalize,
    /// It was aborted.
    Abort,
}

impl State {
    /// As NCCL writes it.
    pub fn parse(text: &str) -> Option<State> {
        Some(match text {
            "NOCOMM" => State::NoComm,
            "INIT" => State::Init,
            "RUNNING" => State::Running,
            "FINALIZE" => State::Finalize,
            "ABORT" => State::Abort,
            _ => return None,
        })
    }
}

/// An error that a rank reported.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankError {
    /// NCCL's text: `Remote process error`.
    pub what: String,
    /// Whether it occurred while the communicator was in use, and not during setup.
    pub asynchronous: bool,
}

/// A rank that has launched fewer operations than others of its communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaggingRank {
    /// The rank. `None` if only the number of ranks is reported.
    pub rank: Option<CommRank>,
    /// How many ranks have the same count.
    pub ranks: u32,
    /// The kind of operation.
    pub operation: String,
    /// How many it has launched.
    pub own: u64,
    /// The count of the ranks that are furthest ahead.
    pub furthest: u64,
}

impl Communicator {
    /// The ranks that have launched fewer operations of a kind than the furthest: the ones the others may be waiting
    /// for. While a job runs, some ranks are always behind for a moment.
    pub fn behind(&self) -> Vec<LaggingRank> {
        let mut found = Vec::new();
        for operation in &self.operations {
            let Some(furthest) = operation.groups.iter().map(|group| group.value).max() else { continue };
            for group in operation.groups.iter().filter(|group| group.value < furthest) {
                let behind = |rank: Option<&CommRank>| LaggingRank {
                    rank: rank.cloned(),
                    ranks: group.ranks,
                    operation: operation.name.clone(),
                    own: group.value,
                    furthest,
                };
                if group.named.is_empty() {
                    found.push(behind(None));
                }
                found.extend(group.named.iter().map(|rank| behind(Some(rank))));
            }
        }
        found
    }

    /// Whether its ranks differ: in counts, in states, or because some are not reported.
    pub fn mismatch(&self) -> bool {
        self.operations.iter().any(|operation| operation.groups.len() > 1)
            || self.states.len() > 1
            || self.missing_count > 0
    }
}

impl std::fmt::Display for CommRank {
    /// "rank 3 (process 4711 on 10.0.0.2)".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.rank)?;
        match &self.process {
            Some(process) => write!(f, " (process {} on {})", process.pid, process.host),
            None => Ok(()),
        }
    }
}

/// Groups ranks that have something in common, the largest group first.
pub(super) fn grouped<T: Ord>(ranks: impl IntoIterator<Item = (T, CommRank)>) -> Vec<Group<T>> {
    let mut groups: BTreeMap<T, Vec<CommRank>> = BTreeMap::new();
    for (value, rank) in ranks {
        groups.entry(value).or_default().push(rank);
    }
    let count = |named: &Vec<CommRank>| u32::try_from(named.len()).unwrap_or(u32::MAX);
    let mut groups: Vec<Group<T>> =
        groups.into_iter().map(|(value, named)| Group { value, ranks: count(&named), named }).collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.ranks));
    groups
}
