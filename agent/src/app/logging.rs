//! The program's own log: the journal of systemd where it runs under it, else standard error.

use std::io::IsTerminal;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Logs from `level` on. A second call changes nothing.
pub fn start(level: LevelFilter) {
    let journald = std::env::var_os("JOURNAL_STREAM").and_then(|_| tracing_journald::layer().ok());
    let terminal = journald.is_none().then(|| {
        let ansi = std::io::stderr().is_terminal();
        tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(ansi)
            .with_target(false)
            .without_time()
    });
    let _ = tracing_subscriber::registry().with(level).with(journald).with(terminal).try_init();
}
