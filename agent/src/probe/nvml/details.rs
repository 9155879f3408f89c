//! What is read of one GPU seldom.

use mainstay_core::device::{EccCount, EccPlace, GpuDetails, PeerAccess, SramErrors};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::nvmlEccSramErrorStatus_v1_t;

use super::Library;
use super::calls::{Answer, Handle, version};
use super::fields::{self, SLOWDOWN_MARGIN, WHOLE};
use super::gpu::Notes;
use super::links;

/// Places of memory by NVML's numbers.
const PLACES: [(EccPlace, u32); 2] = [(EccPlace::Dram, 2), (EccPlace::Sram, 7)];

pub(super) fn read(
    library: &Library,
    gpu: Handle,
    of_links: &[u32],
    peers: Vec<PeerAccess>,
    notes: &mut Notes,
) -> GpuDetails {
    let nvml = library.nvml();
    let lib = nvml.lib();
    let retired = || Ok((gpu.pages_retired(nvml, 0)?, gpu.pages_retired(nvml, 1)?));
    // Kinds by NVML's numbers.
    let threshold = |kind| gpu.get_at(&lib.nvmlDeviceGetTemperatureThreshold, kind, 0).and_then(not_zero);
    let margin =
        fields::read(nvml, gpu, &[(SLOWDOWN_MARGIN, WHOLE)]).pop().unwrap_or(Err(NvmlError::NotSupported));
    // Signed, whatever type it comes in: the low 32 bits are the number.
    let margin = margin.map(|degrees| degrees as i32);
    let flag = |answer: Answer<u32>| answer.map(|flag| flag != 0);
    GpuDetails {
        ecc: ecc(library, gpu),
        sram: notes.take(sram(library, gpu)),
        pages_retired: notes.take(retired()),
        hottest: notes.take(threshold(3)),
        memory_hottest: notes.take(threshold(2)),
        slowdown_at: notes.take(threshold(1)),
        slowdown_margin: notes.take(margin),
        power_limit: notes.take(gpu.get(&lib.nvmlDeviceGetEnforcedPowerLimit, 0)),
        persistence: notes.take(flag(gpu.get(&lib.nvmlDeviceGetPersistenceMode, 0))),
        ecc_on: notes.take(gpu.get_two(&lib.nvmlDeviceGetEccMode).map(|(now, _pending)| now != 0)),
        gsp: notes.take(gpu.get_two(&lib.nvmlDeviceGetGspFirmwareMode).map(|(on, _default)| on != 0)),
        vbios: notes.take(gpu.text(&lib.nvmlDeviceGetVbiosVersion)),
        inforom_valid: notes.take(inforom(library, gpu)),
        links: links::errors(nvml, gpu, of_links),
        peers,
    }
}

fn ecc(library: &Library, gpu: Handle) -> Vec<EccCount> {
    let mut counts = Vec::new();
    for (place, number) in PLACES {
        for (corrected, lifetime) in [(false, false), (false, true), (true, false), (true, true)] {
            if let Ok(count) = gpu.ecc(library.nvml(), corrected, lifetime, Some(number)) {
                counts.push(EccCount { place, corrected, lifetime, count });
            }
        }
    }
    counts
}

fn sram(library: &Library, gpu: Handle) -> Answer<SramErrors> {
    let empty = nvmlEccSramErrorStatus_v1_t {
        version: version::<nvmlEccSramErrorStatus_v1_t>(1),
        aggregateUncParity: 0,
        aggregateUncSecDed: 0,
        aggregateCor: 0,
        volatileUncParity: 0,
        volatileUncSecDed: 0,
        volatileCor: 0,
        aggregateUncBucketL2: 0,
        aggregateUncBucketSm: 0,
        aggregateUncBucketPcie: 0,
        aggregateUncBucketMcu: 0,
        aggregateUncBucketOther: 0,
        bThresholdExceeded: 0,
    };
    let told = gpu.get(&library.nvml().lib().nvmlDeviceGetSramEccErrorStatus, empty)?;
    Ok(SramErrors {
        uncorrected: told.volatileUncParity.saturating_add(told.volatileUncSecDed),
        uncorrected_lifetime: told.aggregateUncParity.saturating_add(told.aggregateUncSecDed),
        corrected: told.volatileCor,
        threshold_exceeded: told.bThresholdExceeded != 0,
    })
}

/// Intact, corrupted, or not to be told.
fn inforom(library: &Library, gpu: Handle) -> Answer<bool> {
    match gpu.validate_inforom(library.nvml()) {
        Ok(()) => Ok(true),
        Err(NvmlError::CorruptedInfoROM) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A limit of 0 is none.
fn not_zero(degrees: u32) -> Answer<u32> {
    if degrees == 0 { Err(NvmlError::NotSupported) } else { Ok(degrees) }
}
