//! Injects a fault into a rank of this host.

use std::path::Path;

use mainstay_model::id::Rank;

use crate::drill::simulated_gpu;
use crate::drill::{Fault, Injected};
use crate::order::Refused;
use crate::ranks::process::RankProcess;
use crate::ranks::save;
use crate::run::Launcher;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::limits;

impl Launcher {
    /// Checks whether the fault can be injected into the rank.
    pub(crate) fn can_inject(&self, injected: Injected, rank: Rank) -> Result<(), Refused> {
        let process = self.ranks.processes.iter().find(|process| process.rank == rank);
        let listens = process.is_some_and(|process| {
            self.drill.server.as_ref().is_some_and(|round_server| round_server.is_connected(process.pid))
        });
        if injected.call().is_some() && !listens {
            return Err(Refused::NotHere(format!(
                "{rank} has no client that could do it: its program has to import mainstay, or torch"
            )));
        }
        if injected.fault == Fault::Ecc {
            self.played_gpus().map_err(Refused::NotHere)?;
        }
        let steps = self.ranks.pages.get(&rank).and_then(PageReader::beat).is_some();
        if injected.at_step.is_some() && !steps {
            return Err(Refused::NotHere(format!("{rank} reports no steps")));
        }
        Ok(())
    }

    /// Injects the fault now, or after its step.
    pub(crate) fn inject(&mut self, injected: Injected, rank: Rank) {
        if injected.at_step.is_some() {
            self.drill.due.push((injected, rank));
            return self.inject_what_is_due();
        }
        let Some(process) = self.ranks.processes.iter().find(|process| process.rank == rank) else { return };
        match (injected.fault, injected.call(), &self.drill.server) {
            (Fault::Signal { signal, .. }, ..) => save::signal(process, signal),
            (Fault::DiskFull, ..) => fill_disk(process),
            (Fault::Ecc, ..) => self.damage_memory_of_gpu(process),
            (_, Some(call), Some(round_server)) => round_server.send(process.pid, &call),
            _ => {}
        }
    }

    /// The library that simulates the host's GPUs.
    fn played_gpus(&self) -> Result<&Path, String> {
        let library = self.settings.gpu_library.as_deref();
        library.filter(|library| simulated_gpu::is_played(library)).ok_or_else(|| {
            format!(
                "real GPUs are left alone: for errors of GPUs, gpu.library of the agent's configuration has to name the \
                 library for drills, with its {} next to it",
                simulated_gpu::SCRIPT
            )
        })
    }

    fn damage_memory_of_gpu(&self, process: &RankProcess) {
        let names = self.rank_spec.visible_devices();
        let gpu = names.get(process.local_rank as usize).cloned();
        let gpu = gpu.unwrap_or_else(|| process.local_rank.to_string());
        let done = self.played_gpus().and_then(|library| simulated_gpu::memory_error(library, &gpu));
        if let Err(error) = done {
            tracing::error!(rank = process.rank.0, %error, "could not cause a memory error");
        }
    }

    /// Injects the faults whose step is completed.
    pub(crate) fn inject_what_is_due(&mut self) {
        let reached = |rank: Rank| self.ranks.pages.get(&rank).and_then(|page| page.beat()?.step);
        let is_due = |(injected, rank): &(Injected, Rank)| injected.at_step <= reached(*rank);
        let (due, later): (Vec<_>, Vec<_>) = self.drill.due.iter().copied().partition(is_due);
        self.drill.due = later;
        for (injected, rank) in due {
            self.inject(Injected { at_step: None, ..injected }, rank);
        }
    }
}

fn fill_disk(process: &RankProcess) {
    if let Err(error) = limits::no_file_may_grow(process.pid) {
        tracing::error!(rank = process.rank.0, %error, "could not limit the file size of a rank");
    }
}
