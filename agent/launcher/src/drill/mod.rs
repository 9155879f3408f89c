//! Drills: faults that a person injects into a job that opted in. The launcher sets signals and limits through the kernel.
//! A fault inside a rank's program is injected by its client, which listens on a separate socket in such jobs only.

mod simulated_gpu;

use std::fmt;
use std::path::{Path, PathBuf};

use mainstay_model::id::Rank;
use mainstay_recovery::in_process::Call;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::limits;

use crate::order::Refused;
use crate::ranks::Ranks;
use crate::ranks::process::RankProcess;

/// Faults for ranks.
#[derive(Debug)]
pub(crate) struct Drill {
    /// Whether the job permits them.
    pub(crate) is_permitted: bool,
    /// The library by which the host's agent accesses GPUs.
    gpu_library: Option<PathBuf>,
    /// Those that wait for their step.
    due: Vec<(Injected, Rank)>,
}

impl Drill {
    pub(crate) fn new(is_permitted: bool, gpu_library: Option<PathBuf>) -> Drill {
        Drill { is_permitted, gpu_library, due: Vec::new() }
    }

    /// Checks whether the fault can be injected into the rank.
    pub(crate) fn check(&self, injected: Injected, rank: Rank, ranks: &Ranks) -> Result<(), Refused> {
        let listens = ranks.processes.iter().find(|process| process.rank == rank).is_some_and(|process| {
            ranks.drill_server.as_ref().is_some_and(|server| server.is_connected(process.pid))
        });
        if injected.call().is_some() && !listens {
            return Err(Refused::NotHere(format!(
                "{rank} has no client that could do it: its program has to import mainstay, or torch"
            )));
        }
        if injected.fault == Fault::Ecc {
            self.played_gpus().map_err(Refused::NotHere)?;
        }
        if injected.at_step.is_some() && ranks.pages.get(rank).and_then(PageReader::beat).is_none() {
            return Err(Refused::NotHere(format!("{rank} reports no steps")));
        }
        Ok(())
    }

    /// Injects the fault now, or after its step.
    pub(crate) fn inject(&mut self, injected: Injected, rank: Rank, ranks: &Ranks) {
        if injected.at_step.is_some() {
            self.due.push((injected, rank));
            return self.inject_what_is_due(ranks);
        }
        let Some(process) = ranks.processes.iter().find(|process| process.rank == rank) else { return };
        match (injected.fault, injected.call(), &ranks.drill_server) {
            (Fault::Signal { signal, .. }, ..) => process.signal(signal),
            (Fault::DiskFull, ..) => {
                if let Err(error) = limits::no_file_may_grow(process.pid) {
                    tracing::error!(%rank, %error, "could not limit the file size of a rank");
                }
            }
            (Fault::Ecc, ..) => self.damage_memory_of_gpu(process, &ranks.spec.visible_devices()),
            (_, Some(call), Some(server)) => server.send(process.pid, &call),
            _ => {}
        }
    }

    /// The library that simulates the host's GPUs.
    fn played_gpus(&self) -> Result<&Path, String> {
        let library = self.gpu_library.as_deref();
        library.filter(|library| simulated_gpu::is_played(library)).ok_or_else(|| {
            format!(
                "real GPUs are left alone: for errors of GPUs, gpu.library of the agent's configuration has to name the \
                 library for drills, with its {} next to it",
                simulated_gpu::SCRIPT
            )
        })
    }

    fn damage_memory_of_gpu(&self, process: &RankProcess, names: &[String]) {
        let gpu = names.get(process.local_rank as usize).cloned();
        let gpu = gpu.unwrap_or_else(|| process.local_rank.to_string());
        let done = self.played_gpus().and_then(|library| simulated_gpu::memory_error(library, &gpu));
        if let Err(error) = done {
            tracing::error!(rank = process.rank.0, %error, "could not cause a memory error");
        }
    }

    /// Injects the faults whose step is completed.
    pub(crate) fn inject_what_is_due(&mut self, ranks: &Ranks) {
        let is_due = |(injected, rank): &(Injected, Rank)| injected.at_step <= ranks.pages.step(*rank);
        let (due, later): (Vec<_>, Vec<_>) = self.due.drain(..).partition(is_due);
        self.due = later;
        for (injected, rank) in due {
            self.inject(Injected { at_step: None, ..injected }, rank, ranks);
        }
    }
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
    pub fn as_str(self) -> &'static str {
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
        Some(Call::Inject { fault: self.as_str().to_owned(), percent })
    }
}

impl fmt::Display for Injected {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::Slow { percent } => write!(out, "slow by {percent} %")?,
            _ => out.write_str(&self.as_str().replace('_', " "))?,
        }
        self.at_step.map_or(Ok(()), |step| write!(out, " (once it has completed step {step})"))
    }
}
