//! What the driver tells unasked, on a thread of its own: a call that waits must not hold up the readings.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mainstay_core::base::pci::PciAddress;
use mainstay_core::hardware::gpu::{GpuEvent, ProbeLine};
use nvml_wrapper::error::NvmlError;

use super::address::address;
use super::calls::{EventSet, Handle, Nvml, by_index};
use super::lost::{self, Place};
use super::{Library, Lines};

/// Kinds by NVML's bits: XIDs and memory errors that could not be corrected; of newer drivers storms of corrected errors,
/// pages that were or should be taken out of use, poisoned memory, a GPU that is not available any more and a change of
/// what it needs. Each GPU is asked for as many of them as it takes; what all but XIDs mean, the next reading tells.
const OF_MEMORY: u64 = 0x200 | 0x400 | 0x800 | 0x1000 | 0x2000;
const KINDS: [u64; 4] =
    [0x8 | 0x2 | OF_MEMORY | 0x4000 | 0x8000, 0x8 | 0x2 | 0x4000 | 0x8000, 0x8 | 0x2, 0x8];

/// How long one wait takes at most.
const WAIT: Duration = Duration::from_secs(1);
/// Waits that may fail in a row before there is no more waiting.
const FAILURES: u32 = 10;
/// No instance of a GPU.
const NO_INSTANCE: u32 = u32::MAX;
/// How long the registration is waited for: it should be done before the first readings are told, and where it hangs
/// only the events are lost.
const REGISTERED_WITHIN: Duration = Duration::from_secs(1);
/// Events that are passed on at once, and how long each further one of the same second takes: a library that tells the
/// same again and again must not cost more.
const AT_ONCE: u32 = 100;
const EACH: Duration = Duration::from_millis(50);

/// Begins to pass on what the driver tells of these GPUs, by their places. Where it tells nothing (virtual GPUs, old
/// libraries) nothing is lost: the kernel log tells of XIDs too.
pub(super) fn pass_on(library: &Arc<Library>, lines: &Lines, places: Vec<Place>) {
    let (library, lines) = (library.clone(), lines.clone());
    let (registered, is_registered) = channel();
    // Without the thread there are no events, as above.
    let started = std::thread::Builder::new().name("events".to_owned()).spawn(move || {
        let taken = register(library.nvml(), &places);
        let _ = registered.send(());
        if let Some((set, addresses)) = taken {
            wait_for_ever(library.nvml(), &set, &addresses, &lines);
        }
    });
    if started.is_ok() {
        // Done, over, or hanging: the readings go on.
        let _ = is_registered.recv_timeout(REGISTERED_WITHIN);
    }
}

/// A set of events with the GPUs that are in it.
type Registered = (EventSet, Vec<(Handle, PciAddress)>);

/// A GPU's address is the one that was read of it before: it is not asked again, for a GPU may be lost by now.
fn register(nvml: &Nvml, places: &[Place]) -> Option<Registered> {
    let set = EventSet::new(nvml).ok()?;
    let mut addresses = Vec::new();
    for (index, address) in places {
        let Ok(gpu) = by_index(nvml, *index) else { continue };
        if KINDS.iter().any(|kinds| set.register(nvml, gpu, *kinds).is_ok()) {
            addresses.push((gpu, *address));
        }
    }
    (!addresses.is_empty()).then_some((set, addresses))
}

fn wait_for_ever(nvml: &Nvml, set: &EventSet, addresses: &[(Handle, PciAddress)], lines: &Lines) {
    let milliseconds = u32::try_from(WAIT.as_millis()).unwrap_or(u32::MAX);
    let (mut failures, mut reported, mut second) = (0, 0, Instant::now());
    while failures < FAILURES {
        let began = Instant::now();
        match set.wait(nvml, milliseconds) {
            Ok((gpu, kind, data, instance)) if kind != 0 => {
                failures = 0;
                let gpu = gpu.and_then(|handle| whose(nvml, handle, addresses));
                let instance = Some(instance).filter(|instance| *instance != NO_INSTANCE);
                if lines.write(&ProbeLine::Event(GpuEvent { gpu, kind, data, instance })).is_err() {
                    return;
                }
                if second.elapsed() >= WAIT {
                    (reported, second) = (0, Instant::now());
                }
                reported += 1;
                if reported > AT_ONCE {
                    std::thread::sleep(EACH);
                }
            }
            // Nothing came. A library that does not wait is waited for.
            Ok(_) | Err(NvmlError::Timeout) => {
                failures = 0;
                std::thread::sleep(WAIT.saturating_sub(began.elapsed()));
            }
            Err(_) => {
                failures += 1;
                std::thread::sleep(WAIT);
            }
        }
    }
}

/// The GPU of an event's handle. Some libraries give another handle with each event, and a lost GPU tells neither its
/// address nor its UUID: it is then the only one of the registered that is lost. With two of them nobody knows.
fn whose(nvml: &Nvml, handle: Handle, addresses: &[(Handle, PciAddress)]) -> Option<PciAddress> {
    if let Some((_, address)) = addresses.iter().find(|(of, _)| *of == handle) {
        return Some(*address);
    }
    match address(nvml, handle) {
        Ok(address) => Some(address),
        Err(NvmlError::GpuLost) => {
            let mut lost = addresses.iter().filter(|(of, _)| lost::is_lost(nvml, *of));
            lost.next().filter(|_| lost.next().is_none()).map(|(_, address)| *address)
        }
        Err(_) => None,
    }
}
