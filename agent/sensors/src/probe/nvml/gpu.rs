//! Reads one GPU.

use std::collections::BTreeMap;

use mainstay_health::hardware::gpu::{
    Clocks, FabricInfo, GpuIdentity, GpuProcess, GpuReading, GpuTrouble, PcieLink, PeerAccess, RemappedRows,
    SlowdownTimes,
};
use mainstay_model::id::Pid;
use mainstay_model::pci::PciAddress;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t, nvmlMarginTemperature_v1_t,
    nvmlTemperature_v1_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use super::address::address;
use super::calls::{Handle, Nvml, NvmlResult, by_index, counter, flag, or, short_counter, version};
use super::fields::{
    self, ECC_AGGREGATE, ECC_CORRECTED, ECC_VOLATILE, GPU_SCOPE, MEMORY_TEMPERATURE, PAGES_PENDING,
    PCIE_REPLAYS, RECOVERY_ACTION, REMAPPED_ROWS,
};
use super::notes::{Notes, trouble};
use super::{Library, details, links};

/// A number that means no value (NVML_VALUE_NOT_AVAILABLE).
const NOT_AVAILABLE: u64 = u64::MAX;

/// What to read of a GPU.
#[derive(Clone, Copy)]
pub(super) struct ReadRequest<'a> {
    /// Whether to read the details too.
    pub(super) details: bool,
    /// Indexes of the GPUs that may be asked which others they reach.
    pub(super) peers: &'a [u32],
    /// Bus addresses of GPUs by name, for libraries that do not report them.
    pub(super) places: &'a BTreeMap<String, PciAddress>,
    /// Called from time to time: calls return, even if slowly.
    pub(super) alive: &'a dyn Fn(),
}

/// Reads the GPU at an index of the driver's list; `known` has the earlier identities at each index.
pub(super) fn read(
    library: &Library,
    index: u32,
    known: &BTreeMap<u32, GpuIdentity>,
    wanted: ReadRequest<'_>,
) -> GpuReading {
    let nvml = library.nvml();
    let before = known.get(&index);
    let mut reading = GpuReading { index, identity: before.cloned(), ..GpuReading::default() };
    let gpu = match by_index(nvml, index) {
        Ok(gpu) => gpu,
        Err(error) => return GpuReading { trouble: Some(unopened(&error)), ..reading },
    };
    match identity(nvml, gpu, before, wanted.places) {
        Ok(identity) => reading.identity = Some(identity),
        Err(error) => return GpuReading { trouble: Some(unopened(&error)), ..reading },
    }
    let mut notes = Notes::default();
    memory(library, gpu, &mut reading, &mut notes);
    (wanted.alive)();
    heat_and_power(library, gpu, &mut reading, &mut notes);
    (wanted.alive)();
    wires(nvml, gpu, &mut reading, &mut notes);
    (wanted.alive)();
    work(nvml, gpu, &mut reading, &mut notes);
    if wanted.details && !notes.is_fatal() {
        (wanted.alive)();
        let links: Vec<u32> = reading.nvlinks.iter().map(|link| link.link).collect();
        // Without NVLinks no GPU can be reached over them.
        let others: Vec<u32> = wanted.peers.iter().copied().filter(|peer| *peer != index).collect();
        let peers = if links.is_empty() { Vec::new() } else { peers(nvml, gpu, &others) };
        (wanted.alive)();
        let details = details::read(library, gpu, &links, peers, wanted.alive, &mut notes);
        reading.details = Some(Box::new(details));
    }
    reading.trouble = notes.trouble();
    reading
}

/// Which of the others it reaches over NVLink; those without an answer are left out.
fn peers(nvml: &Nvml, gpu: Handle, others: &[u32]) -> Vec<PeerAccess> {
    let access = |index: &u32| {
        let other = by_index(nvml, *index).ok()?;
        Some(PeerAccess { peer: address(nvml, other).ok()?, status: gpu.reaches(nvml, other).ok()? })
    };
    others.iter().filter_map(access).collect()
}

