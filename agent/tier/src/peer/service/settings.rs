//! What a service among peers is to do.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mainstay_core::checkpoint::parity::Parity;

use crate::peer::wire::Patience;

/// What the service is to do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Under which of `peers`' words the others know this agent: its name among them.
    pub name: String,
    /// All agents, as `host:port`; this one may be among them.
    pub peers: Vec<String>,
    /// What fails together with this host.
    pub domain: String,
    /// Where replicas are kept.
    pub store: PathBuf,
    /// Bytes of replicas at most.
    pub quota: u64,
    /// Replicas of each shard beside the owner's.
    pub copies: usize,
    /// How shards are cut into pieces that are kept in place of replicas, where there are failure domains enough.
    pub parity: Option<Parity>,
    /// Whole steps that are kept at least.
    pub keep: usize,
    /// Peers that are taken only if nobody else is there.
    pub avoid: BTreeSet<String>,
    /// Bytes a second for all replication; 0 for no limit.
    pub rate: u64,
    /// The share of training's time that replicating may cost, as its steps tell; 0 for any.
    pub slowdown: f64,
    /// Connections for one shard.
    pub streams: usize,
    /// Time from one look at own directories and peers to the next.
    pub interval: Duration,
    /// How long others are waited for.
    pub patience: Patience,
    /// This version of Mainstay.
    pub software: String,
}

impl Settings {
    /// For one that has no peers and keeps nothing of others: it only knows what this host has.
    pub fn alone(store: PathBuf, name: String) -> Settings {
        Settings {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            name,
            peers: Vec::new(),
            domain: String::new(),
            store,
            quota: 0,
            copies: 0,
            parity: None,
            keep: 1,
            avoid: BTreeSet::new(),
            rate: 0,
            slowdown: 0.0,
            streams: 1,
            interval: Duration::from_millis(500),
            patience: Patience::default(),
            software: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}
