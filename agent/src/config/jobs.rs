//! Keys of what is kept and done for jobs: the journal, policies, hooks, checkpoints.

use std::net::SocketAddr;
use std::path::PathBuf;

use mainstay_core::base::units::{Bytes, Period};
use mainstay_core::settings;

use super::files::{CacheConfig, WatchConfig};
use super::none_is_empty;

settings! {
    /// How much of the journal is kept.
    pub struct JournalConfig {
        /// All segments together; the oldest are deleted beyond it.
        max_size: Bytes = Bytes(64 << 20),
        /// A segment that would grow beyond this is followed by a new one. At most half of max_size.
        segment_size: Bytes = Bytes(4 << 20),
    }
    sections {}
}

settings! {
    /// What is done about failures of jobs.
    pub struct PolicyConfig {
        /// A policy in Starlark for jobs of this host that name none (`mainstay run --policy`). Empty: the built-in policy.
        file: PathBuf = PathBuf::new(),
    }
    sections {}
}

settings! {
    /// Commands and webhooks that are told of jobs.
    pub struct HooksConfig {
        /// Shell commands, run as the agent's user; each gets the journal's entry as JSON on standard input.
        commands: Vec<String> = Vec::new(),
        /// Addresses like "https://host/path" or "http://host:port/path" to which the entry is posted.
        webhooks: Vec<String> = Vec::new(),
        /// A file with certificates of authorities, in PEM, on which "https://" may rest beside those that the host trusts. Empty: those alone.
        authorities: PathBuf = PathBuf::new(),
        /// Of what they are told: "verdict", "decision", "job_ended".
        on: Vec<String> = vec!["verdict".to_owned(), "decision".to_owned(), "job_ended".to_owned()],
        /// How long one try may take; a command is killed then.
        deadline: Period = Period::seconds(10),
        /// How often it is tried: a second after the first time, then two, four and so on.
        tries: u32 = 3,
    }
    sections {}
}

settings! {
    /// How checkpoints are replicated.
    pub struct CheckpointConfig {
        /// TCP address on which other agents reach this one, like "10.0.0.7:7140". Empty: no checkpoint is replicated.
        #[serde(with = "none_is_empty")]
        listen: Option<SocketAddr> = None,
        /// All agents that keep replicas for each other, as "host:port"; the same list on each host, this one included.
        peers: Vec<String> = Vec::new(),
        /// Which of peers is this agent. Empty: what listen says.
        name: String = String::new(),
        /// What fails together with this host: a rack, a power feed, an NVLink domain. Empty: only itself.
        domain: String = String::new(),
        /// Peers that keep this host's replicas only if no other can: neighbours in the pipeline whose ranks do not tell their stage.
        avoid: Vec<String> = Vec::new(),
        /// How many replicas each shard gets beside the copy of its own host.
        redundancy: u32 = 1,
        /// Pieces that are kept in place of replicas, as "data+parity": "4+1" cuts each shard into 4, of which with one of parity any one may
        /// be lost beside the host itself; each lies in another failure domain. Empty: replicas.
        parity: String = String::new(),
        /// Whole steps of a run of which replicas are kept at least.
        keep: u32 = 2,
        /// Where replicas for others are kept: on a tmpfs for memory, else on a disk. Empty: replicas in the state directory.
        store: PathBuf = PathBuf::new(),
        /// Bytes of replicas at most, and of memory that is made ready for shards that may come.
        quota: Bytes = Bytes(64 << 30),
        /// The file with the secret that all agents of peers share; only its owner may read it.
        token_file: PathBuf = PathBuf::new(),
        /// This agent's certificate for TLS with its peers, in PEM, with those between it and the authority; it must name the host that
        /// peers has, by DNS or IP address, and serve clients as well as servers. Empty: no TLS.
        tls_certificate: PathBuf = PathBuf::new(),
        /// The certificate's private key, in PEM without a password; only its owner may read it.
        tls_key: PathBuf = PathBuf::new(),
        /// The authorities, in PEM, one of which must have signed a peer's certificate: whoever has one may read and write checkpoints.
        tls_authorities: PathBuf = PathBuf::new(),
        /// Bytes a second for all that is sent to be kept by others; 0B: no limit. Restores are not limited.
        rate_limit: Bytes = Bytes(1 << 30),
        /// Percent of a job's time that replicating may cost it, by what its steps take with and without; what would cost more waits. 0: any.
        slowdown_percent: u32 = 1,
        /// Connections for one shard, 1 to 4.
        streams: u32 = 2,
        /// Time from one look at directories and peers to the next; at least 100ms.
        interval: Period = Period::seconds(1),
        /// How long a peer may take to go on before another one is taken.
        stall: Period = Period::seconds(10),
        /// Storage that outlives the hosts, the same on each: "file:///shared/directory", "s3://bucket/prefix", "gs://bucket" or
        /// "az://container"; credentials come from the environment. Empty: none.
        durable: String = String::new(),
        /// The first step in so many training steps goes into durable storage; 1: each that can be kept up with.
        durable_every: u64 = 1,
        /// Whole steps of a run that are kept in durable storage; the newest is never deleted.
        durable_keep: u32 = 3,
        /// Bytes a second that this host sends to durable storage; 0B: no limit.
        durable_bandwidth: Bytes = Bytes(0),
        /// Directories into which trainers write checkpoints in their own way: tables, or "RUN=DIRECTORY" or "RUN=KIND:DIRECTORY";
        /// docs/reference/checkpoint-files.md.
        watch: Vec<WatchConfig> = Vec::new(),
        /// Directories in which this agent is the replicator of GKE's multi-tier checkpointing.
        replicator: Vec<PathBuf> = Vec::new(),
        /// Caches of compiled programs that are kept and handed to hosts that have none: tables, or "NAME=DIRECTORY".
        cache: Vec<CacheConfig> = Vec::new(),
    }
    sections {}
}
