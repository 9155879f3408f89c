//! The source of the kernel's lines: its log, or systemd's journal if we cannot open the log.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use mainstay_health::host::kernel_reports::LogState;
use mainstay_model::id::BootId;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::Mono;

use super::journald::{JOURNALD, Journald, JournaldError};
use super::kmsg::{Batch, KernelLog, LogError};

/// No source can be read.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The journal.
    #[error("{0}; set kernel_log.path to another log, or to \"\" to do without")]
    Journald(#[from] JournaldError),
    /// The log, and then the journal.
    #[error("{log}; nor is the journal read: {journal}")]
    Both {
        /// Why the log is not read.
        log: NoLog,
        /// The error of the journal.
        journal: JournaldError,
    },
}

/// Why a kernel's log is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoLog {
    why: String,
    /// There is no such file, as in a container: nobody has to repair anything.
    is_missing: bool,
}

impl std::fmt::Display for NoLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.why)
    }
}

impl SourceError {
    /// What to report of a log that cannot be read for this reason.
    pub fn state(&self) -> LogState {
        match self {
            SourceError::Both { log, .. } if log.is_missing => LogState::Absent(self.to_string()),
            _ => LogState::Unreadable(self.to_string()),
        }
    }
}

/// The source in use.
#[derive(Debug)]
pub enum Source {
    /// The kernel's log, or a file or pipe instead of it.
    Log(KernelLog),
    /// The journal, and why the log is not used.
    Journald(Journald, Option<NoLog>),
}

impl Source {
    /// Opens the log at `path` and reads on from `cursor`. The path `journald` selects the journal. The journal also
    /// replaces a kernel's log (a path that ends in `kmsg`) that does not exist or may not be opened. `journalctl` is its
    /// program.
    ///
    /// # Errors
    /// No source can be read; try again after a while.
    pub fn open(
        path: &Path,
        journalctl: &Path,
        boot: BootId,
        cursor: Option<&LogCursor>,
    ) -> Result<Source, SourceError> {
        if path == Path::new(JOURNALD) {
            return Ok(Source::Journald(Journald::start(journalctl, boot, cursor)?, None));
        }
        let error = match KernelLog::open(path, boot.clone(), cursor) {
            Ok(log) => return Ok(Source::Log(log)),
            Err(error) => error,
        };
        // A file that the user named is never replaced.
        if !error.is_kept_from_us() || !path.ends_with("kmsg") {
            return Err(error.into());
        }
        let log = NoLog { why: error.to_string(), is_missing: error.is_missing() };
        match Journald::start(journalctl, boot, cursor) {
            Ok(journald) => Ok(Source::Journald(journald, Some(log))),
            Err(journal) => Err(SourceError::Both { log, journal }),
        }
    }

    /// Whether it can be read; none while that is unknown.
    pub fn state(&self) -> Option<LogState> {
        match self {
            Source::Log(_) => Some(LogState::Reading),
            Source::Journald(journald, _) if journald.doubt().is_some() => None,
            Source::Journald(_, None) => Some(LogState::Reading),
            Source::Journald(_, Some(why)) => {
                Some(LogState::ReadingInstead(format!("systemd's journal is read instead: {why}")))
            }
        }
    }

    /// What to report if it is still unknown whether it can be read.
    pub fn doubt(&self) -> Option<LogState> {
        let Source::Journald(journald, why) = self else { return None };
        let doubt = journald.doubt()?;
        Some(match why {
            Some(log) if log.is_missing => LogState::Absent(format!("{log}; {doubt}")),
            Some(log) => LogState::Unreadable(format!("{log}; {doubt}")),
            None => LogState::Unreadable(doubt),
        })
    }

    /// The position up to which it was read.
    pub fn cursor(&self) -> &LogCursor {
        match self {
            Source::Log(log) => log.cursor(),
            Source::Journald(journald, _) => journald.cursor(),
        }
    }

    /// Reads the available lines, up to a batch. Does not wait.
    ///
    /// # Errors
    /// It cannot be read, or no longer; open it again after a while.
    pub fn read(&mut self, now: Mono) -> Result<Batch, SourceError> {
        match self {
            Source::Log(log) => Ok(log.read(now)?),
            Source::Journald(journald, why) => journald.read(now).map_err(|journal| match why {
                Some(log) => SourceError::Both { log: log.clone(), journal },
                None => journal.into(),
            }),
        }
    }

    /// Waits until there may be more, `stop` ends or `longest` is over.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn wait(&self, stop: &impl AsFd, longest: Duration) -> Result<(), SourceError> {
        match self {
            Source::Log(log) => Ok(log.wait(stop, longest)?),
            Source::Journald(journald, _) => Ok(journald.wait(stop, longest)?),
        }
    }
}
