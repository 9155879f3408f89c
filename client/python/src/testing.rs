//! For the tests: makes and reads heartbeat pages the way launcher and agent do.
use pyo3::prelude::*;
pub fn add_to(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
