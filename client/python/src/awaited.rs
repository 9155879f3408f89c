//! A call that is made once, after some steps: for reports that need a rank that is training.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;

/// Steps until the call; 0 when none is awaited.
static STEPS: AtomicU32 = AtomicU32::new(0);

static CALL: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

/// Whether a call is awaited: one load on the training path.
#[inline]
pub fn any() -> bool {
    STEPS.load(Ordering::Relaxed) != 0
}

/// Counts a step, and makes the call after the last one. Exceptions of the call do not reach training.
#[cold]
pub fn step(py: Python<'_>) {
    let counted = STEPS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    if counted == Ok(1)
        && let Some(call) = CALL.lock().ok().and_then(|mut call| call.take())
    {
        let _ = call.call0(py);
    }
}

/// Registers `call` to be made once, after this many steps of this process.
#[pyfunction]
fn after_steps(steps: u32, call: Py<PyAny>) {
    if let Ok(mut awaited) = CALL.lock() {
        *awaited = Some(call);
        STEPS.store(steps, Ordering::Relaxed);
    }
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(after_steps, module)?)
}