/// The identity of the GPU. If a driver fails to report the name once, the board is still the same.
fn identity(
    nvml: &Nvml,
    gpu: Handle,
    known: Option<&GpuIdentity>,
    places: &BTreeMap<String, PciAddress>,
) -> NvmlResult<GpuIdentity> {
    let lib = nvml.lib();
    let is_lost = |error: &NvmlError| matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired);
    let address = match address(nvml, gpu) {
        Ok(address) => address,
        // An earlier address is valid if the name is still the same.
        Err(error) if is_lost(&error) => return Err(error),
        Err(error) => {
            let uuid = gpu.text(&lib.nvmlDeviceGetUUID)?;
            match known.filter(|known| known.uuid == uuid && !uuid.is_empty()) {
                Some(known) => return Ok(known.clone()),
                None => *places.get(&uuid).ok_or(error)?,
            }
        }
    };
    let known = known.filter(|known| known.address == address);
    let uuid = match gpu.text(&lib.nvmlDeviceGetUUID) {
        Err(error) if is_lost(&error) => return Err(error),
        Err(_) => known.map(|known| known.uuid.clone()).unwrap_or_default(),
        Ok(uuid) => uuid,
    };
    if let Some(known) = known.filter(|known| known.uuid == uuid) {
        return Ok(known.clone());
    }
    let name = gpu.text(&lib.nvmlDeviceGetName).ok().filter(|name| !name.is_empty());
    let name = name.unwrap_or_else(|| "NVIDIA GPU".to_owned());
    Ok(GpuIdentity { address, uuid, name, serial: gpu.text(&lib.nvmlDeviceGetSerial).ok() })
}

fn memory(library: &Library, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let nvml = library.nvml();
    let lib = nvml.lib();
    let ecc = |corrected, lifetime, field| {
        let value = counter(gpu.ecc(nvml, corrected, lifetime, None));
        let value = counter(fields::or_field(nvml, gpu, value, field));
        or(value, || details::ecc_by_place(nvml, gpu, corrected, lifetime))
    };
    reading.ecc_volatile = notes.take(ecc(false, false, ECC_VOLATILE));
    reading.ecc_aggregate = notes.take(ecc(false, true, ECC_AGGREGATE));
    reading.ecc_corrected = notes.take(ecc(true, false, ECC_CORRECTED));
    reading.remapped = notes.take(or(gpu.remapped_rows(nvml), || rows_by_field(nvml, gpu)).and_then(rows));
    let pending = gpu.get(&lib.nvmlDeviceGetRetiredPagesPendingStatus, 0).map(u64::from);
    let pending = fields::or_field(nvml, gpu, pending, PAGES_PENDING);
    reading.pages_pending = notes.take(flag(pending.map(|it| u32::try_from(it).unwrap_or(u32::MAX))));
    reading.unrepairable = notes.take(library.newer().unrepairable(gpu));
    reading.memory = notes.take(gpu.memory(nvml).and_then(|(total, used)| match used <= total {
        true => Ok((used, total)),
        false => Err(NvmlError::NotSupported),
    }));
}

fn rows([corrected, uncorrected, pending, failed]: [u32; 4]) -> NvmlResult<RemappedRows> {
    Ok(RemappedRows {
        corrected: short_counter(Ok(corrected))?,
        uncorrected: short_counter(Ok(uncorrected))?,
        pending: flag(Ok(pending))?,
        failed: flag(Ok(failed))?,
    })
}

