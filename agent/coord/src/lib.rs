//! The coordination of the launchers of one job.
//!
//! Everything uses etcd's v3 API: [`Client`] sends requests, [`Server`] is the built-in store that serves the same
//! subset from inside a launcher, and [`group`] is what launchers do with either: they join, elect a leader and
//! publish rounds. There is no second protocol and no consensus algorithm of our own.
//! `docs/reference/coordination.md` lists keys and values.

pub mod client;
pub mod endpoint;
pub mod error;
pub mod etcd;
pub mod group;
pub mod managed;
pub mod server;

pub use client::{
    Client, Credentials, KeyValue, Lease, LeaseId, LeaseState, Listing, Relisted, Settings, StoreStatus,
    TlsFiles, Txn, TxnReply, Watch, WatchEvent,
};
pub use endpoint::Endpoint;
pub use error::CoordError;
pub use group::values::{Fitness, JobEndedNote, Leader, Member, Record, Round, StoredRecord};
pub use group::{
    Gone, Group, GroupEvent, GroupOptions, GroupState, GroupWatch, JobId, Leadership, MemberState, Membership,
};
pub use managed::{Managed, ManagedOptions, ManagedState, ManagedTls};
pub use server::{Server, ServerOptions, ServerTls};
