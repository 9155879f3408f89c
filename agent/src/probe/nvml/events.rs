//! What the driver tells unasked, on a thread of its own: a call that waits must not hold up the readings.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mainstay_core::device::{GpuEvent, ProbeLine};
use mainstay_core::pci::PciAddress;
use nvml_wrapper::error::NvmlError;

use super::calls::{EventSet, Handle, by_index, count};
use super::{Library, Lines, gpu};

/// Kinds by NVML's bits: XIDs, memory errors that could not be corrected, and, of newer drivers, a GPU that is not
/// available any more and a change of what it needs. Each GPU is asked for as many of them as it takes.
const KINDS: [u64; 3] = [0x8 | 0x2 | 0x4000 | 0x8000, 0x8 | 0x2, 0x8];

/// How long one wait takes at most.
const WAIT_MS: u32 = 1000;
/// Waits that may fail in a row before there is no more waiting.
const FAILURES: u32 = 10;
/// No instance of a GPU.
const NO_INSTANCE: u32 = u32::MAX;

/// Begins to pass on what the driver tells. Where it tells nothing (virtual GPUs, old libraries) nothing is lost: the
/// kernel log tells of XIDs too.
///
/// # Errors
/// The pipe broke.
pub(super) fn pass_on(library: &Arc<Library>, lines: &Lines, left_out: &[u32]) -> io::Result<()> {
    let Some((set, addresses)) = register(library, lines, left_out)? else { return Ok(()) };
    let (library, lines) = (library.clone(), lines.clone());
    // Without the thread there are no events, as above.
    let _ = std::thread::Builder::new()
        .name("events".to_owned())
        .spawn(move || wait_for_ever(&library, &set, addresses, &lines));
    Ok(())
}

/// A set of events with the GPUs that are in it.
type Registered = (EventSet, Vec<(Handle, PciAddress)>);

fn register(library: &Library, lines: &Lines, left_out: &[u32]) -> io::Result<Option<Registered>> {
    let nvml = library.nvml();
    let (Ok(set), Ok(count)) = (EventSet::new(nvml), count(nvml)) else { return Ok(None) };
    let mut addresses = Vec::new();
    for index in (0..count).filter(|index| !left_out.contains(index)) {
        // A call that hangs here is of this GPU.
        lines.write(&ProbeLine::Reading(index))?;
        let Ok(gpu) = by_index(nvml, index) else { continue };
        let taken = KINDS.iter().any(|kinds| set.register(nvml, gpu, *kinds).is_ok());
        if let (true, Ok(address)) = (taken, gpu::address(nvml, gpu)) {
            addresses.push((gpu, address));
        }
    }
    Ok((!addresses.is_empty()).then_some((set, addresses)))
}

fn wait_for_ever(library: &Library, set: &EventSet, addresses: Vec<(Handle, PciAddress)>, lines: &Lines) {
    let mut failures = 0;
    while failures < FAILURES {
        match set.wait(library.nvml(), WAIT_MS) {
            Ok((gpu, kind, data, instance)) => {
                failures = 0;
                let known = addresses.iter().find(|(handle, _)| *handle == gpu).map(|(_, address)| *address);
                let gpu = known.or_else(|| gpu::address(library.nvml(), gpu).ok());
                let instance = Some(instance).filter(|instance| *instance != NO_INSTANCE);
                if lines.write(&ProbeLine::Event(GpuEvent { gpu, kind, data, instance })).is_err() {
                    return;
                }
            }
            Err(NvmlError::Timeout) => failures = 0,
            Err(_) => {
                failures += 1;
                std::thread::sleep(Duration::from_millis(WAIT_MS.into()));
            }
        }
    }
}
