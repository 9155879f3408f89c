//! The one client of this process, and the calls that happen once per process: open, exit note, close.

use std::sync::OnceLock;

use mainstay_client::{Client, ExitKind, Note};
use pyo3::prelude::*;
use pyo3::types::PyString;

static CLIENT: OnceLock<Client> = OnceLock::new();

/// The client, once [`open`] has run; before that every call of this module does nothing.
#[inline]
pub fn client() -> Option<&'static Client> {
    CLIENT.get()
}

/// Opens the page that the launcher named in the environment. True when this process now beats on it.
///
/// A second call changes nothing: a process is one rank for its whole life.
#[pyfunction]
fn open() -> bool {
    CLIENT.get_or_init(|| Client::from_env_as("python")).is_active()
}

/// Why a page that the environment names is not used; `None` if there is no problem.
#[pyfunction]
fn refusal() -> Option<String> {
    client()?.refusal().map(|error| error.to_string())
}

/// Leaves a note on the uncaught exception that ends this process in the page. False if there is no page.
///
/// Lone surrogates, which a message may hold and UTF-8 cannot, are replaced.
#[pyfunction]
fn exit_note(
    exception: &Bound<'_, PyString>,
    message: &Bound<'_, PyString>,
    traceback: &Bound<'_, PyString>,
) -> bool {
    let Some(client) = client().filter(|client| client.is_active()) else {
        return false;
    };
    client.exit_note(&Note {
        kind: ExitKind::Exception,
        exception: &exception.to_string_lossy(),
        message: &message.to_string_lossy(),
        traceback: &traceback.to_string_lossy(),
    });
    true
}

/// Records in the page that this rank starts again in its process.
#[pyfunction]
fn begin_round() {
    if let Some(client) = client() {
        client.begin_round();
    }
}

/// Records in the page that this process ends on purpose.
#[pyfunction]
fn close() {
    if let Some(client) = client() {
        client.close();
    }
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(open, module)?)?;
    module.add_function(wrap_pyfunction!(refusal, module)?)?;
    module.add_function(wrap_pyfunction!(exit_note, module)?)?;
    module.add_function(wrap_pyfunction!(begin_round, module)?)?;
    module.add_function(wrap_pyfunction!(close, module)?)
}
