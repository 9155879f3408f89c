//! The number of hosts of a job, the number of this host and the endpoint, from the variables that Slurm, MPI and
//! Kubernetes set for each process. Options take precedence over variables. A single host needs none of them.

mod kubernetes;
mod mpi;
mod slurm;

use std::collections::BTreeMap;

pub use kubernetes::full_name;
pub use slurm::{JOB_OF_SLURM, may_end_with_a_host};

/// The environment of the launcher.
pub type Variables = BTreeMap<String, String>;

/// What options or torchrun's `PET_` variables already specify.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExplicitOptions {
    /// `--nnodes`.
    pub hosts: Option<(u32, u32)>,
    /// `--node-rank`.
    pub node_rank: Option<u32>,
    /// `--rdzv-endpoint` or `--master-addr`.
    pub has_address: bool,
    /// Whether hosts are numbered, if `--rdzv-backend` or an address specifies it.
    pub is_numbered: Option<bool>,
    /// `--nproc-per-node`, if it is a number.
    pub ranks: Option<u32>,
    /// Whether this host has the program `etcd`.
    pub has_etcd: bool,
}

/// A value and the variables it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sourced<T> {
    /// The value.
    pub value: T,
    /// Its source, as text for users.
    pub from: String,
}

impl<T> Sourced<T> {
    fn new(value: T, from: impl Into<String>) -> Sourced<T> {
        Sourced { value, from: from.into() }
    }
}

/// What variables add to the options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Number of hosts.
    pub hosts: Option<Sourced<u32>>,
    /// The number of this host, if hosts are numbered.
    pub node_rank: Option<Sourced<u32>>,
    /// The address and port at which all hosts meet.
    pub endpoint: Option<Sourced<(String, Option<u16>)>>,
    /// Further hosts that run etcd for the job, at the same port, so that it survives the loss of the endpoint.
    pub more_endpoints: Vec<String>,
    /// Whether this host is the endpoint, if the address was found.
    pub is_endpoint: Option<bool>,
    /// The name of the job.
    pub run_id: Option<Sourced<String>>,
    /// Whether no later job has this name: a host that comes after the end of the job is late.
    pub runs_once: bool,
    /// Where this host would run the store, if the hosts have yet to agree on which of them does.
    pub meets: Option<(String, u16)>,
    /// A hint about what the user may have intended.
    pub hint: Option<String>,
}

/// An environment that contradicts the options or itself, or lacks something. The message names the variable and what
/// would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(String);

/// What one kind of cluster specifies for a process.
struct Source {
    hosts: Option<Sourced<u32>>,
    node_rank: Sourced<u32>,
    /// The address, or what to do to provide one.
    address: Result<Sourced<String>, String>,
    port: Option<u16>,
    run_id: Option<Sourced<String>>,
    /// Why the processes of the cluster are not one per host.
    crowded: Option<String>,
    /// Whether the number of hosts is surely that: elsewhere it may be a number of ranks.
    counts_hosts: bool,
    /// The hosts after the address that can run etcd for the job, and the port for it.
    store: Option<([String; 2], u16)>,
}

/// What the variables add to the options. Ranks of another launcher inherit its variables; `TORCHELASTIC_RUN_ID`
/// marks them.
///
/// # Errors
/// The variables specify several hosts, but contradict each other or lack something.
pub fn start(
    variables: &Variables,
    full_name: Option<&str>,
    given: &ExplicitOptions,
) -> Result<Start, Refused> {
    let is_alone = given.hosts.is_some_and(|(_, most)| most == 1);
    let is_complete = given.hosts.is_some()
        && given.has_address
        && (given.node_rank.is_some() || given.is_numbered == Some(false));
    if is_alone || text(variables, "TORCHELASTIC_RUN_ID").is_some() {
        return Ok(Start::default());
    }
    let alone = Start {
        run_id: given.hosts.and_then(|_| slurm::array(variables)),
        runs_once: given.hosts.is_some() && slurm::array(variables).is_some(),
        meets: (given.hosts.is_some() && !given.has_address)
            .then(|| slurm::place_in_array(variables))
            .flatten(),
        ..Start::default()
    };
    if is_complete {
        return Ok(alone);
    }
    // The first source that knows this process decides: daemons of MPI may be tasks of Slurm.
    let mut found = None;
    for look in [mpi::open_mpi, mpi::pmi, slurm::step] {
        found = if found.is_none() { look(variables)? } else { found };
    }
    if found.is_none() {
        found = kubernetes::indexed(variables, full_name, given)?;
    }
    if found.is_none() {
        found = kubernetes::workers(variables, given)?;
    }
    let Some(source) = found else {
        let hint = given.hosts.is_none().then(|| slurm::not_a_step(variables)).flatten();
        return Ok(Start { hint, ..alone });
    };
    merge(source, given, alone)
}

