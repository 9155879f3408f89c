//! The calls on the training path, as C entry points: `step`, `beat`, `section`, and a section's enter and exit.
//!
//! They use CPython's vector calling convention (arguments as a C array), which saves a tuple and a dict per call.
//! It is documented as stable since 3.10 and has the same flag and signature in 3.9, whose ABI can no longer
//! change; the tests run one wheel on both.

use std::ffi::{CStr, c_int};
use std::ptr;

use mainstay_client::{Client, Measures};
pub(crate) use pyo3::ffi::Py_ssize_t;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use crate::arguments::{self, Call, spells};
use crate::awaited;
use crate::counters;
use crate::rank;
use crate::saving;
use crate::section::{self, Section};
use crate::warn::{self, Mistake};

pub(crate) type Fast =
    unsafe extern "C" fn(*mut PyObject, *const *mut PyObject, Py_ssize_t, *mut PyObject) -> *mut PyObject;

/// `METH_FASTCALL | METH_KEYWORDS`; PyO3 hides the first from an abi3-py39 build.
const FAST_WITH_KEYWORDS: c_int = 0x0080 | ffi::METH_KEYWORDS;

/// One C entry point around a function over [`Call`]. It guarantees that nothing unwinds into the interpreter and
/// that an exception set here is the user's own (see [`warn::unless_users_own`]).
macro_rules! entry {
    ($name:ident, $body:path) => {
        unsafe extern "C" fn $name(
            this: *mut PyObject,
            values: *const *mut PyObject,
            positional: $crate::calls::Py_ssize_t,
            names: *mut PyObject,
        ) -> *mut PyObject {
            // SAFETY: CPython calls this attached, with the arguments of the convention it was registered with.
            let (py, call) = unsafe {
                let py = Python::assume_attached();
                (py, $crate::arguments::Call::new(py, values, positional, names))
            };
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| $body(py, this, &call))) {
                Ok(Ok(object)) => object.into_ptr(),
                Ok(Err(error)) => $crate::calls::passed_on(error),
                Err(_) => $crate::calls::panicked(),
            }
        }
    };
}

pub(crate) use entry;

/// The end of a call that an exception came through: None if training must not see the exception, else the
/// exception.
#[cold]
pub(crate) fn passed_on(error: PyErr) -> *mut PyObject {
    Python::attach(|py| match warn::unless_users_own(py, error) {
        Ok(()) => py.None().into_ptr(),
        Err(error) => {
            error.restore(py);
            ptr::null_mut()
        }
    })
}

#[cold]
pub(crate) fn panicked() -> *mut PyObject {
    let text = "mainstay: a heartbeat call failed inside; training is not affected";
    match Python::attach(|py| warn::once(py, Mistake::Panic, text).map(|()| py.None())) {
        Ok(none) => none.into_ptr(),
        Err(error) => passed_on(error),
    }
}

entry!(step_entry, step);
entry!(beat_entry, beat);
entry!(active_entry, active);
entry!(section_entry, section_named);
entry!(data_at_entry, data_at);
entry!(total_steps_entry, total_steps);
entry!(pause_entry, pause);
entry!(resume_entry, resume);
entry!(enter_entry, enter);
entry!(exit_entry, exit);

