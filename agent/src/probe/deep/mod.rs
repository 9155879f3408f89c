//! Active probes: each does one thing in a process of its own, tells in one line of JSON what it measured, and ends. One
//! that hangs in a disk, a driver or a network is left behind by the one who asked.

mod buffer;
mod cpu;
mod cuda;
mod echo;
mod memory;
mod storage;

use std::path::Path;

use mainstay_core::host::preflight::deep::{Probe, Probed};

pub use echo::serve as serve_echo;

/// What a probe may use.
#[derive(Clone, Debug)]
pub struct Means {
    /// How much a storage probe writes.
    pub storage_size: u64,
    /// CUDA's library; the usual one if none is named.
    pub cuda: Option<std::ffi::OsString>,
}

/// Does it.
pub fn run(probe: &Probe, means: &Means) -> Probed {
    match probe {
        Probe::Memory => memory::probe(),
        Probe::Cpu => cpu::probe(),
        Probe::Loopback => echo::loopback(),
        Probe::Peer(peer) => echo::ask(peer),
        Probe::Storage(directory) => storage::probe(Path::new(directory), means.storage_size),
        Probe::Gpu(address) => cuda::probe(address, means.cuda.as_deref()),
    }
}
