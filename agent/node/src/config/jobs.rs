//! Keys of what the agent stores and does for jobs: the journal, policies, hooks, checkpoints.

use std::net::SocketAddr;
use std::path::PathBuf;

use mainstay_model::settings;
use mainstay_model::units::{Bytes, Period};

use super::files::{CacheConfig, WatchConfig};
use super::none_is_empty;
use crate::hook::HookFormat;

settings! {
    /// How large the journal may be.
    pub struct JournalConfig {
        /// Size limit of all segments together; the oldest segments are deleted beyond it. A segment has at most 4 MiB, and at
        /// most a quarter of this.
        max_size: Bytes = Bytes(64 << 20),
    }
    sections {}
}

settings! {
    /// What is done about failures of jobs.
    pub struct PolicyConfig {
        /// A policy, a Python script, for jobs of this host that do not name one (`mainstay run --policy`). Empty: the
        /// built-in policy.
        file: PathBuf = PathBuf::new(),
    }
    sections {}
}

settings! {
    /// Commands and webhooks that receive events of jobs.
    pub struct HooksConfig {
        /// Shell commands, run as the agent's user; each receives JSON on standard input.
        commands: Vec<String> = Vec::new(),
        /// URLs such as "https://host/path" or "http://host:port/path" to which it is posted; for PagerDuty with "#KEY", the
        /// integration key, at the end; for NVSentinel "unix:///var/run/nvsentinel.sock".
        webhooks: Vec<String> = Vec::new(),
        /// A file with CA certificates, in PEM, that "https://" accepts in addition to those that the host trusts. Empty: none.
        authorities: PathBuf = PathBuf::new(),
        /// What they receive: "raw" (the entry of the journal), or notices for "slack", "pagerduty", "alertmanager",
        /// "cloudevents", "nvsentinel" (stored only) or "nvsentinel-remediate".
        format: HookFormat = HookFormat::Raw,
        /// Which entries they receive: "verdict", "decision", "job_ended", "finding", "health".
        on: Vec<String> = vec!["verdict".to_owned(), "decision".to_owned(), "job_ended".to_owned()],
        /// How long one of three attempts may take; a command is killed after that.
        deadline: Period = Period::seconds(10),
    }
    sections {}
}

settings! {
    /// How checkpoints are replicated.
    pub struct CheckpointConfig {
        /// TCP address on which other agents reach this one, like "10.0.0.7:7140". Empty: no checkpoint is replicated.
        #[serde(with = "none_is_empty")]
        listen: Option<SocketAddr> = None,
        /// All agents that keep replicas for each other, as "host:port"; the same list on each host, including this one.
        peers: Vec<String> = Vec::new(),
        /// Which of peers is this agent. Empty: the value of listen.
        name: String = String::new(),
        /// What fails together with this host: a rack, a power feed, an NVLink domain. Empty: only itself.
        domain: String = String::new(),
        /// Peers that keep this host's replicas only if no other can: neighbours in the pipeline whose ranks do not report
        /// their stage.
        avoid: Vec<String> = Vec::new(),
        /// Replicas of each shard, in addition to the copy on its own host.
        redundancy: u32 = 1,
        /// Erasure-coded pieces in place of replicas, as "data+parity": "4+1" splits each shard into 4 pieces plus 1 of parity.
        /// Any 1 of the 5 may be lost in addition to the host itself; each is in a different failure domain. Empty: replicas.
        parity: String = String::new(),
        /// Minimum number of whole steps of a run whose replicas are kept.
        keep: u32 = 2,
        /// Where replicas for others are kept: on a tmpfs for memory, else on a disk. Empty: replicas in the state directory.
        store: PathBuf = PathBuf::new(),
        /// Maximum size of replicas and of memory that is prepared for incoming shards.
        quota: Bytes = Bytes(64 << 30),
        /// The file with the secret that all agents of peers share; only its owner may read it.
        token_file: PathBuf = PathBuf::new(),
        /// The directory for TLS with the peers, with the same files as in the key tls. The certificate must name the host in
        /// peers, by DNS name or IP address, and be valid for clients and servers. Anyone with a certificate of ca.crt may read and
        /// write checkpoints. Empty: no TLS.
        tls: PathBuf = PathBuf::new(),
        /// Bytes per second for all replicas that this host sends; 0B: no limit. Restores are not limited.
        rate_limit: Bytes = Bytes(1 << 30),
        /// Percent of a job's time that replication may cost, measured by the job's step times with and without it; replication
        /// that would cost more waits. 0: no limit.
        slowdown_percent: u32 = 1,
        /// Time from one scan of directories and peers to the next; at least 100ms.
        interval: Period = Period::seconds(1),
        /// Storage that outlives the hosts, the same on each: "file:///shared/directory", "s3://bucket/prefix", "gs://bucket" or
        /// "az://container"; credentials come from the environment. Empty: none.
        durable: String = String::new(),
        /// The first step in every N training steps goes into durable storage; 1: each step, as far as the storage keeps up.
        durable_every: u64 = 1,
        /// Whole steps of a run that are kept in durable storage; the newest is never deleted.
        durable_keep: u32 = 3,
        /// Bytes per second that this host sends to durable storage; 0B: no limit.
        durable_bandwidth: Bytes = Bytes(0),
        /// Directories into which trainers write checkpoints in their own format: tables, or "RUN=DIRECTORY" or
        /// "RUN=KIND:DIRECTORY"; docs/reference/checkpoint-files.md.
        watch: Vec<WatchConfig> = Vec::new(),
        /// Directories in which this agent is the replicator of GKE's multi-tier checkpointing.
        replicator: Vec<PathBuf> = Vec::new(),
        /// Caches of compiled programs that are replicated and copied to hosts without one: tables, or "NAME=DIRECTORY".
        cache: Vec<CacheConfig> = Vec::new(),
    }
    sections {}
}
