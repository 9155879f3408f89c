//! The program's own log: systemd's journal if it runs under systemd, else standard error.

mod nonblocking;

use std::io::IsTerminal;
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
    /// One JSON object per line on standard error: `timestamp`, `level`, `fields.message` and further fields.
    Json,
}

/// Logs from `level` on. A second call has no effect. A terminal that is not read never blocks the caller that
/// logs.
pub fn start(level: LevelFilter, format: Format) {
    let is_text = format == Format::Text;
    let journald = std::env::var_os("JOURNAL_STREAM").filter(|_| is_text);
    let journald = journald.and_then(|_| tracing_journald::layer().ok());
    let behind = || TERMINAL.get_or_init(|| Behind::start(std::io::stderr())).clone();
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

/// Waits until all log lines are written, at most this long: the program is about to end.
pub fn flush(patience: Duration) {
    if let Some(behind) = TERMINAL.get() {
        behind.flush(patience);
    }
}
