//! The JSON that NCCL's RAS service writes since 2.28.7. The caller parses it into [`Wire`]. Absent fields count as
//! not reported.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::report::{
    CommRank, Communicator, Missing, Operation, Process, Processes, RankError, RasReport, State, grouped,
};

/// The document as NCCL writes it.
#[derive(Debug, Deserialize)]
pub struct Wire {
    nccl_version: String,
    communicators: Vec<WireCommunicator>,
    #[serde(default)]
    ras: WireRas,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireRas {
    timeouts_count: u32,
}

#[derive(Debug, Deserialize)]
struct WireCommunicator {
    hash: String,
    size: u32,
    #[serde(default)]
    ranks: Vec<WireRank>,
    #[serde(default)]
    missing_ranks: Vec<WireMissing>,
}

#[derive(Debug, Deserialize)]
struct WireRank {
    rank: u32,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: i32,
    #[serde(default)]
    cuda_dev: i64,
    #[serde(default)]
    status: WireStatus,
    #[serde(default)]
    collective_counts: BTreeMap<String, u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireStatus {
    init_state: i32,
    async_error: i32,
    finalize_called: bool,
    destroy_flag: bool,
    abort_flag: bool,
}

#[derive(Debug, Deserialize)]
struct WireMissing {
    rank: u32,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: i32,
    #[serde(default)]
    cuda_dev: i64,
    #[serde(default)]
    status: WireMissingStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireMissingStatus {
    unresponsive: bool,
    considered_dead: bool,
}

impl From<Wire> for RasReport {
    fn from(wire: Wire) -> RasReport {
        let mut dead = Vec::new();
        let mut missing = Vec::new();
        for rank in wire.communicators.iter().flat_map(|communicator| &communicator.missing_ranks) {
            let Some(process) = process(&rank.host, rank.pid) else { continue };
            if rank.status.considered_dead {
                dead.push(process);
            } else if rank.status.unresponsive {
                missing.push(process);
            }
        }
        RasReport {
            version: wire.nccl_version,
            communicators: wire.communicators.into_iter().map(communicator).collect(),
            in_order: 0,
            dead: processes(dead),
            missing: processes(missing),
            timeouts: wire.ras.timeouts_count,
        }
    }
}

fn processes(mut named: Vec<Process>) -> Processes {
    named.sort();
    named.dedup();
    Processes { count: u32::try_from(named.len()).unwrap_or(u32::MAX), named }
}

fn communicator(wire: WireCommunicator) -> Communicator {
    let digits = wire.hash.trim_start_matches("0x");
    let mut counts: BTreeMap<&str, Vec<(u64, CommRank)>> = BTreeMap::new();
    for rank in &wire.ranks {
        for (name, count) in &rank.collective_counts {
            counts.entry(name).or_default().push((*count, comm_rank(rank)));
        }
    }
    let operations = counts
        .into_iter()
        // Operations that no rank has used are left out.
        .filter(|(_, counts)| counts.iter().any(|(count, _)| *count > 0))
        .map(|(name, counts)| Operation { name: name.to_owned(), groups: grouped(counts) })
        .collect();
    let mut errors = Vec::new();
    for rank in &wire.ranks {
        let found = [(rank.status.init_state, false), (rank.status.async_error, true)];
        for (code, asynchronous) in found {
            if let Some(what) = error_name(code) {
                errors.push((RankError { what: what.to_owned(), asynchronous }, comm_rank(rank)));
            }
        }
    }
    let missing: Vec<(CommRank, Missing)> = wire.missing_ranks.iter().map(missing_rank).collect();
    let left = missing.iter().filter(|(_, why)| *why == Missing::NotMember);
    let left = left.map(|(rank, _)| (State::NoComm, rank.clone()));
    Communicator {
        hash: format!("{digits:0>16}"),
        size: Some(wire.size),
        operations,
        states: grouped(wire.ranks.iter().map(|rank| (state(&rank.status), comm_rank(rank))).chain(left)),
        errors: grouped(errors),
        missing_count: u32::try_from(missing.len()).unwrap_or(u32::MAX),
        missing,
    }
}

fn missing_rank(rank: &WireMissing) -> (CommRank, Missing) {
    let why = match &rank.status {
        status if status.considered_dead => Missing::Dead,
        status if status.unresponsive => Missing::Unresponsive,
        _ => Missing::NotMember,
    };
    let process = process(&rank.host, rank.pid);
    (CommRank { rank: rank.rank, process, gpu: u32::try_from(rank.cuda_dev).ok() }, why)
}

fn comm_rank(rank: &WireRank) -> CommRank {
    let process = process(&rank.host, rank.pid);
    CommRank { rank: rank.rank, process, gpu: u32::try_from(rank.cuda_dev).ok() }
}

/// NCCL writes "unknown" and -1 if it does not know the process.
fn process(host: &str, pid: i32) -> Option<Process> {
    (pid > 0).then(|| Process { host: host.to_owned(), pid })
}

/// Checks the flags in NCCL's own order of precedence.
fn state(status: &WireStatus) -> State {
    match status {
        status if status.abort_flag => State::Abort,
        status if status.finalize_called || status.destroy_flag => State::Finalize,
        status if status.init_state == 0 => State::Running,
        _ => State::Init,
    }
}

/// `ncclResult_t` as the text form names it. `None` for success and for operations in progress.
fn error_name(code: i32) -> Option<&'static str> {
    Some(match code {
        0 | 7 => return None,
        1 => "Unhandled CUDA error",
        2 => "System error",
        3 => "Internal error",
        4 => "Invalid argument",
        5 => "Invalid usage",
        6 => "Remote process error",
        _ => "Unexpected error",
    })
}