fn merge(source: Source, given: &ExplicitOptions, alone: Start) -> Result<Start, Refused> {
    let found = source.hosts.as_ref().map(|hosts| hosts.value);
    let Some((least, most)) = given.hosts.or(found.map(|hosts| (hosts, hosts))) else {
        return Ok(Start::default());
    };
    // A process that is alone in its cluster follows its options.
    if most <= 1 || found.is_some_and(|hosts| hosts <= 1) {
        return Ok(alone);
    }
    if let (None, Some(why)) = (given.node_rank, source.crowded) {
        return Err(Refused(why));
    }
    let named = source.hosts.as_ref().map(|hosts| format!("{}={}", hosts.from, hosts.value));
    // Hosts beyond the most wait as spares, which have no number.
    let has_spares = source.counts_hosts && found.is_some_and(|hosts| hosts > most);
    let is_numbered = given.is_numbered.unwrap_or(least == most && !has_spares);
    let is_exact = least == most && (is_numbered || !has_spares);
    let fits = |hosts: u32| if is_exact { hosts == most } else { hosts >= least };
    if let (None, Some(named)) = (given.node_rank, &named)
        && !found.is_none_or(fits)
    {
        return Err(Refused(format!(
            "--nnodes {}: the cluster has started this job on another number of hosts ({named}); leave --nnodes out, or \
             give --node-rank and --master-addr as well",
            if least == most { most.to_string() } else { format!("{least}:{most}") }
        )));
    }
    let number = source.node_rank;
    if is_numbered && given.node_rank.is_none() && number.value >= most {
        return Err(Refused(format!(
            "{}={}: the job has {most} hosts, and they are numbered from 0",
            number.from, number.value
        )));
    }
    let mut start = Start::default();
    if !given.has_address {
        let address = source.address.map_err(Refused)?;
        // Hosts that differ in whether they have etcd meet at different places. Only one of these then has enough hosts to
        // start the job.
        let is_most = found.is_some_and(|hosts| least > hosts / 2);
        let store = source.store.filter(|_| given.has_etcd && is_most && given.is_numbered != Some(true));
        let port = store.as_ref().map(|(_, port)| *port).or(source.port);
        start.endpoint = Some(Sourced::new((address.value, port), address.from));
        start.is_endpoint = store.is_none().then(|| given.node_rank.unwrap_or(number.value) == 0);
        start.more_endpoints = store.map(|(hosts, _)| hosts.to_vec()).unwrap_or_default();
    }
    start.hosts = source.hosts.filter(|_| given.hosts.is_none());
    if start.hosts.is_some() || start.endpoint.is_some() {
        start.run_id = source.run_id;
    }
    start.node_rank = (is_numbered && given.node_rank.is_none()).then_some(number);
    Ok(start)
}

/// The value of a variable, if it is not empty.
fn text<'v>(variables: &'v Variables, name: &str) -> Option<&'v str> {
    variables.get(name).map(|text| text.trim()).filter(|text| !text.is_empty())
}

/// A variable that must be a number if it is set.
fn number<T: std::str::FromStr>(variables: &Variables, name: &str) -> Result<Option<T>, Refused> {
    let Some(text) = text(variables, name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| Refused(format!("{name}={text}: this is not a number from 0 up")))
}

/// `MASTER_ADDR`, set by users or operators.
fn master_address(variables: &Variables) -> Option<Sourced<String>> {
    text(variables, "MASTER_ADDR").map(|address| Sourced::new(address.to_owned(), "MASTER_ADDR"))
}

/// The first of these variables that is set.
fn first_number(variables: &Variables, names: &[&str]) -> Result<Option<Sourced<u32>>, Refused> {
    for name in names {
        if let Some(value) = number(variables, name)? {
            return Ok(Some(Sourced::new(value, *name)));
        }
    }
    Ok(None)
}

/// A port that jobs on the same hosts rarely share, below the range of outgoing connections.
fn port_of(job: u64) -> u16 {
    15_000 + u16::try_from(job % 10_000).unwrap_or_default()
}

/// The same for etcd, which also uses the next port.
fn port_of_etcd(job: u64) -> u16 {
    15_000 + 2 * u16::try_from(job % 5_000).unwrap_or_default()
}

#[cfg(test)]
mod tests;
