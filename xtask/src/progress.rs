//! Output for the person at the terminal while the long steps run.

use std::time::Instant;

use anyhow::Result;

/// A numbered story: each step is announced before it starts and timed when it ends.
pub struct Progress {
    began: Instant,
}

impl Progress {
    pub fn begin() -> Self {
        Self { began: Instant::now() }
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
