//! One GPU, read.

use std::collections::BTreeMap;

use mainstay_core::device::{
    Clocks, FabricInfo, GpuIdentity, GpuProcess, GpuReading, GpuTrouble, PcieLink, PeerAccess, Read,
    RemappedRows, SlowdownTimes,
};
use mainstay_core::id::Pid;
use mainstay_core::pci::PciAddress;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t, nvmlMarginTemperature_v1_t,
    nvmlMemory_t, nvmlPciInfo_t, nvmlTemperature_v1_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use super::calls::{Answer, Handle, by_index, text_of, version};
use super::fields::{self, MEMORY_TEMPERATURE, RECOVERY_ACTION, WHOLE};
use super::{Library, details, links};

/// A number that stands for none (NVML_VALUE_NOT_AVAILABLE).
const NOT_AVAILABLE: u64 = u64::MAX;

/// What was told of a GPU as a whole while it was read: some calls go on answering for a GPU that is lost, so that
/// one that says so counts for all.
#[derive(Default)]
pub(super) struct Notes {
    fatal: Option<GpuTrouble>,
}

impl Notes {
    /// Whether the GPU is lost or unusable: there is no point in asking it more.
    pub(super) fn is_fatal(&self) -> bool {
        self.fatal.is_some()
    }

    /// What a call came to.
    pub(super) fn take<T>(&mut self, result: Answer<T>) -> Read<T> {
        match result {
            Ok(value) => Read::Value(value),
            Err(error) if is_not_offered(&error) => Read::NotOffered,
            Err(error) => {
                if matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired) && self.fatal.is_none() {
                    self.fatal = Some(trouble(&error));
                }
                Read::Failed(error.to_string())
            }
        }
    }
}

/// Whether a GPU, or this version of the driver, does not have what was asked for. What is not known to an older
/// library is an invalid argument to it.
fn is_not_offered(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::FunctionNotFound
            | NvmlError::InvalidArg
            | NvmlError::NotFound
            | NvmlError::NoData
            | NvmlError::VgpuEccNotSupported
            // A version of a struct that it does not know; a function that it does not have any more.
            | NvmlError::UnexpectedVariant(25 | 26)
    )
}

/// What is to be read of a GPU.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// What is read seldom too.
    pub(super) details: bool,
    /// Places of the GPUs that may be asked of whom they reach.
    pub(super) peers: &'a [u32],
}

/// Reads the GPU at a place of the driver's list; `known` is who was there before, at each place.
pub(super) fn read(
    library: &Library,
    index: u32,
    known: &BTreeMap<u32, GpuIdentity>,
    wanted: Wanted<'_>,
) -> GpuReading {
    let nvml = library.nvml();
    let before = known.get(&index);
    let mut reading = GpuReading { index, identity: before.cloned(), ..GpuReading::default() };
    let gpu = match by_index(nvml, index) {
        Ok(gpu) => gpu,
        Err(error) => return GpuReading { trouble: Some(unopened(&error)), ..reading },
    };
    match identity(nvml, gpu, before) {
        Ok(identity) => reading.identity = Some(identity),
        Err(error) => return GpuReading { trouble: Some(trouble(&error)), ..reading },
    }
    let mut notes = Notes::default();
    memory(library, gpu, &mut reading, &mut notes);
    heat_and_power(library, gpu, &mut reading, &mut notes);
    wires(nvml, gpu, &mut reading, &mut notes);
    work(nvml, gpu, &mut reading, &mut notes);
    if wanted.details && notes.fatal.is_none() {
        let links: Vec<u32> = reading.nvlinks.iter().map(|of| of.link).collect();
        // Without NVLinks there is nobody to be reached over them.
        let others: Vec<u32> = wanted.peers.iter().copied().filter(|peer| *peer != index).collect();
        let peers = if links.is_empty() { Vec::new() } else { peers(nvml, gpu, &others) };
        reading.details = Some(Box::new(details::read(library, gpu, &links, peers, &mut notes)));
    }
    reading.trouble = notes.fatal;
    reading
}

/// Which of the others it reaches over NVLink; those of which it is not told are left out.
fn peers(nvml: &Nvml, gpu: Handle, others: &[u32]) -> Vec<PeerAccess> {
    let access = |index: &u32| {
        let other = by_index(nvml, *index).ok()?;
        Some(PeerAccess { peer: address(nvml, other).ok()?, status: gpu.reaches(nvml, other).ok()? })
    };
    others.iter().filter_map(access).collect()
}

/// Where a GPU sits, by the newest variant of the function that the library has.
pub(super) fn address(nvml: &Nvml, gpu: Handle) -> Answer<PciAddress> {
    let lib = nvml.lib();
    let empty = || nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    let missing = is_not_offered;
    let mut info = gpu.get(&lib.nvmlDeviceGetPciInfo_v3, empty());
    if info.as_ref().is_err_and(missing) {
        info = gpu.get(&lib.nvmlDeviceGetPciInfo_v2, empty());
    }
    if info.as_ref().is_err_and(missing) {
        info = gpu.get(&lib.nvmlDeviceGetPciInfo, empty());
    }
    let info = info?;
    // Older variants write the short form only.
    let (long, short) = (text_of(&info.busId), text_of(&info.busIdLegacy));
    PciAddress::parse(&long)
        .or_else(|| PciAddress::parse(&short))
        .ok_or_else(|| NvmlError::FailedToLoadSymbol(format!("{long:?} is no PCI address")))
}

