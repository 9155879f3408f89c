//! Details of one GPU, which are read rarely.

use mainstay_health::hardware::gpu::{EccCount, EccPlace, GpuDetails, PeerAccess, SramErrors};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{nvmlEccSramErrorStatus_v1_t, nvmlRepairStatus_v1_t};

use super::Library;
use super::calls::{Handle, Nvml, NvmlResult, counter, flag, short_counter, version};
use super::fields::{self, GPU_SCOPE, PAGES_RETIRED, SLOWDOWN_MARGIN};
use super::links;
use super::notes::Notes;

/// NVML's numbers for the memory next to the chip and for all memory on it.
const DRAM: u32 = 2;
const SRAM: u32 = 7;
/// Parts of the memory on the chip, which boards before Ampere count separately.
const ON_CHIP: [u32; 6] = [0, 1, 3, 4, 5, 6];

pub(super) fn read(
    library: &Library,
    gpu: Handle,
    of_links: &[u32],
    peers: Vec<PeerAccess>,
    alive: &dyn Fn(),
    notes: &mut Notes,
) -> GpuDetails {
    let nvml = library.nvml();
    let lib = nvml.lib();
    let retired = |cause: u32, field| {
        let count = gpu.pages_retired(nvml, cause).map(u64::from);
        fields::or_field(nvml, gpu, count, field).map(|count| u32::try_from(count).unwrap_or(u32::MAX))
    };
    let [often, once] = PAGES_RETIRED;
    let retired = || Ok((retired(0, often)?, retired(1, once)?));
    // Kinds are NVML's numbers.
    let threshold = |kind| gpu.get_at(&lib.nvmlDeviceGetTemperatureThreshold, kind, 0).and_then(not_zero);
    let margin = fields::read(nvml, gpu, &[(SLOWDOWN_MARGIN, GPU_SCOPE)])
        .pop()
        .unwrap_or(Err(NvmlError::NotSupported));
    // Signed in every type: the low 32 bits are the number.
    let margin = margin.map(|degrees| degrees as i32);
    let links = links::errors(nvml, gpu, of_links, alive);
    let ecc = ecc(library, gpu);
    alive();
    GpuDetails {
        ecc,
        sram: notes.take(sram(library, gpu)),
        pages_retired: notes.take(retired()),
        hottest: notes.take(threshold(3)),
        memory_hottest: notes.take(threshold(2)),
        slowdown_at: notes.take(threshold(1)),
        slowdown_margin: notes.take(margin),
        power_limit: notes.take(short_counter(gpu.get(&lib.nvmlDeviceGetEnforcedPowerLimit, 0))),
        persistence: notes.take(flag(gpu.get(&lib.nvmlDeviceGetPersistenceMode, 0))),
        ecc_on: notes.take(flag(gpu.get_two(&lib.nvmlDeviceGetEccMode).map(|(now, _pending)| now))),
        gsp: notes.take(flag(gpu.get_two(&lib.nvmlDeviceGetGspFirmwareMode).map(|(on, _default)| on))),
        vbios: notes.take(gpu.text(&lib.nvmlDeviceGetVbiosVersion)),
        inforom_valid: notes.take(inforom(library, gpu)),
        repairs: notes.take(repairs(library, gpu)),
        links,
        peers,
    }
}

/// The sum of all errors, if only those of each kind of memory are reported.
pub(super) fn ecc_by_place(nvml: &Nvml, gpu: Handle, corrected: bool, lifetime: bool) -> NvmlResult<u64> {
    let at = |place| counter(gpu.ecc(nvml, corrected, lifetime, Some(place)));
    let on_chip = || ON_CHIP.iter().filter_map(|part| at(*part).ok()).reduce(u64::saturating_add);
    match (at(DRAM), at(SRAM).ok().or_else(on_chip)) {
        (Ok(memory), chip) => Ok(memory.saturating_add(chip.unwrap_or(0))),
        (Err(_), Some(chip)) => Ok(chip),
        (Err(error), None) => Err(error),
    }
}

fn ecc(library: &Library, gpu: Handle) -> Vec<EccCount> {
    let mut counts = Vec::new();
    for (corrected, lifetime) in [(false, false), (false, true), (true, false), (true, true)] {
        let at = |place| counter(gpu.ecc(library.nvml(), corrected, lifetime, Some(place)));
        let mut report = |place, count| counts.push(EccCount { place, corrected, lifetime, count });
        if let Ok(count) = at(DRAM) {
            report(EccPlace::Dram, count);
        }
        let parts = || ON_CHIP.iter().filter_map(|part| at(*part).ok()).reduce(u64::saturating_add);
        if let Some(count) = at(SRAM).ok().or_else(parts) {
            report(EccPlace::Sram, count);
        }
    }
    counts
}

fn sram(library: &Library, gpu: Handle) -> NvmlResult<SramErrors> {
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
    let status = gpu.get(&library.nvml().lib().nvmlDeviceGetSramEccErrorStatus, empty)?;
    Ok(SramErrors {
        uncorrected: sum(status.volatileUncParity, status.volatileUncSecDed)?,
        uncorrected_lifetime: sum(status.aggregateUncParity, status.aggregateUncSecDed)?,
        corrected: counter(Ok(status.volatileCor))?,
        // A library that does not write it, or writes another value, has not reported it.
        threshold_exceeded: status.bThresholdExceeded == 1,
    })
}

fn sum(one: u64, other: u64) -> NvmlResult<u64> {
    Ok(counter(Ok(one))?.saturating_add(counter(Ok(other))?))
}

/// Whether it is intact; no value if that is not reported.
fn inforom(library: &Library, gpu: Handle) -> NvmlResult<bool> {
    match gpu.validate_inforom(library.nvml()) {
        Ok(()) => Ok(true),
        Err(NvmlError::CorruptedInfoROM) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What the next reset repairs: channels of the memory, processors.
fn repairs(library: &Library, gpu: Handle) -> NvmlResult<(bool, bool)> {
    let empty = nvmlRepairStatus_v1_t {
        version: version::<nvmlRepairStatus_v1_t>(1),
        bChannelRepairPending: 0,
        bTpcRepairPending: 0,
    };
    let status = gpu.get(&library.nvml().lib().nvmlDeviceGetRepairStatus, empty)?;
    Ok((flag(Ok(status.bChannelRepairPending))?, flag(Ok(status.bTpcRepairPending))?))
}

/// A limit of 0 means no limit.
fn not_zero(degrees: u32) -> NvmlResult<u32> {
    if degrees == 0 { Err(NvmlError::NotSupported) } else { Ok(degrees) }
}