/// Remapped rows from fields, if the library lacks the function. The most important value is whether one failed.
fn rows_by_field(nvml: &Nvml, gpu: Handle) -> NvmlResult<[u32; 4]> {
    let [corrected, uncorrected, pending, failed] = REMAPPED_ROWS
        .map(|field| fields::whole(nvml, gpu, field).map(|count| u32::try_from(count).unwrap_or(u32::MAX)));
    Ok([corrected.unwrap_or(0), uncorrected.unwrap_or(0), pending?, failed?])
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
    reading.margin = notes.take(margin.map(|reading| reading.marginTemperature));
    reading.power = notes.take(unless_forbidden(short_counter(gpu.get(&lib.nvmlDeviceGetPowerUsage, 0))));
    let reasons = or(gpu.get(&lib.nvmlDeviceGetCurrentClocksEventReasons, 0), || {
        gpu.get(&lib.nvmlDeviceGetCurrentClocksThrottleReasons, 0)
    });
    reading.clock_reasons = notes.take(counter(reasons));
    let clock = |kind| short_counter(gpu.get_at(&lib.nvmlDeviceGetClockInfo, kind, 0));
    let clocks = clock(1).and_then(|sm| Ok(Clocks { sm, memory: clock(2)? }));
    reading.clocks = notes.take(clocks);

    let [thermal, brake] = fields::slowdown_times(library.driver());
    let wanted = [RECOVERY_ACTION, MEMORY_TEMPERATURE, thermal, brake].map(|field| (field, GPU_SCOPE));
    let mut values = fields::read(nvml, gpu, &wanted).into_iter();
    let mut next = || values.next().unwrap_or(Err(NvmlError::NotSupported));
    // Numbers without a meaning (all bits set) mean no value.
    let action = next().map(as_count).and_then(|number| match number {
        0..=0xff => Ok(number),
        _ => Err(NvmlError::NotSupported),
    });
    reading.recovery_action = notes.take(action);
    // Boards without a sensor there report 0.
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

/// Above any sensor's value, in degrees Celsius: a higher number means no value.
const HOTTEST: u32 = 250;

/// From the old function, or from the newer one if that was removed.
pub(super) fn temperature(nvml: &Nvml, gpu: Handle) -> NvmlResult<u32> {
    let lib = nvml.lib();
    let degrees = or(gpu.get_at(&lib.nvmlDeviceGetTemperature, 0, 0), || {
        let empty = nvmlTemperature_v1_t {
            version: version::<nvmlTemperature_v1_t>(1),
            sensorType: 0,
            temperature: 0,
        };
        let newer = gpu.get(&lib.nvmlDeviceGetTemperatureV, empty);
        newer.map(|newer| u32::try_from(newer.temperature).unwrap_or(0))
    });
    degrees.and_then(|degrees| if degrees <= HOTTEST { Ok(degrees) } else { Err(NvmlError::NotSupported) })
}

fn as_count(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Above any PCIe generation: a higher number means no value.
const NEWEST_PCIE: u32 = 16;
const MOST_LANES: u32 = 32;

fn wires(nvml: &Nvml, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let lib = nvml.lib();
    let link = |generation: NvmlResult<u32>, width: NvmlResult<u32>| match (generation?, width?) {
        (generation @ 0..=NEWEST_PCIE, width @ 0..=MOST_LANES) => Ok(PcieLink { generation, width }),
        _ => Err(NvmlError::NotSupported),
    };
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
    let replays = short_counter(gpu.get(&lib.nvmlDeviceGetPcieReplayCounter, 0)).map(u64::from);
    let replays = fields::or_field(nvml, gpu, replays, PCIE_REPLAYS);
    reading.pcie_replays = notes.take(replays.map(|count| u32::try_from(count).unwrap_or(u32::MAX)));
    reading.nvlinks = links::states(nvml, gpu, notes);
    reading.fabric = notes.take(fabric(nvml, gpu));
}

/// From the newest version of the struct that the library accepts; each has one more field.
fn fabric(nvml: &Nvml, gpu: Handle) -> NvmlResult<FabricInfo> {
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
            Ok(value) => {
                return Ok(FabricInfo {
                    state: value.state.into(),
                    status: value.status,
                    health_mask: if value.healthMask == u32::MAX { 0 } else { value.healthMask },
                    health_summary: value.healthSummary.into(),
                });
            }
            Err(NvmlError::GpuLost) => return Err(NvmlError::GpuLost),
            Err(NvmlError::ResetRequired) => return Err(NvmlError::ResetRequired),
            Err(_) => {}
        }
    }
    let none = nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: 0, cliqueId: 0, state: 0 };
    let info = gpu.get(&lib.nvmlDeviceGetGpuFabricInfo, none)?;
    let (state, status) = (info.state.into(), info.status);
    Ok(FabricInfo { state, status, health_mask: 0, health_summary: 0 })
}

fn work(nvml: &Nvml, gpu: Handle, reading: &mut GpuReading, notes: &mut Notes) {
    let lib = nvml.lib();
    reading.mig = notes.take(flag(gpu.get_two(&lib.nvmlDeviceGetMigMode).map(|(now, _pending)| now)));
    let rates = gpu.get(&lib.nvmlDeviceGetUtilizationRates, nvmlUtilization_t { gpu: 0, memory: 0 });
    reading.utilization = notes.take(rates.and_then(|rates| match rates.gpu {
        percent @ 0..=100 => Ok(percent),
        _ => Err(NvmlError::NotSupported),
    }));
    let processes = gpu.processes(nvml).map(|all| {
        let process = |(pid, memory): (u32, u64)| {
            let memory = Some(memory).filter(|memory| *memory != NOT_AVAILABLE);
            // A list that is shorter than reported ends in zeros.
            let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0)?;
            Some(GpuProcess { pid: Pid(pid), memory })
        };
        all.into_iter().filter_map(process).collect()
    });
    reading.processes = notes.take(unless_forbidden(processes));
}

/// A value that we may not read is forbidden, and no fault of the GPU.
fn unless_forbidden<T>(result: NvmlResult<T>) -> NvmlResult<T> {
    match result {
        Err(NvmlError::NoPermission) => Err(NvmlError::NotSupported),
        result => result,
    }
}

/// Why a GPU in the driver's list has no handle.
fn unopened(error: &NvmlError) -> GpuTrouble {
    match error {
        NvmlError::InsufficientPower => GpuTrouble::NoPower,
        NvmlError::IrqIssue => GpuTrouble::NoInterrupts,
        NvmlError::Unknown => GpuTrouble::Unopened(error.to_string()),
        error => trouble(error),
    }
}
