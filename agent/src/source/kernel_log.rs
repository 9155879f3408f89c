//! Where the kernel's lines come from: its own log, or systemd's journal where that is kept from us.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use mainstay_core::base::id::BootId;
use mainstay_core::base::time::Mono;
use mainstay_core::formats::parse::log::LogLimits;
use mainstay_core::host::kernel_reports::LogState;
use mainstay_core::model::kernel::LogCursor;

use super::journald::{JOURNALD, Journald, JournaldError};
use super::kmsg::{Batch, KernelLog, LogError};

/// Neither can be read.
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
        /// Why not the log.
        log: String,
        /// Why not the journal.
        journal: JournaldError,
    },
}

/// What is read.
#[derive(Debug)]
pub enum Source {
    /// The kernel's log, or a file or pipe in its place.
    Log(KernelLog),
    /// The journal, and why the log is not.
    Journald(Journald, Option<String>),
}

impl Source {
    /// Opens the log at `path`, to be read on from `cursor`. `journald` is the journal; it also stands in for a
    /// kernel's log (a path that ends in `kmsg`) that is not there or may not be opened. `journalctl` is its program.
    ///
    /// # Errors
    /// Neither can be read; it is to be tried again after a while.
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
        // A file that a person named is that file or none.
        if !error.is_kept_from_us() || !path.ends_with("kmsg") {
            return Err(error.into());
        }
        match Journald::start(journalctl, boot, cursor) {
            Ok(journald) => Ok(Source::Journald(journald, Some(error.to_string()))),
            Err(journal) => Err(SourceError::Both { log: error.to_string(), journal }),
        }
    }

    /// The source with other limits on storms than the default ones.
    pub fn limited(self, limits: LogLimits) -> Source {
        match self {
            Source::Log(log) => Source::Log(log.limited(limits)),
            Source::Journald(mut journald, why) => {
                journald.limit(limits);
                Source::Journald(journald, why)
            }
        }
    }

    /// Whether it is read; none while that is not known.
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

    /// What is to be said when it is still not known whether it is read.
    pub fn doubt(&self) -> Option<LogState> {
        let Source::Journald(journald, why) = self else { return None };
        let doubt = journald.doubt()?;
        let why = why.as_ref().map_or(String::new(), |why| format!("{why}; "));
        Some(LogState::Unreadable(format!("{why}{doubt}")))
    }

    /// How far it was read.
    pub fn cursor(&self) -> &LogCursor {
        match self {
            Source::Log(log) => log.cursor(),
            Source::Journald(journald, _) => journald.cursor(),
        }
    }

    /// Reads what there is, up to a batch. Does not wait.
    ///
    /// # Errors
    /// It cannot be read (any more); it is to be opened again after a while.
    pub fn read(&mut self, now: Mono) -> Result<Batch, SourceError> {
        match self {
            Source::Log(log) => Ok(log.read(now)?),
            Source::Journald(journald, why) => journald.read(now).map_err(|journal| match why {
                Some(log) => SourceError::Both { log: log.clone(), journal },
                None => journal.into(),
            }),
        }
    }

    /// Waits until there may be more, until `stop` ends or until `longest` has passed.
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
