//! The checkpoint tier of one host. A rank copies its state into memory that the launcher owns ([`pool`]) and continues. Everything
//! else happens here, outside training: checksums ([`seal`]), the disk ([`disk`]), and replicas on other hosts
//! ([`peer`]), complete or in pieces ([`parity`]). [`files`] handles what trainers write without Mainstay.
//!
//! Three rules hold everywhere: a shard without an intact manifest does not count; a manifest appears last and atomically; the
//! newest whole step is removed only after a newer one is whole.

pub mod aside;
pub mod beneath;
pub mod disk;
pub mod files;
pub mod lent_files;
mod os;
pub mod parity;
pub mod peer;
pub mod pool;
pub mod seal;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A panic while it was held leaves no state that the next holder cannot handle.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
