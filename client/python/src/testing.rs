//! For our tests and those of integrators of the client: makes a heartbeat page as a launcher does, and reads one
//! as an agent does. Not part of the package's public API.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

use mainstay_heartbeat::{Claim, ExitKind, Operation, Page, PageSpec, PageWords, StepRecord, format};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Writes a fresh page to `path`, aside and then renamed as a launcher does. `now` is `time.monotonic_ns()`.
#[pyfunction]
#[pyo3(signature = (path, *, now, job = "test", rank = 0, local_rank = 0, world_size = 1, attempt = 0))]
fn _testing_format_page(
    path: PathBuf,
    now: u64,
    job: &str,
    rank: u32,
    local_rank: u32,
    world_size: u32,
    attempt: u32,
) -> PyResult<()> {
    let bytes = format(&PageSpec {
        job,
        rank,
        local_rank,
        world_size,
        attempt,
        boot_id: boot_id()?,
        creator_pid: std::process::id(),
        created_mono_ns: now,
    });
    let aside = path.with_extension("new");
    fs::write(&aside, bytes)?;
    Ok(fs::rename(&aside, &path)?)
}

/// The content of the page at `path`, as a dict: `identity`, `claim`, `refusal`, `beat`, `records`, `exit_note`,
/// `collectives`, `skipped`.
///
/// Do not call it in the process that writes the page: closing the file would drop the lock that marks it as taken.
#[pyfunction]
fn _testing_read_page(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let words = words_of(&fs::read(&path)?)?;
    let page = Page::new(&words).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let fields = PyDict::new(py);

    let identity = page.identity();
    let who = PyDict::new(py);
    who.set_item("job", identity.job)?;
    who.set_item("rank", identity.rank)?;
    who.set_item("local_rank", identity.local_rank)?;
    who.set_item("world_size", identity.world_size)?;
    who.set_item("attempt", identity.attempt)?;
    fields.set_item("identity", who)?;
    fields.set_item("claim", claim(py, &page)?)?;
    fields.set_item("refusal", page.refusal().map(|refusal| format!("{:?}", refusal.reason)))?;
    fields.set_item("beat", beat(py, &page)?)?;

    let mut records = Vec::new();
    page.records_since(0, &mut records);
    let listed = PyList::empty(py);
    for each in &records {
        listed.append(record(py, &page, each)?)?;
    }
    fields.set_item("records", listed)?;
    fields.set_item("exit_note", note(py, &page)?)?;
    let collectives = PyList::empty(py);
    for each in page.collectives() {
        let counters = PyDict::new(py);
        counters.set_item("comm", each.comm)?;
        counters.set_item("entered", each.entered)?;
        counters.set_item("completed", each.completed)?;
        let operation = Operation::of_signature(each.signature);
        counters
            .set_item("operation", operation.map(|operation| (operation.kind.name(), operation.bytes)))?;
        collectives.append(counters)?;
    }
    fields.set_item("collectives", collectives)?;
    fields.set_item("skipped", page.counters().skipped)?;
    Ok(fields)
}

fn claim<'py>(py: Python<'py>, page: &Page<'_>) -> PyResult<Bound<'py, PyDict>> {
    let (state, claimant) = match page.claim() {
        Claim::Claimed(claimant) => ("claimed", Some(claimant)),
        Claim::Closed { by, .. } => ("closed", Some(by)),
        Claim::Refused(_) => ("refused", None),
        _ => ("unclaimed", None),
    };
    let fields = PyDict::new(py);
    fields.set_item("state", state)?;
    if let Some(claimant) = claimant {
        fields.set_item("pid", claimant.pid)?;
        fields.set_item("version", claimant.version)?;
        fields.set_item("language", claimant.language)?;
        let role = page.role();
        fields.set_item("role", role.as_ref().map(|role| role.name.clone()))?;
        fields.set_item("stage", role.and_then(|role| role.stage))?;
        fields.set_item("data", page.data())?;
        fields.set_item("total_steps", page.total_steps())?;
        fields.set_item("claims", claimant.claims)?;
    }
    Ok(fields)
}

fn beat<'py>(py: Python<'py>, page: &Page<'_>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(beat) = page.beat() else { return Ok(None) };
    let fields = PyDict::new(py);
    fields.set_item("count", beat.count)?;
    fields.set_item("mono_ns", beat.mono_ns)?;
    fields.set_item("step", beat.step)?;
    fields.set_item("loss", beat.loss)?;
    fields.set_item("grad_norm", beat.grad_norm)?;
    fields.set_item("digest", beat.digest)?;
    fields.set_item("quiet_until_ns", beat.quiet_until_ns)?;
    let open: Vec<_> = beat.open_sections().iter().map(|section| page.section_name(section.id)).collect();
    fields.set_item("sections", open)?;
    Ok(Some(fields))
}

fn record<'py>(py: Python<'py>, page: &Page<'_>, record: &StepRecord) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("step", record.step)?;
    fields.set_item("start_mono_ns", record.start_mono_ns)?;
    fields.set_item("end_mono_ns", record.end_mono_ns)?;
    fields.set_item("loss", record.loss)?;
    fields.set_item("grad_norm", record.grad_norm)?;
    fields.set_item("digest", record.digest)?;
    let sections = PyDict::new(py);
    for spent in record.sections() {
        sections.set_item(page.section_name(spent.id), spent.ns)?;
    }
    fields.set_item("sections", sections)?;
    fields.set_item("more_sections", record.overflow)?;
    Ok(fields)
}

fn note<'py>(py: Python<'py>, page: &Page<'_>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(note) = page.exit_note() else { return Ok(None) };
    let kind = match note.kind {
        ExitKind::Exception => "exception",
        ExitKind::Clean => "clean",
        _ => "other",
    };
    let fields = PyDict::new(py);
    fields.set_item("kind", kind)?;
    fields.set_item("step", note.step)?;
    fields.set_item("exception", note.exception)?;
    fields.set_item("message", note.message)?;
    fields.set_item("message_cut", note.message_cut)?;
    fields.set_item("traceback", note.traceback)?;
    fields.set_item("traceback_cut", note.traceback_cut)?;
    Ok(Some(fields))
}

fn words_of(bytes: &[u8]) -> PyResult<Box<PageWords>> {
    let words: Box<[AtomicU64]> =
        bytes.as_chunks::<8>().0.iter().map(|word| AtomicU64::new(u64::from_ne_bytes(*word))).collect();
    words.try_into().map_err(|words: Box<[AtomicU64]>| {
        PyValueError::new_err(format!("a file of {} words is not a heartbeat page", words.len()))
    })
}

/// `/proc/sys/kernel/random/boot_id` as bytes.
fn boot_id() -> PyResult<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(|error| PyValueError::new_err(format!("/proc/sys/kernel/random/boot_id: {error}")))
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_testing_format_page, module)?)?;
    module.add_function(wrap_pyfunction!(_testing_read_page, module)?)
}
