//! Active probes: each runs in a separate process, reports its measurements in one line of JSON, and ends. The parent
//! abandons a probe that hangs in a disk, a driver or a network.

mod buffer;
mod cpu;
mod cuda;
mod echo;
mod memory;
mod storage;

use std::path::Path;

use mainstay_health::host::preflight::deep::{Probe, Probed};

pub use echo::serve as serve_echo;

/// How much a storage probe writes and reads back.
const STORAGE_BYTES: u64 = 64 << 20;

/// The resources of a probe.
#[derive(Clone, Debug)]
pub struct Means {
    /// CUDA's library; none for the usual one.
    pub cuda: Option<std::ffi::OsString>,
}

/// Runs the probe.
pub fn run(probe: &Probe, means: &Means) -> Probed {
    match probe {
        Probe::Memory => memory::probe(),
        Probe::Cpu => cpu::probe(),
        Probe::Loopback => echo::loopback(),
        Probe::Peer(peer) => echo::ask(peer),
        Probe::Storage(directory) => storage::probe(Path::new(directory), STORAGE_BYTES),
        Probe::Gpu(address) => cuda::probe(address, means.cuda.as_deref()),
    }
}
