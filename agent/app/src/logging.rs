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
pub const PATIENCE: Duration = Duration::from_millis(500);

/// The queue in front of standard error, once logging has started.
static TERMINAL: OnceLock<Behind> = OnceLock::new();

/// Logs from `level` on. A second call has no effect. A terminal that is not read never blocks the caller that
/// logs.
pub fn start(level: LevelFilter) {
    let journald = std::env::var_os("JOURNAL_STREAM").and_then(|_| tracing_journald::layer().ok());
    let terminal = journald.is_none().then(|| {
        let ansi = std::io::stderr().is_terminal();
        let behind = TERMINAL.get_or_init(|| Behind::start(std::io::stderr()));
        tracing_subscriber::fmt::layer()
            .with_writer(|| behind.clone())
            .with_ansi(ansi)
            .with_target(false)
            .without_time()
    });
    let _ = tracing_subscriber::registry().with(level).with(journald).with(terminal).try_init();
}

/// Waits until all log lines are written, at most this long: the program is about to end.
pub fn flush(patience: Duration) {
    if let Some(behind) = TERMINAL.get() {
        behind.flush(patience);
    }
}
