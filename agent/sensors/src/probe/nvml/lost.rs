//! Checks whether each GPU is still there: one cheap call per GPU each second, between the full readings, which are seconds apart.
//!
//! It runs on a separate thread: a call that does not return blocks neither readings nor events. The next full reading then
//! hangs at the same GPU, and the probe is replaced.

use std::sync::Arc;
use std::time::Duration;

use mainstay_health::hardware::gpu::{GpuEvent, ProbeLine};
use mainstay_model::pci::PciAddress;
use nvml_wrapper::error::NvmlError;

use super::calls::{Handle, Nvml, by_index};
use super::{Library, Lines, gpu};

/// A GPU's index in the driver's list, and its address.
pub(super) type GpuAddress = (u32, PciAddress);

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts to check these GPUs. A change is passed on as an event, which triggers a reading at once.
pub(super) fn watch(library: &Arc<Library>, lines: &Lines, places: Vec<GpuAddress>) {
    let (library, lines) = (library.clone(), lines.clone());
    let look = move || {
        let mut lost = vec![false; places.len()];
        loop {
            std::thread::sleep(CHECK_INTERVAL);
            for ((index, address), was_lost) in places.iter().zip(&mut lost) {
                let now = match by_index(library.nvml(), *index) {
                    Ok(gpu) => is_lost(library.nvml(), gpu),
                    Err(error) => matches!(error, NvmlError::GpuLost),
                };
                if now == std::mem::replace(was_lost, now) {
                    continue;
                }
                let turned =
                    GpuEvent { gpu: Some(*address), kind: GpuEvent::TURNED, data: 0, instance: None };
                if lines.write(&ProbeLine::Event(turned)).is_err() {
                    return;
                }
            }
        }
    };
    // Without the thread a lost GPU is detected at the next full reading.
    drop(std::thread::Builder::new().name("lost".to_owned()).spawn(look));
}

/// Whether the driver reports that it lost the GPU. The temperature is read from the board; names and addresses may come
/// from the library's own memory.
pub(super) fn is_lost(nvml: &Nvml, gpu: Handle) -> bool {
    matches!(gpu::temperature(nvml, gpu), Err(NvmlError::GpuLost))
}