/// `mainstay.step(step, *, loss=None, grad_norm=None, digest=None)`
fn step(py: Python<'_>, _module: *mut PyObject, call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    let Some(client) = rank::client() else {
        return Ok(py.None());
    };
    let mut number = call.positional(0);
    let mut measures = Measures::default();
    let mut measured = false;
    if call.positional_count() > 1 {
        let text =
            "mainstay.step: only the step number is positional; pass loss=, grad_norm= and digest= by name";
        warn::once(py, Mistake::StepArguments, text)?;
    }
    for (name, value) in call.named() {
        if spells(&name, c"step") && number.is_none() {
            number = Some(value);
        } else if value.is_none() {
            // An optional measure that is absent this time.
        } else if spells(&name, c"loss") {
            measures.loss = read("loss", Mistake::Loss, &value, arguments::measure)?;
            measured = true;
        } else if spells(&name, c"grad_norm") {
            measures.grad_norm = read("grad_norm", Mistake::GradNorm, &value, arguments::measure)?;
            measured = true;
        } else if spells(&name, c"digest") {
            measures.digest = read("digest", Mistake::Digest, &value, arguments::unsigned)?;
            measured = true;
        } else {
            let text = format!(
                "mainstay.step: {name}= is not one of step, loss, grad_norm, digest; it was left out"
            );
            warn::once(py, Mistake::StepArguments, &text)?;
        }
    }
    let Some(number) = number else {
        warn::once(
            py,
            Mistake::StepNumber,
            "mainstay.step: the step number is missing; the call was left out",
        )?;
        return Ok(py.None());
    };
    if let Some(number) = read("step", Mistake::StepNumber, &number, arguments::unsigned)? {
        counters::script_reports_steps();
        if measures.digest.is_none() && counters::digest_waits() {
            measures.digest = counters::take_digest();
            measured |= measures.digest.is_some();
        }
        if measured {
            client.step_with(number, measures);
        } else {
            client.step(number);
        }
    }
    if awaited::any() {
        awaited::step(py);
    }
    if saving::any() {
        saving::step(py)?;
    }
    Ok(py.None())
}

/// `mainstay.beat()`
fn beat(py: Python<'_>, _module: *mut PyObject, call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    if let Some(client) = rank::client() {
        client.beat();
        if !call.is_empty() {
            warn::once(
                py,
                Mistake::BeatArguments,
                "mainstay.beat takes no arguments; use mainstay.step(n) for a step",
            )?;
        }
    }
    Ok(py.None())
}

/// `mainstay.active()`
fn active(py: Python<'_>, _module: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    let active = rank::client().is_some_and(|client| client.is_active());
    Ok(pyo3::types::PyBool::new(py, active).to_owned().into_any().unbind())
}

/// `mainstay.section(name)`
fn section_named(py: Python<'_>, _module: *mut PyObject, call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    let name = match call.positional(0) {
        Some(name) => Some(name),
        None => call.named().find(|(key, _)| spells(key, c"name")).map(|(_, name)| name),
    };
    section::named(py, name.as_deref())
}

/// `mainstay.data_at(position)`
fn data_at(py: Python<'_>, _module: *mut PyObject, call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    number(py, call, ("data_at", c"position"), Mistake::DataPosition, Client::data_at)
}

/// `mainstay.total_steps(steps)`
fn total_steps(py: Python<'_>, _module: *mut PyObject, call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    number(py, call, ("total_steps", c"steps"), Mistake::TotalSteps, Client::total_steps)
}

/// A call with one number.
#[inline]
fn number(
    py: Python<'_>,
    call: &Call<'_, '_>,
    (function, argument): (&str, &CStr),
    mistake: Mistake,
    report: impl FnOnce(&Client, u64),
) -> PyResult<Py<PyAny>> {
    let Some(client) = rank::client() else {
        return Ok(py.None());
    };
    let argument_name = argument.to_str().unwrap_or_default();
    let named = || call.named().find(|(key, _)| spells(key, argument)).map(|(_, value)| value);
    let Some(value) = call.positional(0).or_else(named) else {
        let text = format!("mainstay.{function}: the {argument_name} is missing; the call was left out");
        warn::once(py, mistake, &text)?;
        return Ok(py.None());
    };
    match arguments::unsigned(&value) {
        Ok(value) => report(client, value),
        Err(error) => left_out(function, argument_name, mistake, error)?,
    }
    Ok(py.None())
}

/// `mainstay.pause()`
fn pause(py: Python<'_>, _module: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    if let Some(client) = rank::client() {
        client.pause();
    }
    Ok(py.None())
}

/// `mainstay.resume()`
fn resume(py: Python<'_>, _module: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    if let Some(client) = rank::client() {
        client.resume();
    }
    Ok(py.None())
}

/// `Section.__enter__()`
fn enter(_py: Python<'_>, this: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    // SAFETY: CPython's method descriptor has checked that `this` is a Section, and holds it for the call.
    let this = unsafe { Borrowed::from_ptr(_py, this).cast_unchecked::<Section>() };
    this.get().enter();
    Ok(this.to_owned().into_any().unbind())
}

