//! The checkpoint tier of one host. A rank copies its state into memory that the launcher owns ([`pool`]) and goes on; everything
//! else happens here, outside training: checksums ([`seal`]), the disk ([`disk`]), the list of what lies where ([`shelf`]), and replicas on other hosts
//! ([`peer`]), whole or in pieces ([`parity`]). What trainers write without Mainstay is in [`files`].
//!
//! Three rules hold everywhere: a shard without an intact manifest is not there; a manifest appears last and at once; the
//! newest step that is whole is removed only after a newer one is whole.

pub mod beneath;
pub mod bytes;
pub mod disk;
pub mod files;
pub mod handed;
pub mod lent_files;
mod medium;
mod os;
pub mod parity;
pub mod peer;
pub mod pool;
pub mod seal;
pub mod shelf;
mod small_file;
