//! Sections: one object per name for the life of the process, so that `with mainstay.section(name)` allocates nothing.

use mainstay_client::SectionId;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::rank;
use crate::warn::{self, Mistake};

/// The number of names that are kept. A script with an unlimited number of names (`f"step {n}"`) pays a little more
/// per call instead of growing a table forever.
const MAX_NAMES: usize = 1024;

static KNOWN: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
static IDLE: PyOnceLock<Py<Section>> = PyOnceLock::new();

/// A named part of a rank's work. It has no state, so threads may share it and it may be nested.
#[pyclass(frozen, module = "mainstay")]
pub struct Section {
    #[pyo3(get)]
    name: String,
    /// `None` if no page is open: entering and leaving then do nothing.
    id: Option<SectionId>,
}

impl Section {
    /// Its number in the page; none if no page is open.
    pub fn id(&self) -> Option<SectionId> {
        self.id
    }

    #[inline]
    pub fn enter(&self) {
        if let (Some(client), Some(id)) = (rank::client(), self.id) {
            client.enter(id);
        }
    }

    #[inline]
    pub fn leave(&self) {
        if let (Some(client), Some(id)) = (rank::client(), self.id) {
            client.leave(id);
        }
    }

    #[inline]
    pub fn spend(&self, ns: u64) {
        if let (Some(client), Some(id)) = (rank::client(), self.id) {
            client.spend(id, ns);
        }
    }
}

#[pymethods]
impl Section {
    /// As a decorator: the function's calls are the section.
    #[pyo3(signature = (*functions, **_named))]
    fn __call__<'py>(
        this: &Bound<'py, Self>,
        functions: &Bound<'py, PyTuple>,
        _named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = this.py();
        match functions.get_item(0) {
            Ok(function) if function.is_callable() => {
                py.import("mainstay._section")?.call_method1("around", (this, function))
            }
            Ok(other) if rank::client().is_none() => Ok(other),
            Ok(other) => {
                warn::once(
                    py,
                    Mistake::SectionArguments,
                    "mainstay.section: only a function can be decorated",
                )?;
                Ok(other)
            }
            Err(_) => Ok(this.to_owned().into_any()),
        }
    }

    fn __repr__(&self) -> String {
        format!("mainstay.section({:?})", self.name)
    }
}

/// The section of that name, created at its first use; a section that does nothing if the name is invalid.
#[inline]
pub fn named(py: Python<'_>, name: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
    if rank::client().is_none() {
        return idle(py);
    }
    let Some(name) = name.and_then(|name| name.cast::<PyString>().ok()) else {
        warn::once(
            py,
            Mistake::SectionName,
            "mainstay.section: the name must be a str; the section was left out",
        )?;
        return idle(py);
    };
    let known = KNOWN.get_or_init(py, || PyDict::new(py).unbind()).bind(py);
    match known.get_item(name) {
        Ok(Some(section)) => Ok(section.unbind()),
        Ok(None) => make(py, known, name),
        Err(error) => {
            // A subclass of str whose hash fails; attached as in `calls`, so that the exception is freed here.
            Python::attach(|py| warn::unless_users_own(py, error))?;
            make(py, known, name)
        }
    }
}

#[cold]
fn make(py: Python<'_>, known: &Bound<'_, PyDict>, name: &Bound<'_, PyString>) -> PyResult<Py<PyAny>> {
    let text = name.to_string_lossy().into_owned();
    let id = rank::client().map(|client| client.intern(&text));
    let section = Bound::new(py, Section { name: text, id })?.into_any();
    // Only an exact str is a key: a subclass may hash and compare as it likes.
    if known.len() < MAX_NAMES && name.is_exact_instance_of::<PyString>() {
        known.set_item(name, &section)?;
    }
    Ok(section.unbind())
}

fn idle(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let idle = IDLE.get_or_try_init(py, || Py::new(py, Section { name: String::new(), id: None }))?;
    Ok(idle.clone_ref(py).into_any())
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Section>()
}
