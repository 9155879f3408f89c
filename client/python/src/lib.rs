//! The native module `mainstay._native`: the heartbeat client as Python calls it.
//!
//! It guarantees two things to the training script. A call costs as much as a few stores: the functions on the
//! training path are plain C entry points without a Python frame, argument parsing library or allocation between
//! them and the page. And no call raises: whatever the arguments, the worst result is one warning and a value left
//! out.
//!
//! It makes no decisions: the Python package around this module decides which process may open the page, how an
//! exception is handled and where a checkpoint is stored.

mod arguments;
mod awaited;
mod calls;
mod checksum;
mod copying;
mod counters;
mod digest;
mod gates;
mod pool;
mod rank;
mod saving;
mod section;
mod testing;
mod warn;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    calls::add_to(module)?;
    section::add_to(module)?;
    rank::add_to(module)?;
    saving::add_to(module)?;
    awaited::add_to(module)?;
    checksum::add_to(module)?;
    counters::add_to(module)?;
    gates::add_to(module)?;
    digest::add_to(module)?;
    pool::add_to(module)?;
    testing::add_to(module)
}
