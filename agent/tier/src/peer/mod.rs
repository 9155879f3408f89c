//! Replicas of shards on other hosts: their bytes go from agent to agent over TCP, plain or by TLS.
//!
//! From the bottom: `frame` (headers), `error`, `token` and `tls` (who may), `pass` (either, or both), `pace` (how fast), `channel`
//! (bytes), `wire` (one connection), `greeting` (how it begins); `sealed` (a
//! shard by its manifest), `user`, `withdrawal` (who may have a replica deleted), `store` (what is kept for others, over `spare`), `own` (what this host made), `pooled` (of it, what lies in launchers' memory); `message`, `alike` (what need not be
//! sent), `server`, `client`; `service`, which joins them, `landing`, `pieces` (a shard had back from those) and
//! `restore`.
//!
//! What comes over the wire is believed in nothing: every header is signed, every chunk is compared with the owner's
//! manifest while it is in the cache, and no name in it becomes a path.

mod channel;
pub mod client;
mod divergence;
mod durable;
pub mod error;
pub mod frame;
mod greeting;
mod landing;
pub(crate) mod local_shards;
mod message;
pub mod pace;
pub mod pass;
mod pieces;
pub(crate) mod pooled;
mod restore;
pub(crate) mod sealed;
mod server;
pub(crate) mod service;
mod spare;
pub mod store;
pub(crate) mod throttle;
pub mod tls;
mod together;
pub mod token;
pub(crate) mod user;
pub mod wire;
mod withdrawal;

/// How far threads that send or take replicas stand back behind training for the processor (`nice`): where training keeps every core
/// busy, each of them gets a tenth of one. What that costs training is held down by `courtesy`, and a replica that never comes is of no use.
const REPLICATE_NICE: i32 = 10;

pub use crate::os::monotonic;
pub use durable::{Durable, Figures};
pub use landing::settle_lent;
pub use local_shards::{Opened, Watched};
pub use message::{Held, Inventory};
pub(crate) use restore::land;
pub use restore::{Progress, Restored, look_directory, verify_directory};
pub use sealed::{Sealed, SealedError};
pub use service::{Counts, Lag, Peer, Service, Settings, StartError};
pub use throttle::ReplicationOverhead;
pub use together::Brought;
pub use user::{User, groups_of, learn_groups, may_serve};
pub use withdrawal::{WithdrawalKey, WithdrawalLock};
