//! Replicas of shards on other hosts: agents send them over TCP, with or without TLS.
//!
//! From the bottom: `frame` (headers), `error`, `token`, `tls` and `credentials` (authentication),
//! `pace` (rate limits), `wire` (one connection), `user` (whose files are read), `withdrawal`
//! (deletion of replicas), `store` (replicas for other hosts), `local_shards` (shards of this host,
//! on disk), `pooled` (in launchers' memory); `durable` (storage that outlives the hosts);
//! `message`, `server`, `client`; `service`, which joins them; `receive`, `pieces` (shards from
//! pieces) and `restore`.
//!
//! Received data is not trusted: every header is signed, every chunk is compared with the owner's
//! manifest while it is in the cache, and no received name becomes a path.

pub mod client;
pub mod credentials;
pub(crate) mod durable;
pub mod error;
pub mod frame;
pub(crate) mod local_shards;
mod message;
pub mod pace;
mod pieces;
mod pooled;
mod receive;
mod restore;
mod server;
pub(crate) mod service;
pub mod store;
pub(crate) mod throttle;
pub mod tls;
pub mod token;
pub(crate) mod user;
pub mod wire;
mod withdrawal;

/// `nice` value of threads that send or receive replicas: if training keeps every core busy, each of them gets a tenth of one.
/// `throttle` limits what that costs training, and a replica that never arrives is of no use.
const REPLICATE_NICE: i32 = 10;

pub use crate::seal::{SealedShard, SealedShardError};
pub use durable::{Durable, DurableFigures};
pub use local_shards::{OpenShard, WatchedDirectory};
pub use message::{Inventory, StoredCopy};
pub use receive::{ShardWriter, settle_lent};
pub(crate) use restore::land;
pub use restore::{FetchedShards, Progress, Restored, look_directory, verify_directory};
pub use service::{Counts, Lag, Peer, Service, Settings, StartError};
pub use throttle::ReplicationOverhead;
pub use user::{Access, User, Users};
pub use withdrawal::{WithdrawalKey, WithdrawalLock};
