//! The catalog of signatures, held from a failure until its verdict is made.

use std::sync::{Arc, Mutex, PoisonError};

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_sys::memory;

static HELD: Mutex<Option<Arc<Catalog>>> = Mutex::new(None);

/// Reads the signatures while the ranks end: the next verdict needs them. Without a thread the verdict reads them itself.
pub(crate) fn prepare() {
    let hold = || *held() = Catalog::shared().ok();
    let _ = std::thread::Builder::new().name("signatures".to_owned()).spawn(hold);
}

/// Frees them when ranks run again: a job without failures need not keep them in memory.
pub(crate) fn let_go() {
    let was_held = held().take().is_some();
    if was_held {
        memory::give_back();
    }
}

fn held() -> std::sync::MutexGuard<'static, Option<Arc<Catalog>>> {
    // The value is replaced in one step: it is whole even after a panic.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}
