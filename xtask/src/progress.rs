//! Output for the person at the terminal while the long steps run.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Result;

/// A numbered story: each step is announced before it starts and timed when it ends.
pub struct Progress {
    began: Instant,
}

impl Progress {
    /// Starts to count the time.
    pub fn begin() -> Self {
        Self { began: Instant::now() }
    }

    /// The time since the start.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Prints a step and the reason, runs it, and prints how long it took.
    pub fn step<T>(&self, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("[{:6.1} s] {what}", self.began.elapsed().as_secs_f64());
        let started = Instant::now();
        let result = work();
        let took = started.elapsed().as_secs_f64();
        let outcome = if result.is_ok() { "done" } else { "FAILED" };
        println!("[{:6.1} s]   {outcome} in {took:.1} s", self.began.elapsed().as_secs_f64());
        result
    }

    /// One line that is not a step.
    pub fn note(&self, what: &str) {
        println!("[{:6.1} s] {what}", self.began.elapsed().as_secs_f64());
    }
}

/// A line that is overwritten in place on a terminal, and printed now and then elsewhere.
pub struct LiveLine {
    terminal: bool,
    every: Duration,
    last: Option<Instant>,
    open: bool,
}

impl LiveLine {
    /// Prints at most once per `every` if the line cannot be overwritten.
    pub fn new(every: Duration) -> Self {
        Self { terminal: io::stdout().is_terminal(), every, last: None, open: false }
    }

    /// Shows the newest state.
    pub fn show(&mut self, text: &str) {
        if self.terminal {
            print!("\r\x1b[2K{text}");
            // A missing frame on a terminal does no harm.
            let _ = io::stdout().flush();
            self.open = true;
        } else if self.last.is_none_or(|last| last.elapsed() >= self.every) {
            println!("{text}");
            self.last = Some(Instant::now());
        }
    }

    /// Prints a line that stays.
    pub fn keep(&mut self, text: &str) {
        self.close();
        println!("{text}");
    }

    /// Leaves the last state on the terminal.
    pub fn close(&mut self) {
        if self.open {
            println!();
            self.open = false;
        }
    }
}
