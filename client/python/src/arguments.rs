//! Python arguments, read by hand so that a wrong one is left out instead of raised.

use std::ffi::CStr;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt, PyString, PyTuple};
use pyo3::{Borrowed, ffi};

/// The arguments of one call in CPython's vector convention: positional ones, then the values of the named ones.
pub struct Call<'a, 'py> {
    values: &'a [*mut ffi::PyObject],
    positional: usize,
    names: Option<Borrowed<'a, 'py, PyTuple>>,
    py: Python<'py>,
}

impl<'a, 'py> Call<'a, 'py> {
    /// # Safety
    /// The three must come from CPython as it calls a function flagged `METH_FASTCALL | METH_KEYWORDS`: `names` is
    /// null or a tuple of `str`, and `values` points to `positional` objects and one more for each name.
    #[inline]
    pub unsafe fn new(
        py: Python<'py>,
        values: *const *mut ffi::PyObject,
        positional: ffi::Py_ssize_t,
        names: *mut ffi::PyObject,
    ) -> Self {
        let positional = positional.max(0) as usize;
        // SAFETY: CPython passes null or a tuple, alive for the whole call.
        let names =
            unsafe { Borrowed::from_ptr_or_opt(py, names).map(|names| names.cast_unchecked::<PyTuple>()) };
        let count = positional + names.as_ref().map_or(0, |names| names.len());
        let values = if count == 0 {
            &[]
        } else {
            // SAFETY: `values` points to `count` objects that the caller holds for the whole call.
            unsafe { std::slice::from_raw_parts(values, count) }
        };
        Self { values, positional, names, py }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    #[inline]
    pub fn positional_count(&self) -> usize {
        self.positional
    }

    #[inline]
    pub fn positional(&self, index: usize) -> Option<Borrowed<'a, 'py, PyAny>> {
        if index < self.positional { Some(self.value(index)) } else { None }
    }

    /// The named arguments in the order they were written.
    #[inline]
    pub fn named(&self) -> impl Iterator<Item = (Bound<'py, PyString>, Borrowed<'a, 'py, PyAny>)> + '_ {
        let names = self.names.as_ref();
        (0..names.map_or(0, |names| names.len())).filter_map(move |index| {
            let name = names?.get_item(index).ok()?.cast_into::<PyString>().ok()?;
            Some((name, self.value(self.positional + index)))
        })
    }

    #[inline]
    fn value(&self, index: usize) -> Borrowed<'a, 'py, PyAny> {
        // SAFETY: every entry of `values` is an object that the caller holds for the whole call.
        unsafe { Borrowed::from_ptr(self.py, self.values[index]) }
    }
}

/// Whether a keyword is this one. `==` of PyO3 would make a UTF-8 copy in an abi3-py39 build.
#[inline]
pub fn spells(keyword: &Bound<'_, PyString>, ascii: &CStr) -> bool {
    // SAFETY: a live str and a NUL-terminated ASCII string; the function compares and never fails.
    unsafe { ffi::PyUnicode_CompareWithASCIIString(keyword.as_ptr(), ascii.as_ptr()) == 0 }
}

/// A whole number from 0 to 2^64-1: an `int`, or what has `__index__` as NumPy's integers do.
pub fn unsigned(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract::<u64>()
}

/// A measure: a `float` or `int`, a NumPy scalar, or a tensor of one element in host memory.
///
/// # Errors
/// If the value is on a device: reading it would make the host wait until the device has finished all that is
/// queued, which is too expensive for a heartbeat. If it is not a number.
pub fn measure(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    if let Ok(float) = value.cast::<PyFloat>() {
        return Ok(float.value());
    }
    if value.is_instance_of::<PyInt>() {
        return value.extract::<f64>();
    }
    let Some(device) = value.getattr_opt("device")? else {
        return value.extract::<f64>();
    };
    let place = device.getattr_opt("type")?.unwrap_or(device.clone());
    if place.cast::<PyString>().is_ok_and(|place| place == "cpu") {
        return value.call_method0("item")?.extract::<f64>();
    }
    Err(PyTypeError::new_err(format!(
        "it is on {device}, and reading it would make the host wait for the device; pass a Python float \
         (loss.item() where you log it anyway)"
    )))
}

/// What is wrong with an argument, in words, after [`unsigned`] or [`measure`] refused it.
pub fn complaint(py: Python<'_>, error: &PyErr) -> String {
    if error.is_instance_of::<PyOverflowError>(py) {
        return "it does not fit: a whole number from 0 to 2**64-1 is needed".to_owned();
    }
    match error.value(py).str() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => "it cannot be read as a number".to_owned(),
    }
}
