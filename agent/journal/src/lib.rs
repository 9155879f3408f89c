//! The journal: `store` is the journal on disk, `state` the state that readers see (one writer, many snapshots).

pub mod state;
pub mod store;
