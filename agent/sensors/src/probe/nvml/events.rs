//! Events of the driver, on a separate thread: a call that waits must not delay the readings.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mainstay_health::hardware::gpu::{GpuEvent, ProbeLine};
use mainstay_model::pci::PciAddress;
use nvml_wrapper::error::NvmlError;

use super::address::address;
use super::calls::{EventSet, Handle, Nvml, by_index};
use super::lost::{self, GpuAddress};
use super::{Library, Lines};

/// NVML's bits for kinds: XIDs and uncorrectable memory errors; in newer drivers also storms of corrected errors, pages
/// that were or should be retired, poisoned memory, a GPU that is no longer available and a change of its recovery action.
/// Each GPU is asked for as many kinds as it accepts. All kinds except XIDs only trigger a reading.
const OF_MEMORY: u64 = 0x200 | 0x400 | 0x800 | 0x1000 | 0x2000;
const KINDS: [u64; 4] =
    [0x8 | 0x2 | OF_MEMORY | 0x4000 | 0x8000, 0x8 | 0x2 | 0x4000 | 0x8000, 0x8 | 0x2, 0x8];

/// The maximum time of one wait.
const WAIT: Duration = Duration::from_secs(1);
/// Waits that may fail in a row before waiting ends.
const FAILURES: u32 = 10;
/// Not a GPU instance.
const NO_INSTANCE: u32 = u32::MAX;
/// How long to wait for the registration: it should be done before the first readings are reported. If it hangs, only the
/// events are lost.
const REGISTERED_WITHIN: Duration = Duration::from_secs(1);
/// Events that are passed on at once, and the delay of each further one of the same second: it limits the cost of a library
/// that repeats the same event.
const AT_ONCE: u32 = 100;
const EACH: Duration = Duration::from_millis(50);

/// Starts to pass on the driver's events of these GPUs, by their indexes. If there are none (virtual GPUs, old libraries),
/// XIDs are still in the kernel log.
pub(super) fn pass_on(library: &Arc<Library>, lines: &Lines, places: Vec<GpuAddress>) {
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
        // Done, failed, or hanging: the readings go on.
        let _ = is_registered.recv_timeout(REGISTERED_WITHIN);
    }
}

/// A set of events with its GPUs.
type Registered = (EventSet, Vec<(Handle, PciAddress)>);

/// A GPU keeps the address that was read before. It is not read again, because the GPU may be lost by now.
fn register(nvml: &Nvml, places: &[GpuAddress]) -> Option<Registered> {
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
    let (mut failures, mut events, mut second) = (0, 0, Instant::now());
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
                    (events, second) = (0, Instant::now());
                }
                events += 1;
                if events > AT_ONCE {
                    std::thread::sleep(EACH);
                }
            }
            // No event. Sleep for a library that does not wait.
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

/// The GPU of an event's handle. Some libraries give another handle with each event, and a lost GPU reports neither its
/// address nor its UUID: then it is the only registered GPU that is lost. With two of them it is unknown.
fn whose(nvml: &Nvml, handle: Handle, addresses: &[(Handle, PciAddress)]) -> Option<PciAddress> {
    if let Some((_, address)) = addresses.iter().find(|(other, _)| *other == handle) {
        return Some(*address);
    }
    match address(nvml, handle) {
        Ok(address) => Some(address),
        Err(NvmlError::GpuLost) => {
            let mut lost = addresses.iter().filter(|(other, _)| lost::is_lost(nvml, *other));
            lost.next().filter(|_| lost.next().is_none()).map(|(_, address)| *address)
        }
        Err(_) => None,
    }
}
