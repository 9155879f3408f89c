//! A line that is overwritten in place on a terminal, and printed now and then elsewhere.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use crate::output;

/// Without a terminal, a new state is printed at most this often.
const MIN_LINE_INTERVAL: Duration = Duration::from_secs(2);

pub(super) struct LiveLine {
    terminal: bool,
    last: Option<Instant>,
    open: bool,
}

impl LiveLine {
    pub(super) fn new() -> LiveLine {
        LiveLine { terminal: io::stdout().is_terminal(), last: None, open: false }
    }

    /// Shows the newest state.
    pub(super) fn show(&mut self, text: &str) {
        if self.terminal {
            // A missing frame on a terminal does no harm.
            drop(output::print_after("\r\x1b[2K", text));
            self.open = true;
        } else if self.last.is_none_or(|last| last.elapsed() >= MIN_LINE_INTERVAL) {
            say!("{text}");
            self.last = Some(Instant::now());
        }
    }

    /// Prints a line that stays.
    pub(super) fn keep(&mut self, text: &str) {
        self.close();
        say!("{text}");
    }

    /// Leaves the last state on the terminal.
    pub(super) fn close(&mut self) {
        if self.open {
            say!("");
            self.open = false;
        }
    }
}