fn identity(nvml: &Nvml, gpu: Handle, known: Option<&GpuIdentity>) -> Answer<GpuIdentity> {
    let lib = nvml.lib();
    let (address, uuid) = (address(nvml, gpu)?, gpu.text(&lib.nvmlDeviceGetUUID));
    let uuid = match uuid {
        Err(error) if is_not_offered(&error) => String::new(),
        uuid => uuid?,
    };
    if let Some(known) = known.filter(|known| known.address == address && known.uuid == uuid) {
        return Ok(known.clone());
    }
    let name = gpu.text(&lib.nvmlDeviceGetName).unwrap_or_else(|_| "NVIDIA GPU".to_owned());
    Ok(GpuIdentity { address, uuid, name, serial: gpu.text(&lib.nvmlDeviceGetSerial).ok() })
}

fn memory(library: &Library, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let nvml = library.nvml();
    let lib = nvml.lib();
    reading.ecc_volatile = notes.take(gpu.ecc(nvml, false, false, None));
    reading.ecc_aggregate = notes.take(gpu.ecc(nvml, false, true, None));
    reading.ecc_corrected = notes.take(gpu.ecc(nvml, true, false, None));
    let rows = gpu.remapped_rows(nvml).map(|[corrected, uncorrected, pending, failed]| RemappedRows {
        corrected,
        uncorrected,
        pending: pending != 0,
        failed: failed != 0,
    });
    reading.remapped = notes.take(rows);
    let pending = gpu.get(&lib.nvmlDeviceGetRetiredPagesPendingStatus, 0);
    reading.pages_pending = notes.take(pending.map(|pending| pending != 0));
    reading.unrepairable = notes.take(library.newer().unrepairable(gpu));
    let used = nvmlMemory_t { total: 0, free: 0, used: 0 };
    let used = gpu.get(&lib.nvmlDeviceGetMemoryInfo, used);
    reading.memory = notes.take(used.map(|memory| (memory.used, memory.total)));
}

fn heat_and_power(library: &Library, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let nvml = library.nvml();
    let lib = nvml.lib();
    reading.temperature = notes.take(temperature(nvml, gpu));
    let margin = nvmlMarginTemperature_v1_t {
        version: version::<nvmlMarginTemperature_v1_t>(1),
        marginTemperature: 0,
    };
    let margin = gpu.get(&lib.nvmlDeviceGetMarginTemperature, margin);
    reading.margin = notes.take(margin.map(|of| of.marginTemperature));
    reading.power = notes.take(gpu.get(&lib.nvmlDeviceGetPowerUsage, 0));
    let mut reasons = gpu.get(&lib.nvmlDeviceGetCurrentClocksEventReasons, 0);
    if reasons.as_ref().is_err_and(is_not_offered) {
        reasons = gpu.get(&lib.nvmlDeviceGetCurrentClocksThrottleReasons, 0);
    }
    reading.clock_reasons = notes.take(reasons);
    let clock = |of| gpu.get_at(&lib.nvmlDeviceGetClockInfo, of, 0);
    let clocks = clock(1).and_then(|sm| Ok(Clocks { sm, memory: clock(2)? }));
    reading.clocks = notes.take(clocks);

    let [thermal, brake] = fields::slowdown_times(library.driver());
    let wanted = [RECOVERY_ACTION, MEMORY_TEMPERATURE, thermal, brake].map(|field| (field, WHOLE));
    let mut values = fields::read(nvml, gpu, &wanted).into_iter();
    let mut next = || values.next().unwrap_or(Err(NvmlError::NotSupported));
    // Numbers without a meaning (all bits set) stand for none.
    let action = next().map(as_count).and_then(|number| match number {
        0..=0xff => Ok(number),
        _ => Err(NvmlError::NotSupported),
    });
    reading.recovery_action = notes.take(action);
    // Boards without a sensor there tell 0.
    let memory = next().map(as_count).and_then(|degrees| match u32::try_from(degrees) {
        Ok(degrees @ 1..=HOTTEST) => Ok(degrees),
        Ok(_) | Err(_) => Err(NvmlError::NotSupported),
    });
    reading.memory_temperature = notes.take(memory);
    let times =
        next().and_then(|thermal| Ok(SlowdownTimes { thermal: as_count(thermal), brake: as_count(next()?) }));
    // Older drivers have a counter for heat alone (NVML_PERF_POLICY_THERMAL).
    let times = times.or_else(|error| match error {
        NvmlError::GpuLost | NvmlError::ResetRequired => Err(error),
        _ => {
            let none = nvmlViolationTime_t { referenceTime: 0, violationTime: 0 };
            let thermal = gpu.get_at(&lib.nvmlDeviceGetViolationStatus, 1, none)?;
            Ok(SlowdownTimes { thermal: thermal.violationTime, brake: 0 })
        }
    });
    reading.slowdown = notes.take(times);
}

