//! "Save now": whether the launcher requests it, and the script's function that is then called once, after a step.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::rank;

/// Whether a function waits to be called.
static WAITS: AtomicBool = AtomicBool::new(false);

static CALL: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

/// Whether a function waits to be called: one load on the training path.
#[inline]
pub fn any() -> bool {
    WAITS.load(Ordering::Relaxed)
}

/// Calls the function if a save is requested. The script sees the function's exceptions.
#[cold]
pub fn step(py: Python<'_>) -> PyResult<()> {
    if !save_requested() {
        return Ok(());
    }
    WAITS.store(false, Ordering::Relaxed);
    // Not under the lock: the function may register another one.
    let call = CALL.lock().ok().and_then(|mut call| call.take());
    call.map_or(Ok(()), |call| call.call0(py).map(drop))
}

/// Whether this rank must save now and end: after the same step on all ranks.
#[pyfunction]
fn save_requested() -> bool {
    rank::client().is_some_and(|client| client.save_requested())
}

/// Whether a save is due by what the job's saves and failures cost.
#[pyfunction]
fn save_due() -> bool {
    rank::client().is_some_and(|client| client.save_due())
}

/// Seconds until this rank is forced to end; `None` if nothing is requested.
#[pyfunction]
fn save_within() -> Option<f64> {
    rank::client().and_then(|client| client.save_within()).map(|left| left.as_secs_f64())
}

/// Registers `call` to be called once, in the thread that reports the step, after the step at which all ranks save.
#[pyfunction]
fn on_save_request(call: Py<PyAny>) {
    if let Some(client) = rank::client() {
        client.listen_for_saves();
    }
    if let Ok(mut waiting) = CALL.lock() {
        *waiting = Some(call);
        WAITS.store(true, Ordering::Relaxed);
    }
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(save_requested, module)?)?;
    module.add_function(wrap_pyfunction!(save_due, module)?)?;
    module.add_function(wrap_pyfunction!(save_within, module)?)?;
    module.add_function(wrap_pyfunction!(on_save_request, module)?)
}
