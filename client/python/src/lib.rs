//! The native module `mainstay._native`: the heartbeat client as Python calls it.
//!
//! It promises the training script two things. A call costs what a few stores cost: the functions on the training
//! path are plain C entry points without a Python frame, argument parsing library or allocation between them and the
//! page. And no call raises: whatever the arguments, the worst is one warning and a value left out.
//!
//! Absent on purpose: any decision. Which process may open the page, what an exception is worth and where a
//! checkpoint goes is decided in the Python package around this module.

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
