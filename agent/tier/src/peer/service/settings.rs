//! Settings of the service among peers.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mainstay_checkpoint::parity::Parity;

use crate::peer::user::Users;
use crate::peer::wire::Timeouts;

/// Settings of the service.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// The name by which the others know this agent: its entry in their `peers`.
    pub name: String,
    /// All agents, as `host:port`; this one may be among them.
    pub peers: Vec<String>,
    /// Failure domain of this host.
    pub domain: String,
    /// Directory of the replicas.
    pub store: PathBuf,
    /// Maximum number of bytes of replicas.
    pub quota: u64,
    /// Replicas of each shard in addition to the owner's copy.
    pub copies: usize,
    /// How shards are cut into pieces, which are stored instead of replicas if there are enough failure domains.
    pub parity: Option<Parity>,
    /// Minimum number of whole steps to keep.
    pub keep: usize,
    /// Peers that are used only if there is no other.
    pub avoid: BTreeSet<String>,
    /// Bytes per second for all replication; 0: no limit.
    pub rate: u64,
    /// The share of training time that replication may cost, measured by its steps; 0: no limit.
    pub slowdown: f64,
    /// Connections for one shard.
    pub streams: usize,
    /// Time between two checks of own directories and peers.
    pub interval: Duration,
    /// Time limits for peers.
    pub patience: Timeouts,
    /// This version of Mainstay.
    pub software: String,
    /// The users for whom this process acts.
    pub users: Arc<Users>,
}

impl Settings {
    /// Settings without peers and replicas: the service knows only the shards of this host.
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
            patience: Timeouts::default(),
            software: env!("CARGO_PKG_VERSION").to_owned(),
            users: Arc::default(),
        }
    }
}
