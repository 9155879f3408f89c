//! Drills: faults that a person injects into a job that opted in. The launcher sets signals and limits through the kernel.
//! A fault inside a rank's program is injected by its client, which listens on a separate socket in such jobs only.

mod inject;
mod simulated_gpu;

use std::fmt;

use mainstay_model::id::Rank;
use mainstay_recovery::in_process::Call;

use crate::ranks::round_server::RoundServer;

/// Faults for ranks, in a job that opted in.
#[derive(Debug, Default)]
pub(crate) struct Drill {
    /// Where ranks receive them.
    pub(crate) server: Option<RoundServer>,
    /// Those that wait for their step.
    pub(crate) due: Vec<(Injected, Rank)>,
}

/// A fault for a rank, and when to inject it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Injected {
    /// The fault.
    pub fault: Fault,
    /// Inject after the rank has completed this step; none for at once.
    pub at_step: Option<u64>,
}

/// A fault for a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// A signal is sent to its process.
    Signal {
        /// The signal number.
        signal: i32,
        /// Its word in the journal.
        word: &'static str,
    },
    /// None of its files can grow.
    DiskFull,
    /// Its main thread raises an exception.
    Exception,
    /// Its main thread stops for good: the others wait for it in their next collective.
    Hang,
    /// Its program runs only for the rest of each interval.
    Slow {
        /// The share that it loses, in percent.
        percent: u32,
    },
    /// Its connections to other ranks break.
    Network,
    /// Its GPU has an uncorrectable memory error, if GPUs are simulated.
    Ecc,
}

impl Injected {
    /// Its word in the journal.
    pub fn word(self) -> &'static str {
        match self.fault {
            Fault::Signal { word, .. } => word,
            Fault::DiskFull => "disk_full",
            Fault::Exception => "exception",
            Fault::Hang => "hang",
            Fault::Slow { .. } => "slow",
            Fault::Network => "network",
            Fault::Ecc => "ecc",
        }
    }

    /// The call to the rank's client; none for a fault that is injected from outside.
    fn call(self) -> Option<Call> {
        let percent = match self.fault {
            Fault::Signal { .. } | Fault::DiskFull | Fault::Ecc => return None,
            Fault::Slow { percent } => percent,
            Fault::Exception | Fault::Hang | Fault::Network => 0,
        };
        Some(Call::Inject { fault: self.word().to_owned(), percent })
    }
}

impl fmt::Display for Injected {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::Slow { percent } => write!(out, "slow by {percent} %")?,
            _ => out.write_str(&self.word().replace('_', " "))?,
        }
        self.at_step.map_or(Ok(()), |step| write!(out, " (once it has completed step {step})"))
    }
}
