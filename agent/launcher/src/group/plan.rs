//! The command line's settings for a job on several hosts.

use std::path::PathBuf;
use std::time::Duration;

use mainstay_coord::{Credentials, Endpoint, TlsFiles};
use mainstay_group::resize::Limits;
use mainstay_model::time::Span;

use crate::group::meeting::Meeting;

/// Where the hosts of a job meet.
#[derive(Clone, Debug)]
pub struct HostsPlan {
    /// Hosts at least and at most.
    pub hosts: (u32, u32),
    /// Where the coordination store answers.
    pub endpoints: Vec<Endpoint>,
    /// Who runs it.
    pub store: StoreKind,
    /// Where the hosts agree on the two above, if no option and no variable names them.
    pub meeting: Option<Meeting>,
    /// `--node-rank`, where hosts are numbered.
    pub node_rank: Option<u32>,
    /// The address of this host for others, if the user gave one.
    pub local_addr: Option<String>,
    /// Whether no later job has this run id: a launcher that comes after the job has ended well has nothing to do.
    pub runs_once: bool,
    /// Whether this launcher takes the place of one that the job went on without: it has nothing to do after the job's
    /// end, and does not wait for a job that it cannot reach.
    pub returning: bool,
    /// The secret of the job, if the user gave one.
    pub token: Option<String>,
    /// Where the hosts share a secret that they make themselves, if the user gave none.
    pub token_file: Option<PathBuf>,
    /// Whether hosts with another program or another number of ranks are admitted.
    pub mixed: bool,
    /// Whether traffic between the hosts is encrypted.
    pub encrypt: bool,
    /// The failure domain of this host, if the user gave one.
    pub domain: Option<String>,
    /// Whether the endpoint is this host, if the user set it.
    pub is_host: Option<bool>,
    /// How long hosts wait for each other.
    pub join_timeout: Span,
    /// How long to wait for more hosts once there are enough.
    pub last_call: Span,
    /// How long to wait for a lost host before the job goes on with fewer.
    pub shrink_after: Span,
    /// Minimum time that ranks run before they are stopped for hosts that joined.
    pub grow_after: Span,
    /// The number of ranks is a multiple of this.
    pub world_multiple: u32,
    /// Whether the hosts measure their links before ranks start.
    pub preflight: Option<Preflight>,
    /// A launcher that has not renewed its entry in the store for this time is lost. One that has had no leader for this
    /// time is cut off.
    pub lease: Duration,
}

/// What to do about slow links that are found before ranks start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preflight {
    /// They are reported, and a slow host becomes a spare if there are enough others.
    Report,
    /// The job does not start with them.
    Require,
}

/// Who runs the coordination store.
#[derive(Clone, Debug)]
pub enum StoreKind {
    /// The launcher on the host with the endpoint; it does not survive that host.
    Builtin,
    /// The launchers on the three or five hosts with the endpoints: etcd between them.
    Managed,
    /// Someone else: an existing etcd cluster.
    Etcd {
        /// The credentials of this client.
        user: Option<Credentials>,
        /// Certificates for `https` endpoints.
        tls: Option<TlsFiles>,
    },
}

/// The variable with the secret of a job on several hosts. Ranks do not get it.
pub const TOKEN_VARIABLE: &str = "MAINSTAY_RDZV_TOKEN";

impl HostsPlan {
    /// Port that torchrun uses by default.
    pub const PORT: u16 = 29_400;

    /// How long hosts wait for each other, or for the store.
    pub fn waits(&self) -> Span {
        if self.returning { self.join_timeout.min(HostsPlan::RETURN_WITHIN) } else { self.join_timeout }
    }

    /// Port of etcd for clients.
    pub const ETCD_PORT: u16 = 2379;

    /// How long a launcher that returns looks for its job.
    pub const RETURN_WITHIN: Span = Span::seconds(30);

    /// The default lease.
    pub const LEASE: Duration = Duration::from_secs(10);

    /// The endpoints, for people.
    pub fn endpoint(&self) -> String {
        let all: Vec<String> = self.endpoints.iter().map(Endpoint::authority).collect();
        all.join(", ")
    }

    /// The failure domain of this host; empty if unknown.
    pub fn fails_together(&self) -> String {
        self.domain.clone().or_else(switch).unwrap_or_default()
    }

    /// The limits for the number of hosts.
    pub fn limits(&self) -> Limits {
        Limits {
            hosts: self.hosts,
            multiple: self.world_multiple,
            shrink_after: self.shrink_after,
            grow_after: self.grow_after,
        }
    }

    /// Copies of each shard on other hosts: the job may lose as many hosts at once as the store that runs on them.
    pub fn copies(&self) -> usize {
        let others = self.hosts.0.saturating_sub(1);
        match self.store {
            StoreKind::Managed if self.endpoints.len() >= 5 && others >= 2 => 2,
            StoreKind::Builtin | StoreKind::Managed | StoreKind::Etcd { .. } => 1,
        }
    }

    /// The lease as a span.
    pub fn lease(&self) -> Span {
        span(self.lease)
    }
}

/// Converts a duration of the standard library to the core's type.
pub(crate) fn span(duration: Duration) -> Span {
    Span(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// The switch of this host, from Slurm's topology.
fn switch() -> Option<String> {
    let (address, pattern) =
        (std::env::var("SLURM_TOPOLOGY_ADDR").ok()?, std::env::var("SLURM_TOPOLOGY_ADDR_PATTERN").ok()?);
    // "spine.leaf.host" and "switch.switch.node": the last switch is the nearest.
    let names: Vec<&str> = address
        .split('.')
        .zip(pattern.split('.'))
        .filter(|(_, of)| *of == "switch")
        .map(|(name, _)| name)
        .collect();
    names.last().filter(|name| !name.is_empty()).map(|name| (*name).to_owned())
}

/// A task that ends with its handle.
#[derive(Debug)]
pub struct Aborting<T = ()>(pub tokio::task::JoinHandle<T>);

impl<T> Drop for Aborting<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
