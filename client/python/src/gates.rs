//! Gates: functions that hooks for frameworks call at the start and end of a section, and around an optimizer's
//! step.
//!
//! A training step evicts our data from the caches, so the cost of a call depends on how much memory it touches: a
//! Python frame costs some microseconds there, a gate well under one. So these are plain C functions that take any
//! arguments of a framework's hook and return None. They make all decisions of a hook: whether this is the thread
//! that trains, whether the section is open already, whether the device is timed in this step, whether the
//! optimizer's step counts.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use mainstay_client::SectionId;
use nix::sys::pthread::pthread_self;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use crate::arguments::Call;
use crate::calls::{Fast, definition, entry};
use crate::counters;
use crate::rank;
use crate::section::Section;
use crate::warn;

/// The device is timed in every N-th step: events cost the host time.
const TIMED_EVERY_STEPS: u64 = 4;
/// If no device is in use, the hook checks again after this many steps.
const DEVICE_CHECK_STEPS: u64 = 64;

/// Whether the device is timed in the current step.
static TIMED: AtomicBool = AtomicBool::new(false);
/// The number of optimizer steps that have started.
static STARTED: AtomicU64 = AtomicU64::new(0);

/// The two ends of a section. A section that is entered again within itself is open until it was left as often.
///
/// Its counters are changed by one thread at a time, which holds the interpreter's lock; atomics make
/// this safe without relying on it.
#[pyclass(frozen, module = "mainstay._native")]
pub struct Gate {
    /// None if no page is open: entering and leaving then do nothing.
    id: Option<SectionId>,
    /// The thread whose calls count; none if all threads count.
    thread: Option<usize>,
    open: AtomicU32,
    /// Callables for both ends while the device is timed, and whether the first was called.
    timer: Option<(Py<PyAny>, Py<PyAny>)>,
    timed: AtomicBool,
}

impl Gate {
    fn new(
        section: &Bound<'_, Section>,
        timer: Option<(Py<PyAny>, Py<PyAny>)>,
        thread: Option<usize>,
    ) -> Gate {
        let (open, timed) = (AtomicU32::new(0), AtomicBool::new(false));
        Gate { id: section.get().id(), thread, open, timer, timed }
    }

    #[inline]
    fn concerns_this_thread(&self) -> bool {
        self.thread.is_none_or(|thread| thread == this_thread())
    }

    #[inline]
    fn enter(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open.load(Ordering::Relaxed);
        self.open.store(open.saturating_add(1), Ordering::Relaxed);
        if open != 0 {
            return Ok(());
        }
        if let (Some(client), Some(id)) = (rank::client(), self.id) {
            client.enter(id);
        }
        match &self.timer {
            Some((begin, _)) if TIMED.load(Ordering::Relaxed) => {
                self.timed.store(true, Ordering::Relaxed);
                called(py, begin)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        match self.open.load(Ordering::Relaxed) {
            0 => return Ok(()),
            open => self.open.store(open - 1, Ordering::Relaxed),
        }
        if self.open.load(Ordering::Relaxed) == 0 { self.end(py) } else { Ok(()) }
    }

    /// Leaves it completely: an exception may have skipped its ends.
    #[inline]
    fn leave_entirely(&self, py: Python<'_>) -> PyResult<()> {
        if self.open.swap(0, Ordering::Relaxed) == 0 { Ok(()) } else { self.end(py) }
    }

    #[inline]
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        if let (Some(client), Some(id)) = (rank::client(), self.id) {
            client.leave(id);
        }
        match &self.timer {
            Some((_, end)) if self.timed.load(Ordering::Relaxed) => {
                self.timed.store(false, Ordering::Relaxed);
                called(py, end)
            }
            _ => Ok(()),
        }
    }
}

/// While positive, calls of an optimizer's `step` are no steps of training.
static NO_STEPS: AtomicU32 = AtomicU32::new(0);

/// The work before and after the steps of all optimizers.
#[pyclass(frozen, module = "mainstay._native")]
pub struct Stepping {
    gate: Gate,
    /// Called with the optimizer whose steps count from now on. It must call [`forget_lead`] when that one is freed.
    /// None if no steps are counted.
    follow: Option<Py<PyAny>>,
    /// Returns whether to time the device, or None if no device is in use. None itself if torch was built without
    /// one.
    look: Option<Py<PyAny>>,
    looks_at: AtomicU64,
    steps: AtomicU64,
}

/// The address of the optimizer whose steps count; 0 for none. Only compared.
static LEAD: AtomicUsize = AtomicUsize::new(0);
/// The number of its steps, and those of its predecessors.
static COUNTED: AtomicU64 = AtomicU64::new(0);

impl Stepping {
    fn before(&self, py: Python<'_>) -> PyResult<()> {
        if NO_STEPS.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        STARTED.fetch_add(1, Ordering::Relaxed);
        self.gate.leave_entirely(py)?;
        self.gate.enter(py)
    }

