//! The program's own log: systemd's journal if it runs under systemd, else standard error.

mod nonblocking;

use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use std::time::Duration;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use nonblocking::Behind;

/// How long the end of a program waits for its last log lines.
pub const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// The queue in front of standard error, once logging has started.
static TERMINAL: OnceLock<Behind> = OnceLock::new();

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Text on standard error; under systemd entries of its journal, with their priorities.
    #[default]
    Text,
    /// The same on a terminal whose last line shows the progress of a job: each entry replaces that line, which is drawn
    /// again.
    OverProgress,
    /// One JSON object per line on standard error: `timestamp`, `level`, `fields.message` and further fields.
    Json,
}

/// Logs from `level` on. A second call has no effect. A terminal that is not read never blocks the caller that
/// logs.
pub fn start(level: LevelFilter, format: Format) {
    let is_text = format != Format::Json;
    let journald = std::env::var_os("JOURNAL_STREAM").filter(|_| is_text);
    let journald = journald.and_then(|_| tracing_journald::layer().ok());
    let behind = move || TERMINAL.get_or_init(|| target(format)).clone();
    let text = (is_text && journald.is_none()).then(|| {
        tracing_subscriber::fmt::layer()
            .with_writer(behind)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .without_time()
    });
    let json = (!is_text).then(|| tracing_subscriber::fmt::layer().json().with_writer(behind));
    let _ = tracing_subscriber::registry().with(level).with(journald).with(text).with(json).try_init();
}

fn target(format: Format) -> Behind {
    match format {
        Format::Text | Format::Json => Behind::start(std::io::stderr()),
        Format::OverProgress => Behind::start(OverProgress(std::io::stderr())),
    }
}

/// Standard error, where another thread may have written a line without an end.
struct OverProgress(std::io::Stderr);

impl Write for OverProgress {
    fn write(&mut self, entry: &[u8]) -> std::io::Result<usize> {
        // In one call, so that the other thread writes nothing in between.
        let mut erased = b"\r\x1b[K".to_vec();
        erased.extend(entry);
        self.0.write_all(&erased)?;
        Ok(entry.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// Waits until all log lines are written, at most this long: the program is about to end.
pub fn flush(patience: Duration) {
    if let Some(behind) = TERMINAL.get() {
        behind.flush(patience);
    }
}