/// What no sensor tells, in degrees Celsius: beyond it stands a number for none.
const HOTTEST: u32 = 250;

/// By the function of old, and where that is gone by the newer one.
fn temperature(nvml: &Nvml, gpu: Handle) -> Answer<u32> {
    let lib = nvml.lib();
    let mut degrees = gpu.get_at(&lib.nvmlDeviceGetTemperature, 0, 0);
    if degrees.as_ref().is_err_and(is_not_offered) {
        let empty = nvmlTemperature_v1_t {
            version: version::<nvmlTemperature_v1_t>(1),
            sensorType: 0,
            temperature: 0,
        };
        let newer = gpu.get(&lib.nvmlDeviceGetTemperatureV, empty);
        degrees = newer.map(|of| u32::try_from(of.temperature).unwrap_or(0));
    }
    degrees.and_then(|degrees| if degrees <= HOTTEST { Ok(degrees) } else { Err(NvmlError::NotSupported) })
}

fn as_count(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

fn wires(nvml: &Nvml, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let lib = nvml.lib();
    let link =
        |generation: Answer<u32>, width: Answer<u32>| Ok(PcieLink { generation: generation?, width: width? });
    let now = link(
        gpu.get(&lib.nvmlDeviceGetCurrPcieLinkGeneration, 0),
        gpu.get(&lib.nvmlDeviceGetCurrPcieLinkWidth, 0),
    );
    reading.pcie = notes.take(now);
    let best = link(
        gpu.get(&lib.nvmlDeviceGetMaxPcieLinkGeneration, 0),
        gpu.get(&lib.nvmlDeviceGetMaxPcieLinkWidth, 0),
    );
    reading.pcie_max = notes.take(best);
    reading.pcie_replays = notes.take(gpu.get(&lib.nvmlDeviceGetPcieReplayCounter, 0));
    reading.nvlinks = links::states(nvml, gpu, notes);
    reading.fabric = notes.take(fabric(nvml, gpu));
}

/// By the newest version of the struct that the library takes; each has a field more.
fn fabric(nvml: &Nvml, gpu: Handle) -> Answer<FabricInfo> {
    let lib = nvml.lib();
    let mut info = nvmlGpuFabricInfo_v3_t {
        version: version::<nvmlGpuFabricInfo_v3_t>(3),
        clusterUuid: [0; 16],
        status: 0,
        cliqueId: 0,
        state: 0,
        healthMask: 0,
        healthSummary: 0,
    };
    for version in [info.version, version::<nvmlGpuFabricInfo_v2_t>(2)] {
        info.version = version;
        match gpu.get(&lib.nvmlDeviceGetGpuFabricInfoV, info) {
            Ok(told) => {
                return Ok(FabricInfo {
                    state: told.state.into(),
                    status: told.status,
                    health_mask: told.healthMask,
                    health_summary: told.healthSummary.into(),
                });
            }
            Err(NvmlError::GpuLost) => return Err(NvmlError::GpuLost),
            Err(NvmlError::ResetRequired) => return Err(NvmlError::ResetRequired),
            Err(_) => {}
        }
    }
    let none = nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: 0, cliqueId: 0, state: 0 };
    let told = gpu.get(&lib.nvmlDeviceGetGpuFabricInfo, none)?;
    let (state, status) = (told.state.into(), told.status);
    Ok(FabricInfo { state, status, health_mask: 0, health_summary: 0 })
}

fn work(nvml: &Nvml, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let lib = nvml.lib();
    reading.mig = notes.take(gpu.get_two(&lib.nvmlDeviceGetMigMode).map(|(now, _pending)| now != 0));
    let rates = gpu.get(&lib.nvmlDeviceGetUtilizationRates, nvmlUtilization_t { gpu: 0, memory: 0 });
    reading.utilization = notes.take(rates.map(|rates| rates.gpu));
    let processes = gpu.processes(nvml).map(|all| {
        let process = |(pid, memory): (u32, u64)| {
            let memory = Some(memory).filter(|memory| *memory != NOT_AVAILABLE);
            Some(GpuProcess { pid: Pid(i32::try_from(pid).ok()?), memory })
        };
        all.into_iter().filter_map(process).collect()
    });
    reading.processes = notes.take(processes);
}

/// Why a GPU that the driver counts has no handle.
fn unopened(error: &NvmlError) -> GpuTrouble {
    match error {
        NvmlError::InsufficientPower => GpuTrouble::NoPower,
        NvmlError::IrqIssue => GpuTrouble::NoInterrupts,
        NvmlError::Unknown => GpuTrouble::Unopened(error.to_string()),
        error => trouble(error),
    }
}

fn trouble(error: &NvmlError) -> GpuTrouble {
    match error {
        // The second: a GPU that is not found.
        NvmlError::GpuLost | NvmlError::UnexpectedVariant(28) => GpuTrouble::Lost,
        NvmlError::ResetRequired => GpuTrouble::ResetRequired,
        NvmlError::NoPermission | NvmlError::OperatingSystem => GpuTrouble::NoPermission,
        error => GpuTrouble::Other(error.to_string()),
    }
}