    fn after(&self, py: Python<'_>, optimizer: *mut PyObject) -> PyResult<()> {
        if NO_STEPS.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        self.gate.leave(py)?;
        if let Some(follow) = &self.follow {
            self.count(py, follow, optimizer)?;
        }
        let steps = self.steps.load(Ordering::Relaxed) + 1;
        self.steps.store(steps, Ordering::Relaxed);
        if steps >= self.looks_at.load(Ordering::Relaxed) {
            return self.look(py, steps);
        }
        if TIMED.load(Ordering::Relaxed) {
            TIMED.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Counts the steps of one optimizer. The first one is not reported: only the second shows that the script does
    /// not report steps itself.
    fn count(&self, py: Python<'_>, follow: &Py<PyAny>, optimizer: *mut PyObject) -> PyResult<()> {
        let lead = LEAD.load(Ordering::Relaxed);
        if lead == 0 {
            // SAFETY: the first argument of the current call, alive until it returns.
            let optimizer = unsafe { Borrowed::from_ptr(py, optimizer) };
            if let Err(error) = follow.call1(py, (optimizer,)) {
                return warn::unless_users_own(py, error);
            }
            LEAD.store(optimizer.as_ptr() as usize, Ordering::Relaxed);
        } else if lead != optimizer as usize {
            return Ok(());
        }
        match COUNTED.fetch_add(1, Ordering::Relaxed) {
            0 => {}
            number => drop(counters::hook_step(py, number)),
        }
        Ok(())
    }

    /// Asks whether the next step is timed.
    #[cold]
    fn look(&self, py: Python<'_>, steps: u64) -> PyResult<()> {
        let response = match self
            .look
            .as_ref()
            .map(|look| look.call0(py).and_then(|response| response.extract::<Option<bool>>(py)))
        {
            None => {
                self.looks_at.store(u64::MAX, Ordering::Relaxed);
                return Ok(());
            }
            Some(Err(error)) => return warn::unless_users_own(py, error),
            Some(Ok(response)) => response,
        };
        TIMED.store(response == Some(true), Ordering::Relaxed);
        let again = if response.is_some() { TIMED_EVERY_STEPS } else { DEVICE_CHECK_STEPS };
        self.looks_at.store(steps + again, Ordering::Relaxed);
        Ok(())
    }
}

/// A number that is unique to the calling thread: in some C libraries it is a pointer, which is only compared here.
#[inline]
fn this_thread() -> usize {
    pthread_self() as usize
}

/// Makes a call that must not raise into training.
#[cold]
fn called(py: Python<'_>, call: &Py<PyAny>) -> PyResult<()> {
    match call.call0(py) {
        Ok(_) => Ok(()),
        Err(error) => warn::unless_users_own(py, error),
    }
}

entry!(enter_entry, enter);
entry!(leave_entry, leave);
entry!(before_entry, before);
entry!(after_entry, after);

fn enter(py: Python<'_>, this: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    // SAFETY: made with a Gate as its self in `gate` below, which it holds.
    let gate = unsafe { Borrowed::from_ptr(py, this).cast_unchecked::<Gate>() };
    let gate = gate.get();
    if gate.concerns_this_thread() {
        gate.enter(py)?;
    }
    Ok(py.None())
}

fn leave(py: Python<'_>, this: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    // SAFETY: as in `enter`.
    let gate = unsafe { Borrowed::from_ptr(py, this).cast_unchecked::<Gate>() };
    let gate = gate.get();
    if gate.concerns_this_thread() {
        gate.leave(py)?;
    }
    Ok(py.None())
}

fn before(py: Python<'_>, this: *mut PyObject, _call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    // SAFETY: made with a Stepping as its self in `optimizer_gates` below, which it holds.
    let stepping = unsafe { Borrowed::from_ptr(py, this).cast_unchecked::<Stepping>() };
    stepping.get().before(py)?;
    Ok(py.None())
}

fn after(py: Python<'_>, this: *mut PyObject, call: &Call<'_, '_>) -> PyResult<Py<PyAny>> {
    // SAFETY: as in `before`.
    let stepping = unsafe { Borrowed::from_ptr(py, this).cast_unchecked::<Stepping>() };
    if let Some(optimizer) = call.positional(0) {
        stepping.get().after(py, optimizer.as_ptr())?;
    }
    Ok(py.None())
}

/// A function of C over `this`, which it holds.
fn function(this: &Bound<'_, PyAny>, name: &'static CStr, entry: Fast) -> PyResult<Py<PyAny>> {
    // SAFETY: the definition lives forever; the result is a new reference or null with an exception set.
    unsafe {
        let function =
            ffi::PyCFunction_NewEx(definition(name, entry, c""), this.as_ptr(), std::ptr::null_mut());
        Ok(Bound::from_owned_ptr_or_err(this.py(), function)?.unbind())
    }
}

/// The functions that enter and leave the section from the calling thread, whose calls alone count. `timer`: called
/// at both ends in steps in which the device is timed.
#[pyfunction]
#[pyo3(signature = (section, timer = None))]
fn gate(
    section: &Bound<'_, Section>,
    timer: Option<(Py<PyAny>, Py<PyAny>)>,
) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    let gate = Bound::new(section.py(), Gate::new(section, timer, Some(this_thread())))?.into_any();
    Ok((function(&gate, c"enter", enter_entry)?, function(&gate, c"leave", leave_entry)?))
}

/// The functions to be called before and after each step of an optimizer.
#[pyfunction]
#[pyo3(signature = (section, timer = None, follow = None, look = None))]
fn optimizer_gates(
    section: &Bound<'_, Section>,
    timer: Option<(Py<PyAny>, Py<PyAny>)>,
    follow: Option<Py<PyAny>>,
    look: Option<Py<PyAny>>,
) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    let gate = Gate::new(section, timer, None);
    let (looks_at, steps) = (AtomicU64::new(TIMED_EVERY_STEPS), AtomicU64::new(0));
    let stepping = Bound::new(section.py(), Stepping { gate, follow, look, looks_at, steps })?.into_any();
    Ok((function(&stepping, c"before", before_entry)?, function(&stepping, c"after", after_entry)?))
}

/// The optimizer whose steps count was freed: the next one's count.
#[pyfunction]
fn forget_lead() {
    LEAD.store(0, Ordering::Relaxed);
}

/// From now on, until [`end_no_steps`], an optimizer's `step` is called for another reason than to train.
#[pyfunction]
fn begin_no_steps() {
    NO_STEPS.fetch_add(1, Ordering::Relaxed);
}

/// Ends what [`begin_no_steps`] started.
#[pyfunction]
fn end_no_steps() {
    NO_STEPS.fetch_sub(1, Ordering::Relaxed);
}

/// The number of optimizer steps that have started in this process.
#[pyfunction]
fn optimizer_steps() -> u64 {
    STARTED.load(Ordering::Relaxed)
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(gate, module)?)?;
    module.add_function(wrap_pyfunction!(optimizer_gates, module)?)?;
    module.add_function(wrap_pyfunction!(forget_lead, module)?)?;
    module.add_function(wrap_pyfunction!(begin_no_steps, module)?)?;
    module.add_function(wrap_pyfunction!(end_no_steps, module)?)?;
    module.add_function(wrap_pyfunction!(optimizer_steps, module)?)
}
