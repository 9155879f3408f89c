//! Reports wrong calls to the training script: one warning per kind of mistake, never an exception.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::{PyException, PyRuntimeWarning};
use pyo3::prelude::*;

/// The kinds of mistakes; each is reported once in the life of the process.
#[derive(Clone, Copy)]
pub enum Mistake {
    StepNumber,
    StepArguments,
    Loss,
    GradNorm,
    Digest,
    BeatArguments,
    SectionName,
    SectionArguments,
    DataPosition,
    TotalSteps,
    Panic,
}

static REPORTED: [AtomicBool; Mistake::Panic as usize + 1] =
    [const { AtomicBool::new(false) }; Mistake::Panic as usize + 1];

/// Handles a failed read of an argument: drops the exception if it is about the argument, passes it on if it is
/// not.
///
/// Reading an argument can run Python (`__float__`, a warning filter), and there a signal handler may raise, so
/// that a `KeyboardInterrupt` or `SystemExit` arrives here. Those are the user's, and hiding them would lose a Ctrl-C.
pub fn unless_users_own(py: Python<'_>, error: PyErr) -> PyResult<()> {
    if error.is_instance_of::<PyException>(py) { Ok(()) } else { Err(error) }
}

/// Warns about `mistake`, the first time only. Under `-W error` the text goes to stderr instead of raising.
#[cold]
pub fn once(py: Python<'_>, mistake: Mistake, text: &str) -> PyResult<()> {
    if REPORTED[mistake as usize].swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let Ok(message) = CString::new(text.replace('\0', "")) else {
        return Ok(());
    };
    match PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1) {
        Ok(()) => Ok(()),
        Err(error) => {
            unless_users_own(py, error)?;
            eprintln!("{text}");
            Ok(())
        }
    }
}