/// `Section.__exit__(type, value, traceback)`: an exception passes through.
fn exit(py: Python<'_>, this: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    // SAFETY: as in `enter`.
    let this = unsafe { Borrowed::from_ptr(py, this).cast_unchecked::<Section>() };
    this.get().leave();
    Ok(py.None())
}

/// Reads one argument of `mainstay.step`; one that cannot be read is left out with a warning.
#[inline]
fn read<T>(
    name: &str,
    mistake: Mistake,
    value: &Bound<'_, PyAny>,
    how: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    match how(value) {
        Ok(read) => Ok(Some(read)),
        Err(error) => left_out("step", name, mistake, error).map(|()| None),
    }
}

/// Attached by PyO3's own count, as [`passed_on`] is: these calls come directly from CPython, and without it PyO3
/// would keep the exceptions dropped here until something else attaches.
#[cold]
fn left_out(call: &str, name: &str, mistake: Mistake, error: PyErr) -> PyResult<()> {
    Python::attach(|py| {
        let text = format!("mainstay.{call}: {name} was left out: {}", arguments::complaint(py, &error));
        warn::unless_users_own(py, error)?;
        warn::once(py, mistake, &text)
    })
}

/// The definition that CPython keeps a pointer to for as long as the process lives, hence leaked.
pub(crate) fn definition(name: &'static CStr, entry: Fast, doc: &'static CStr) -> *mut ffi::PyMethodDef {
    // SAFETY: the union's variants are all function pointers of one size; the flags say which one this is.
    let meth = unsafe { std::mem::transmute::<Fast, ffi::PyMethodDefPointer>(entry) };
    Box::leak(Box::new(ffi::PyMethodDef {
        ml_name: name.as_ptr(),
        ml_meth: meth,
        ml_flags: FAST_WITH_KEYWORDS,
        ml_doc: doc.as_ptr(),
    }))
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let functions: [(&CStr, Fast, &CStr); 8] = [
        (
            c"step",
            step_entry,
            c"step($module, step, *, loss=None, grad_norm=None, digest=None)\n--\n\n\
              Reports that optimiser step `step` is complete, with its measurements. Never raises, never blocks.",
        ),
        (
            c"beat",
            beat_entry,
            c"beat($module)\n--\n\nReports that this rank is alive although no step is complete. Never raises, never blocks.",
        ),
        (
            c"active",
            active_entry,
            c"active($module)\n--\n\nWhether heartbeats of this process reach a page.",
        ),
        (
            c"section",
            section_entry,
            c"section($module, name)\n--\n\n\
              A context manager (and decorator) that names what the rank does inside it. Never raises.",
        ),
        (
            c"data_at",
            data_at_entry,
            c"data_at($module, position)\n--\n\n\
              Reports this rank's position in its data: the same number for the same batch. Never raises.",
        ),
        (
            c"total_steps",
            total_steps_entry,
            c"total_steps($module, steps)\n--\n\n\
              Reports the number of steps after which this program ends, for the time that is left. Never raises.",
        ),
        (
            c"pause",
            pause_entry,
            c"pause($module)\n--\n\nSuspends hang detection until `resume`. Never raises.",
        ),
        (
            c"resume",
            resume_entry,
            c"resume($module)\n--\n\nResumes hang detection after `pause`. Never raises.",
        ),
    ];
    let module_name = module.name()?;
    for (name, entry, doc) in functions {
        // SAFETY: the definition lives forever; the result is a new reference or null with an exception set.
        let function = unsafe {
            let function =
                ffi::PyCFunction_NewEx(definition(name, entry, doc), module.as_ptr(), module_name.as_ptr());
            Bound::from_owned_ptr_or_err(py, function)?
        };
        module.add(&*name.to_string_lossy(), function)?;
    }
    let section = py.get_type::<Section>();
    for (name, entry) in [(c"__enter__", enter_entry as Fast), (c"__exit__", exit_entry as Fast)] {
        // SAFETY: the definition lives forever, the type is a live type object; the result is a new reference or
        // null.
        let method = unsafe {
            let method = ffi::PyDescr_NewMethod(section.as_type_ptr(), definition(name, entry, c""));
            Bound::from_owned_ptr_or_err(py, method)?
        };
        section.setattr(&*name.to_string_lossy(), method)?;
    }
    Ok(())
}
