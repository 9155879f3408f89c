//! What can go wrong between a launcher and the store: every error names the endpoint, the operation and what to do.

use std::io;
use std::path::PathBuf;

/// An operation on the coordination store did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum CoordError {
    /// The text is not an endpoint.
    #[error("endpoint {text:?}: {why}; write HOST:PORT, http://HOST:PORT or https://HOST:PORT")]
    Endpoint {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A setting is unusable.
    #[error("{what}: {why}")]
    Setting {
        /// Which one.
        what: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A file cannot be read or holds something else.
    #[error("{}: {why}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No endpoint answered before the deadline. Nothing was changed, or repeating it changes nothing more.
    #[error(
        "{operation}: no endpoint of the coordination store answered ({tried}); training goes on, check the store and the network"
    )]
    Unreachable {
        /// What was asked.
        operation: &'static str,
        /// Each endpoint with what happened there.
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
        /// The store's words.
        why: String,
    },
    /// The store answered with an error that repeating does not cure.
    #[error("{operation} at {endpoint}: {code}: {why}")]
    Store {
        /// What was asked.
        operation: &'static str,
        /// Who answered.
        endpoint: String,
        /// The code of gRPC.
        code: &'static str,
        /// The store's words.
        why: String,
    },
    /// The lease is gone, and its keys with it.
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
    /// A key holds what this version cannot read.
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
    /// No endpoint answered: the store is gone or cut off. Training goes on; nothing can be decided.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, CoordError::Unreachable { .. })
    }

    /// A transaction whose answer was lost: read before it is repeated.
    #[must_use]
    pub fn is_unsure(&self) -> bool {
        matches!(self, CoordError::Unsure { .. })
    }

    /// Token, user, password or certificate were refused.
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
