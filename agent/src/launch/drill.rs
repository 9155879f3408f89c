//! Drills: faults that a person brings about in a job that opted in. Signals and limits are the kernel's to set; what has to
//! happen inside a rank's program is done there by its client, which listens on a socket of its own in such jobs only.

mod launcher;

use std::fmt;

use mainstay_core::recovery::in_process::Call;

/// What is done to a rank, and when.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Injected {
    /// What.
    pub fault: Fault,
    /// Once the rank has completed this step; none for at once.
    pub at_step: Option<u64>,
}

/// What is done to a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// A signal is sent to its process.
    Signal {
        /// Which.
        signal: i32,
        /// Its word in the journal.
        word: &'static str,
    },
    /// None of its files can grow any more.
    DiskFull,
    /// Its main thread raises.
    Exception,
    /// Its main thread stands still for good: the others wait for it in their next collective.
    Hang,
    /// Its program gets only the rest of each moment.
    Slow {
        /// The share that it loses, in percent.
        percent: u32,
    },
    /// Its connections to other ranks break.
    Network,
    /// Its GPU has a memory error that could not be corrected, where GPUs are played.
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

    /// What the rank's client is told; none for what is done from outside.
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
