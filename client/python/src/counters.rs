//! Reports of the hooks for frameworks: collective counters, time spent on a device, and steps that they counted
//! because the script reports none.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use mainstay_client::{Collective, Measures, Operation, OperationKind};
use pyo3::prelude::*;

use crate::awaited;
use crate::rank;
use crate::section::Section;

/// Whether the script has reported a step itself.
static REPORTED: AtomicBool = AtomicBool::new(false);

/// Records that the script reports its steps itself: hooks must not.
#[inline]
pub fn script_reports_steps() {
    if !REPORTED.load(Ordering::Relaxed) {
        REPORTED.store(true, Ordering::Relaxed);
    }
}

/// A digest to report with the next step, and whether there is one.
static DIGEST: AtomicU64 = AtomicU64::new(0);
static DIGEST_WAITS: AtomicBool = AtomicBool::new(false);

/// Whether a digest waits for a step: one load on the training path.
#[inline]
pub fn digest_waits() -> bool {
    DIGEST_WAITS.load(Ordering::Relaxed)
}

/// The digest that waits for a step, once.
pub fn take_digest() -> Option<u64> {
    DIGEST_WAITS.swap(false, Ordering::Acquire).then(|| DIGEST.load(Ordering::Relaxed))
}

/// Reports `digest` with the next step.
#[pyfunction]
fn next_digest(digest: u64) {
    DIGEST.store(digest, Ordering::Relaxed);
    DIGEST_WAITS.store(true, Ordering::Release);
}

/// Step `step`, counted by a hook. Returns false and reports nothing if the script reports its steps itself.
#[pyfunction]
pub fn hook_step(py: Python<'_>, step: u64) -> bool {
    if REPORTED.load(Ordering::Relaxed) {
        return false;
    }
    if let Some(client) = rank::client() {
        client.counted_step(step, Measures { digest: take_digest(), ..Measures::default() });
        if awaited::any() {
            awaited::step(py);
        }
    }
    true
}

/// Whether the script has reported a step itself.
#[pyfunction]
fn script_steps() -> bool {
    REPORTED.load(Ordering::Relaxed)
}

/// Sets the counters of communicator `comm`; `operation` is the kind of the one entered last, with `bytes` bytes.
#[pyfunction]
#[pyo3(signature = (comm, entered, completed, operation = None, bytes = 0))]
fn collective(comm: u64, entered: u64, completed: u64, operation: Option<&str>, bytes: u64) {
    if let Some(client) = rank::client() {
        let operation = operation.map(|name| Operation { kind: OperationKind::named(name), bytes });
        let signature = operation.map_or(0, Operation::signature);
        client.collective_with(Collective { comm, entered, completed, signature });
    }
}

/// The number of open phases that are known to take long; only the outermost one counts.
static LONG: AtomicUsize = AtomicUsize::new(0);

/// A phase starts that is known to take long: at most this many seconds, or without limit.
#[pyfunction]
fn begin_long(seconds: Option<f64>) {
    if LONG.fetch_add(1, Ordering::Relaxed) != 0 {
        return;
    }
    let span = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match (rank::client(), span) {
        (Some(client), Some(span)) => client.expect_long(span),
        (Some(client), None) => client.pause(),
        (None, _) => {}
    }
}

/// Ends the phase that [`begin_long`] started.
#[pyfunction]
fn end_long() {
    if LONG.fetch_sub(1, Ordering::Relaxed) == 1
        && let Some(client) = rank::client()
    {
        client.resume();
    }
}

/// The section took `ns` of the current step on a device.
#[pyfunction]
fn spend(section: &Bound<'_, Section>, ns: u64) {
    section.get().spend(ns);
}

/// Sets this rank's role and its pipeline stage.
#[pyfunction]
#[pyo3(signature = (name, stage = None))]
fn tell_role(name: &str, stage: Option<u32>) {
    if let Some(client) = rank::client() {
        client.role(name, stage);
    }
}

/// A number for a group of ranks: the same on all of them, different for another group (64-bit FNV-1a).
#[pyfunction]
fn group_id(name: &str, ranks: Vec<u64>) -> u64 {
    let words = ranks.iter().flat_map(|rank| rank.to_le_bytes());
    name.bytes().chain([0]).chain(words).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(hook_step, module)?)?;
    module.add_function(wrap_pyfunction!(script_steps, module)?)?;
    module.add_function(wrap_pyfunction!(collective, module)?)?;
    module.add_function(wrap_pyfunction!(next_digest, module)?)?;
    module.add_function(wrap_pyfunction!(begin_long, module)?)?;
    module.add_function(wrap_pyfunction!(end_long, module)?)?;
    module.add_function(wrap_pyfunction!(spend, module)?)?;
    module.add_function(wrap_pyfunction!(tell_role, module)?)?;
    module.add_function(wrap_pyfunction!(group_id, module)?)
}
