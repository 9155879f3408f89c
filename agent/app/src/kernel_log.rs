//! Reads the kernel log on a separate thread, which blocks on the kernel: an XID is known as soon as it is written.

use std::io::{PipeReader, PipeWriter};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::kernel_reports::LogState;
use mainstay_model::id::BootId;
use mainstay_model::kernel::LogCursor;
use mainstay_model::time::{Mono, Span};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc;

use mainstay_journal::state::Roster;
use mainstay_journal::store::value_file::ValueFile;
use mainstay_node::{Input, LogReport};
use mainstay_sensors::source::journald::JOURNALCTL;
use mainstay_sensors::source::kernel_log::{Source, SourceError};
use mainstay_sys::clock;

/// The sensor's name on the roster.
const SENSOR: &str = "kernel log";

/// How long to wait before a log that cannot be read is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Maximum wait, so that lines held back during a storm are reported after it.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// How often a report contains nothing but the position in the log: the node evaluates all hardware with each
/// report.
const CURSOR_EVERY: Duration = Duration::from_secs(1);

/// In a storm, how long lines are collected: waking up for each line would cost more than reading it. At 100,000
/// lines a second this is a third of the smallest kernel buffer (256 KiB).
const GATHERING: Duration = Duration::from_millis(5);

/// Lines per second that count as a storm. Below that, each line is read and reported at once.
const STORM_LINES_PER_SECOND: u64 = 2000;

/// The period over which lines are counted for that.
const PACE_OVER: Span = Span(20_000_000);

/// Maximum time between two reports that the log is still read.
pub const LONGEST_SILENCE: Span = Span::seconds(10);

/// A log that is being read; reading ends when this is dropped.
#[derive(Debug)]
pub struct Following {
    _stop: PipeWriter,
}

/// Reads the configured log from `cursor` on and reports to the node. `kept` is the file of cursors.
///
/// # Errors
/// The kernel provides no more threads or descriptors.
pub fn follow(
    path: &Path,
    boot: BootId,
    cursor: Option<LogCursor>,
    kept: ValueFile<LogCursor>,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
) -> std::io::Result<Following> {
    let (stop, stop_writer) = std::io::pipe()?;
    roster.starts(SENSOR, clock::mono());
    let follower =
        Follower { path: path.to_owned(), boot, cursor, kept, inputs, abreast: false, absent: false, stop };
    std::thread::Builder::new().name("kernel log".to_owned()).spawn(move || follower.run())?;
    Ok(Following { _stop: stop_writer })
}

/// The node no longer receives reports.
struct Gone;

struct Follower {
    path: PathBuf,
    boot: BootId,
    cursor: Option<LogCursor>,
    kept: ValueFile<LogCursor>,
    inputs: mpsc::Sender<Input>,
    /// The node knows that the log has been read to its end.
    abreast: bool,
    /// It was logged that there is no log.
    absent: bool,
    stop: PipeReader,
}

impl Follower {
    fn run(mut self) {
        while !self.stopped(Duration::ZERO) {
            match self.read_while_it_can() {
                Ok(()) | Err(LogError::Gone) => return,
                Err(LogError::Log(error)) => {
                    if self.without_log(error.state()).is_err() {
                        return;
                    }
                    if self.is_abreast().is_err() || self.stopped(RETRY_AFTER) {
                        return;
                    }
                }
            }
        }
    }

    fn read_while_it_can(&mut self) -> Result<(), LogError> {
        let mut log =
            Source::open(&self.path, Path::new(JOURNALCTL), self.boot.clone(), self.cursor.as_ref())?;
        self.keep_beginning(log.cursor());
        let (mut reported, mut reported_at) = (None, clock::mono());
        let mut pace = Pace::default();
        while !self.stopped(Duration::ZERO) {
            let batch = log.read(clock::mono())?;
            let more = batch.more;
            pace.count(clock::mono(), batch.lines);
            let since_report = clock::mono().since(reported_at);
            let silent = since_report >= LONGEST_SILENCE;
            let Some(state) = log.state() else {
                if silent && let Some(doubt) = log.doubt() {
                    reported_at = clock::mono();
                    self.without_log(doubt)?;
                    self.is_abreast()?;
                }
                log.wait(&self.stop, LONGEST_WAIT)?;
                continue;
            };
            // Lines that are no facts move the cursor too; reporting that can wait until there is nothing to read,
            // and some time longer.
            let moved = reported.as_ref() != Some(log.cursor());
            let due = reported.is_none() || Duration::from_nanos(since_report.0) >= CURSOR_EVERY;
            if !batch.facts.is_empty() || (!more && (silent || (moved && due))) {
                reported_at = clock::mono();
                reported = Some(log.cursor().clone());
                self.cursor.clone_from(&reported);
                self.report(LogReport { state, facts: batch.facts, cursor: reported.clone() })?;
            }
            if !more {
                self.is_abreast()?;
                let to_report = reported.as_ref() != Some(log.cursor());
                log.wait(&self.stop, if to_report { CURSOR_EVERY } else { LONGEST_WAIT })?;
                if pace.is_storm(clock::mono()) {
                    self.stopped(GATHERING);
                }
            }
        }
        Ok(())
    }

