//! Errors between a launcher and the store. Each names the endpoint, the operation and what to do.

use std::io;
use std::path::PathBuf;

/// A failed operation on the coordination store.
#[derive(Debug, thiserror::Error)]
pub enum CoordError {
    /// The text is not an endpoint.
    #[error("endpoint {text:?}: {why}; write HOST:PORT, http://HOST:PORT or https://HOST:PORT")]
    Endpoint {
        /// The given text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A setting is unusable.
    #[error("{what}: {why}")]
    Setting {
        /// The setting.
        what: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A file cannot be read or has the wrong content.
    #[error("{}: {why}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No endpoint answered before the deadline. Nothing was changed, or a repetition changes nothing more.
    #[error(
        "{operation}: no endpoint of the coordination store answered ({tried}); training goes on, check the store and the network"
    )]
    Unreachable {
        /// What was asked.
        operation: &'static str,
        /// Each endpoint with its failure.
        tried: String,
    },
    /// The answer to a transaction was lost: it may have been applied or not.
    #[error(
        "{operation} at {endpoint}: the answer was lost ({why}), so it may have been applied; read before you repeat it"
    )]
    Unsure {
        /// What was asked.
        operation: &'static str,
        /// Who was asked.
        endpoint: String,
        /// What happened to the answer.
        why: String,
    },
    /// The store refuses this client.
    #[error(
        "{operation} at {endpoint}: refused ({why}); check the job's token, or user, password and certificate of the store"
    )]
    Refused {
        /// What was asked.
        operation: &'static str,
        /// Who refused.
        endpoint: String,
        /// The message of the store.
        why: String,
    },
    /// The store answered with an error that a repetition does not fix.
    #[error("{operation} at {endpoint}: {code}: {why}")]
    Store {
        /// What was asked.
        operation: &'static str,
        /// Who answered.
        endpoint: String,
        /// The gRPC code.
        code: &'static str,
        /// The message of the store.
        why: String,
    },
    /// The lease has ended, and its keys are removed.
    #[error("{operation}: the lease {lease:x} has ended; join again")]
    LeaseLost {
        /// What was asked.
        operation: &'static str,
        /// The lease.
        lease: i64,
    },
    /// Another launcher leads the job.
    #[error("{operation}: refused, this launcher led epoch {epoch} and now {} leads; stop giving orders", by.as_deref().unwrap_or("no other launcher yet"))]
    Superseded {
        /// What was asked.
        operation: &'static str,
        /// The epoch of the leadership that ended.
        epoch: u64,
        /// Launch and epoch of the current leader.
        by: Option<String>,
    },
    /// The job has ended; its keys are removed.
    #[error("{operation}: the job has ended ({why})")]
    Ended {
        /// What was asked.
        operation: &'static str,
        /// Why it ended.
        why: String,
    },
    /// A key has a value that this version cannot read.
    #[error("{key}: {why}; run the same version of mainstay on all hosts of the job")]
    Unreadable {
        /// The key.
        key: String,
        /// What is wrong with its value.
        why: String,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Its error.
        source: io::Error,
    },
}

impl CoordError {
    /// No endpoint answered: the store is down or unreachable. Training goes on; no decision can be made.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, CoordError::Unreachable { .. })
    }

    /// The answer to a transaction was lost: read before repeating it.
    #[must_use]
    pub fn is_unsure(&self) -> bool {
        matches!(self, CoordError::Unsure { .. })
    }

    /// The token, user, password or certificate was refused.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, CoordError::Refused { .. })
    }

    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> CoordError {
        CoordError::Io { what: what.into(), source }
    }

    pub(crate) fn file(path: &std::path::Path, why: impl std::fmt::Display) -> CoordError {
        CoordError::File { path: path.to_owned(), why: why.to_string() }
    }
}
