//! Whether a GPU is really free: no process uses it and its memory is not held. A killed process can hold device memory
//! for seconds after it is gone from the process table, and the next job then fails because of it.

use std::collections::BTreeSet;

use crate::hardware::gpu::GpuReading;
use mainstay_model::health::Evidence;
use mainstay_model::id::Pid;
use mainstay_model::units::Bytes;

/// The availability of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub enum GpuAvailability {
    /// No process holds it.
    Free,
    /// A process holds it, or its memory is in use without a visible process; the details.
    Held(String),
    /// The GPU does not report it; the reason.
    Unknown(String),
}

/// Judges whether a GPU is free of processes other than `ours`. The driver itself keeps some memory, so usage up to
/// `allowed` bytes counts as none (NVIDIA's own tools take 15 MiB to 512 MiB).
pub fn free(reading: &GpuReading, ours: &BTreeSet<Pid>, allowed: Bytes) -> (GpuAvailability, Vec<Evidence>) {
    let mut evidence = Vec::new();
    let mut report = |what: &str, reading: String, limit: Option<String>| {
        evidence.push(Evidence { source: format!("NVML {what}"), reading, limit, ..Evidence::default() });
    };
    if let Some(trouble) = &reading.trouble {
        return (GpuAvailability::Unknown(format!("it cannot be asked: {trouble:?}")), evidence);
    }
    let foreign = reading.processes.value().map(|processes| {
        let pids = processes.iter().map(|process| process.pid);
        pids.filter(|pid| !ours.contains(pid)).map(|pid| pid.0.to_string()).collect::<Vec<_>>()
    });
    if let Some(foreign) = &foreign {
        report("processes", if foreign.is_empty() { "none".to_owned() } else { foreign.join(", ") }, None);
    }
    let used = reading.memory.value().map(|(used, _)| *used);
    if let Some(used) = used {
        let limit = Some(allowed.rounded().to_string());
        report("memory in use", Bytes(used).rounded().to_string(), limit);
    }
    let has_ours =
        reading.processes.value().is_some_and(|all| all.iter().any(|process| ours.contains(&process.pid)));
    let freedom = match (foreign, used) {
        (Some(foreign), _) if !foreign.is_empty() => {
            GpuAvailability::Held(format!("in use by process {}", foreign.join(", ")))
        }
        (_, Some(used)) if used > allowed.0 && !has_ours => {
            let held = Bytes(used).rounded();
            GpuAvailability::Held(format!("{held} of its memory is in use but no process is visible"))
        }
        (_, Some(_)) => GpuAvailability::Free,
        (_, None) => GpuAvailability::Unknown("its memory usage is unknown".to_owned()),
    };
    (freedom, evidence)
}