    /// Stores the starting position in a new log before a line of it is reported. From there on the journal has the
    /// position. An agent that is killed before it stores the next cursor would otherwise read the log from its
    /// start again and report each fault as new.
    fn keep_beginning(&mut self, starts: &LogCursor) {
        let same_log = |kept: &LogCursor| kept.boot == starts.boot && kept.log == starts.log;
        if !self.kept.value().is_some_and(same_log)
            && let Err(error) = self.kept.keep(starts)
        {
            tracing::debug!(%error, "the start of the kernel log cannot be kept");
        }
    }

    /// Waits for the node when it is behind: no line is dropped, and the kernel keeps the rest.
    fn report(&self, report: LogReport) -> Result<(), Gone> {
        self.inputs.blocking_send(Input::KernelLog(report)).map_err(|_| Gone)
    }

    /// Reports that no log is read.
    fn without_log(&mut self, state: LogState) -> Result<(), Gone> {
        if let LogState::Absent(why) = &state
            && !std::mem::replace(&mut self.absent, true)
        {
            tracing::warn!("XIDs, machine checks and OOM kills of the kernel's log are not seen here: {why}");
        }
        self.report(LogReport { state, facts: Vec::new(), cursor: self.cursor.clone() })
    }

    /// Everything available has been read, or the log is known to be unreadable.
    fn is_abreast(&mut self) -> Result<(), Gone> {
        if std::mem::replace(&mut self.abreast, true) {
            return Ok(());
        }
        let looked = Input::Looked { sensor: SENSOR.to_owned(), components: Vec::new() };
        self.inputs.blocking_send(looked).map_err(|_| Gone)
    }

    /// Waits for the stop, at most this long.
    fn stopped(&self, longest: Duration) -> bool {
        let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        matches!(poll(&mut [PollFd::new(&self.stop, PollFlags::IN)], Some(&timeout)), Ok(1..))
    }
}

/// The rate of lines.
#[derive(Debug, Default)]
struct Pace {
    since: Mono,
    /// When lines were last counted.
    last: Mono,
    lines: u64,
    storm: bool,
}

impl Pace {
    fn count(&mut self, now: Mono, lines: u64) {
        // After a pause counting starts again: lines before it do not matter now.
        if now.since(std::mem::replace(&mut self.last, now)) >= PACE_OVER {
            *self = Pace { since: now, last: now, ..Pace::default() };
        }
        self.lines = self.lines.saturating_add(lines);
        let over = now.since(self.since);
        if over >= PACE_OVER {
            self.storm = u128::from(self.lines) * 1_000_000_000
                >= u128::from(STORM_LINES_PER_SECOND) * u128::from(over.0);
            (self.since, self.lines) = (now, 0);
        }
    }

    /// Whether lines came at storm rate, and just now.
    fn is_storm(&self, now: Mono) -> bool {
        self.storm && now.since(self.since) < PACE_OVER
    }
}

enum LogError {
    Log(SourceError),
    Gone,
}

impl From<SourceError> for LogError {
    fn from(error: SourceError) -> LogError {
        LogError::Log(error)
    }
}

impl From<Gone> for LogError {
    fn from(_: Gone) -> LogError {
        LogError::Gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Mono {
        Mono(millis * 1_000_000)
    }

    #[test]
    fn single_lines_are_no_storm_however_close_they_are() {
        let mut pace = Pace::default();
        for millis in 0..1000 {
            pace.count(at(millis), 1);
            assert!(!pace.is_storm(at(millis)), "{millis}");
        }
    }

    #[test]
    fn a_storm_is_one_while_it_lasts() {
        let mut pace = Pace::default();
        for millis in (0..100).step_by(5) {
            pace.count(at(1000 + millis), 500);
        }
        assert!(pace.is_storm(at(1095)));
        assert!(!pace.is_storm(at(1200)), "what comes after a pause is reported at once");
        pace.count(at(1200), 1);
        assert!(!pace.is_storm(at(1200)));
    }
}
