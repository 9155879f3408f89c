//! The functions, by NVML's names and with its types.
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use crate::script::{FRESH, INVALID, OTHER_VERSION, Script, TOO_SMALL, handle};

/// A device: its index in the script, from 1.
pub(crate) type Handle = usize;

pub(crate) fn done(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(0)
}

/// Writes the value that a caller asked for.
pub(crate) fn put<T>(place: *mut T, value: T) -> Result<(), u32> {
    if place.is_null() {
        return Err(INVALID);
    }
    // SAFETY: NVML's callers give a pointer to a variable of theirs of this type.
    unsafe { place.write(value) };
    Ok(())
}

pub(crate) fn put_text(place: *mut c_char, length: c_uint, text: &str) -> Result<(), u32> {
    put_bytes(place, length, text.as_bytes())
}

fn put_bytes(place: *mut c_char, length: c_uint, text: &[u8]) -> Result<(), u32> {
    if place.is_null() || text.len() >= length as usize {
        return Err(7);
    }
    for (offset, byte) in text.iter().copied().chain([0]).enumerate() {
        // SAFETY: the text with its end is shorter than the caller's buffer of `length`.
        unsafe { place.add(offset).write(byte as c_char) };
    }
    Ok(())
}

/// The functions that return one number of a GPU: name, type, name in the script, value of a healthy GPU.
macro_rules! numbers {
    ($( $function:ident: $type:ty = $name:literal, $healthy:expr; )*) => {
        $(
            #[doc = concat!("NVML's `", stringify!($function), "`.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $function(device: Handle, place: *mut $type) -> u32 {
                done((|| {
                    let value = Script::gpu(stringify!($function), device)?.value($name, $healthy)?;
                    put(place, value as $type)
                })())
            }
        )*
    };
}

numbers! {
    nvmlDeviceGetPowerUsage: c_uint = "power", 90_000;
    nvmlDeviceGetCurrentClocksThrottleReasons: c_ulonglong = "clock_reasons", 1;
    nvmlDeviceGetCurrPcieLinkGeneration: c_uint = "pcie_generation", 5;
    nvmlDeviceGetCurrPcieLinkWidth: c_uint = "pcie_width", 16;
    nvmlDeviceGetMaxPcieLinkGeneration: c_uint = "pcie_generation_max", 5;
    nvmlDeviceGetMaxPcieLinkWidth: c_uint = "pcie_width_max", 16;
    nvmlDeviceGetPcieReplayCounter: c_uint = "pcie_replays", 0;
    nvmlDeviceGetRetiredPagesPendingStatus: c_uint = "pages_pending", 0;
    nvmlDeviceGetCurrentClocksEventReasons: c_ulonglong = "clock_reasons", 1;
    nvmlDeviceGetEnforcedPowerLimit: c_uint = "power_limit", 700_000;
    nvmlDeviceGetPersistenceMode: c_uint = "persistence", 1;
    nvmlDeviceGetUnrepairableMemoryFlag_v1: c_uint = "unrepairable", 0;
}

/// NVML's `nvmlInit_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> u32 {
    done(Script::for_call("nvmlInit_v2").map(drop))
}

/// NVML's `nvmlShutdown`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> u32 {
    0
}

/// NVML's `nvmlSystemGetDriverVersion`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(place: *mut c_char, length: c_uint) -> u32 {
    let script = Script::for_call("nvmlSystemGetDriverVersion");
    done(script.and_then(|script| put_text(place, length, &script.driver)))
}

/// NVML's `nvmlDeviceGetCount_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(place: *mut c_uint) -> u32 {
    let script = Script::for_call("nvmlDeviceGetCount_v2");
    done(script.and_then(|script| put(place, script.count.unwrap_or(script.gpus.len() as c_uint))))
}

/// NVML's `nvmlDeviceGetHandleByIndex_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, place: *mut Handle) -> u32 {
    done(Script::now().and_then(|script| {
        let handle = handle(index, &script);
        Script::gpu("nvmlDeviceGetHandleByIndex_v2", handle).and_then(|_| put(place, handle))
    }))
}

/// NVML's `nvmlDeviceGetUUID`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: Handle, place: *mut c_char, length: c_uint) -> u32 {
    done(
        Script::gpu("nvmlDeviceGetUUID", device).and_then(|gpu| {
            put_bytes(place, length, gpu.uuid_bytes.as_deref().unwrap_or(gpu.uuid.as_bytes()))
        }),
    )
}

/// NVML's `nvmlDeviceGetName`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: Handle, place: *mut c_char, length: c_uint) -> u32 {
    done(Script::gpu("nvmlDeviceGetName", device).and_then(|gpu| {
        put_bytes(place, length, gpu.name_bytes.as_deref().unwrap_or(b"NVIDIA H100 80GB HBM3"))
    }))
}

/// NVML's `nvmlDeviceGetSerial`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSerial(device: Handle, place: *mut c_char, length: c_uint) -> u32 {
    done(Script::gpu("nvmlDeviceGetSerial", device).and_then(|gpu| put_text(place, length, &gpu.uuid)))
}

/// NVML's `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Debug)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    numbers: [c_uint; 5],
    bus_id: [c_char; 32],
}

impl PciInfo {
    pub(crate) fn of(address: &str) -> PciInfo {
        let mut info = PciInfo { bus_id_legacy: [0; 16], numbers: [0; 5], bus_id: [0; 32] };
        for (place, byte) in info.bus_id.iter_mut().take(31).zip(address.bytes()) {
            *place = byte as c_char;
        }
        info
    }

    /// The address as numbers only: domain, bus, device.
    pub(crate) fn in_numbers(address: &str) -> Option<PciInfo> {
        let mut info = PciInfo::of("");
        let parts = address.split_once('.').map_or(address, |(parts, _function)| parts).split(':');
        for (place, part) in info.numbers.iter_mut().zip(parts) {
            *place = c_uint::from_str_radix(part, 16).ok()?;
        }
        Some(info)
    }
}

/// NVML's `nvmlDeviceGetPciInfo_v3`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, place: *mut PciInfo) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetPciInfo_v3", device);
    done(gpu.and_then(|gpu| put(place, PciInfo::of(&gpu.pci))))
}

/// NVML's `nvmlDeviceGetTemperature`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(device: Handle, _sensor: c_uint, place: *mut c_uint) -> u32 {
    let value = Script::gpu("nvmlDeviceGetTemperature", device).and_then(|gpu| gpu.value("temperature", 41));
    done(value.and_then(|value| put(place, value as c_uint)))
}

/// NVML's `nvmlDeviceGetTotalEccErrors`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: Handle,
    errors: c_uint,
    counter: c_uint,
    place: *mut c_ulonglong,
) -> u32 {
    let name = match (errors, counter) {
        (0, 0) => "ecc_corrected",
        (0, _) => "ecc_corrected_aggregate",
        (_, 0) => "ecc_volatile",
        (_, _) => "ecc_aggregate",
    };
    let value = Script::gpu("nvmlDeviceGetTotalEccErrors", device).and_then(|gpu| gpu.value(name, 0));
    done(value.and_then(|value| put(place, value as c_ulonglong)))
}

/// NVML's `nvmlDeviceGetMemoryErrorCounter`: of memory (2) and of the chip (7).
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryErrorCounter(
    device: Handle,
    errors: c_uint,
    counter: c_uint,
    location: c_uint,
    place: *mut c_ulonglong,
) -> u32 {
    let value = Script::gpu("nvmlDeviceGetMemoryErrorCounter", device).and_then(|gpu| {
        let of = match location {
            2 => "dram",
            7 => "sram",
            _ => return Err(INVALID),
        };
        let kind = if errors == 0 { "corrected" } else { "uncorrected" };
        let since = if counter == 0 { "volatile" } else { "aggregate" };
        gpu.value(&format!("{of}_{kind}_{since}"), 0)
    });
    done(value.and_then(|value| put(place, value as c_ulonglong)))
}

/// NVML's `nvmlDeviceGetRemappedRows`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRemappedRows(
    device: Handle,
    corrected: *mut c_uint,
    uncorrected: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetRemappedRows", device);
    done(gpu.and_then(|gpu| {
        put(corrected, gpu.value("remapped_corrected", 0)? as c_uint)?;
        put(uncorrected, gpu.value("remapped_uncorrected", 0)? as c_uint)?;
        put(pending, gpu.value("remap_pending", 0)? as c_uint)?;
        put(failed, gpu.value("remap_failed", 0)? as c_uint)
    }))
}

/// NVML's `nvmlDeviceGetMigMode`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(device: Handle, current: *mut c_uint, pending: *mut c_uint) -> u32 {
    let value = Script::gpu("nvmlDeviceGetMigMode", device).and_then(|gpu| gpu.value("mig", 0));
    done(value.and_then(|value| put(current, value as c_uint).and_then(|()| put(pending, value as c_uint))))
}

/// NVML's `nvmlDeviceGetUtilizationRates`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(device: Handle, place: *mut [c_uint; 2]) -> u32 {
    let value =
        Script::gpu("nvmlDeviceGetUtilizationRates", device).and_then(|gpu| gpu.value("utilization", 0));
    done(value.and_then(|value| put(place, [value as c_uint, 0])))
}

/// NVML's `nvmlDeviceGetMemoryInfo`: total, free, used.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(device: Handle, place: *mut [c_ulonglong; 3]) -> u32 {
    let total: u64 = 80 << 30;
    done(Script::gpu("nvmlDeviceGetMemoryInfo", device).and_then(|gpu| {
        // Reserved memory counts as used here, and only here.
        let used = (gpu.value("memory_used", 0)? + gpu.value("memory_reserved", 0)?) as u64;
        put(place, [total, total.saturating_sub(used), used])
    }))
}

/// NVML's `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Debug)]
pub struct OldProcess {
    pid: c_uint,
    memory: c_ulonglong,
}

/// NVML's `nvmlProcessInfo_v2_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Process {
    pid: c_uint,
    memory: c_ulonglong,
    instances: [c_uint; 2],
}

fn put_list<T>(
    function: &str,
    device: Handle,
    count: *mut c_uint,
    places: *mut T,
    element: impl Fn(u32, u64) -> T,
) -> u32 {
    done(Script::gpu(function, device).and_then(|gpu| {
        if count.is_null() || places.is_null() {
            return Err(INVALID);
        }
        // SAFETY: NVML's callers give the length of their array here.
        let room = unsafe { count.read() } as usize;
        let claimed = gpu.value("processes_claimed", gpu.processes.len() as i64)?;
        put(count, claimed as c_uint)?;
        if gpu.processes.len() > room {
            return Err(TOO_SMALL);
        }
        for (place, (pid, memory)) in gpu.processes.iter().enumerate() {
            // SAFETY: the array has room for as many.
            unsafe { places.add(place).write(element(*pid, *memory)) };
        }
        Ok(())
    }))
}

/// NVML's `nvmlDeviceGetComputeRunningProcesses_v3`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    places: *mut Process,
) -> u32 {
    put_list("nvmlDeviceGetComputeRunningProcesses_v3", device, count, places, |pid, memory| Process {
        pid,
        memory,
        instances: [u32::MAX; 2],
    })
}

/// NVML's older `nvmlDeviceGetComputeRunningProcesses`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses(
    device: Handle,
    count: *mut c_uint,
    places: *mut OldProcess,
) -> u32 {
    put_list("nvmlDeviceGetComputeRunningProcesses", device, count, places, |pid, memory| OldProcess {
        pid,
        memory,
    })
}

/// NVML's `nvmlMarginTemperature_v1_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Margin {
    version: c_uint,
    degrees: c_int,
}

/// NVML's `nvmlDeviceGetMarginTemperature`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMarginTemperature(device: Handle, place: *mut Margin) -> u32 {
    let value = Script::gpu("nvmlDeviceGetMarginTemperature", device);
    done(value.and_then(|gpu| {
        let version = right_version::<Margin>(place.cast(), 1)?;
        put(place, Margin { version, degrees: gpu.value("margin", 40)? as c_int })
    }))
}

/// A versioned struct must contain its version.
pub(crate) fn right_version<T>(place: *const c_uint, number: u32) -> Result<c_uint, u32> {
    let right = size_of::<T>() as c_uint | (number << 24);
    if place.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the version is the first field of the caller's struct.
    let given = unsafe { place.read() };
    if given == right { Ok(right) } else { Err(OTHER_VERSION) }
}

/// NVML's `nvmlEccSramErrorStatus_v1_t`.
#[repr(C)]
#[derive(Debug)]
pub struct SramStatus {
    version: c_uint,
    counts: [c_ulonglong; 11],
    threshold: c_uint,
}

/// NVML's `nvmlDeviceGetSramEccErrorStatus`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSramEccErrorStatus(device: Handle, place: *mut SramStatus) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetSramEccErrorStatus", device);
    done(gpu.and_then(|gpu| {
        let version = right_version::<SramStatus>(place.cast(), 1)?;
        let mut counts = [0; 11];
        counts[1] = gpu.value("sram_uncorrected_aggregate", 0)? as c_ulonglong;
        counts[4] = gpu.value("sram_uncorrected_volatile", 0)? as c_ulonglong;
        put(place, SramStatus { version, counts, threshold: gpu.value("sram_threshold", 0)? as c_uint })
    }))
}

/// NVML's `nvmlRepairStatus_v1_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Repairs {
    version: c_uint,
    channel: c_uint,
    processors: c_uint,
}

/// NVML's `nvmlDeviceGetRepairStatus`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRepairStatus(device: Handle, place: *mut Repairs) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetRepairStatus", device);
    done(gpu.and_then(|gpu| {
        let version = right_version::<Repairs>(place.cast(), 1)?;
        let channel = gpu.value("channel_repair", 0)? as c_uint;
        let processors = gpu.value("processor_repair", 0)? as c_uint;
        put(place, Repairs { version, channel, processors })
    }))
}

/// NVML's `nvmlGpuFabricInfo_v3_t`; version 2 ends before the summary.
#[repr(C)]
#[derive(Debug)]
pub struct Fabric {
    version: c_uint,
    cluster: [u8; 16],
    status: c_uint,
    clique: c_uint,
    state: u8,
    mask: c_uint,
    summary: u8,
}

/// NVML's `nvmlDeviceGetGpuFabricInfoV`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGpuFabricInfoV(device: Handle, place: *mut Fabric) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetGpuFabricInfoV", device);
    done(gpu.and_then(|gpu| {
        let newest = gpu.value("fabric_version", 3)?;
        let version = if newest == 3 {
            right_version::<Fabric>(place.cast(), 3)?
        } else {
            right_version::<[u32; 9]>(place.cast(), 2)?
        };
        let fabric = Fabric {
            version,
            cluster: [0; 16],
            status: gpu.value("fabric_status", 0)? as c_uint,
            clique: 0,
            state: gpu.value("fabric_state", 3)? as u8,
            mask: gpu.value("fabric_mask", 0)? as c_uint,
            summary: gpu.value("fabric_summary", 1)? as u8,
        };
        // Some libraries fill in only the first version, whatever version the caller asks for.
        let whole = if newest == 3 { size_of::<Fabric>() } else { 36 };
        let written = gpu.value("fabric_bytes", whole as i64)? as usize;
        let written = written.min(whole);
        // SAFETY: version 2 equals version 3 up to its last field, and is 36 bytes long; the caller's variable has
        // room for the version that the caller named.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const fabric).cast::<u8>(), place.cast::<u8>(), written)
        };
        Ok(())
    }))
}

/// NVML's `nvmlDeviceGetTemperatureThreshold`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperatureThreshold(device: Handle, kind: c_uint, place: *mut c_uint) -> u32 {
    let value = Script::gpu("nvmlDeviceGetTemperatureThreshold", device).and_then(|gpu| match kind {
        0 => gpu.value("shutdown_at", 95),
        1 => gpu.value("slowdown_at", 90),
        2 => gpu.value("memory_hottest", 95),
        3 => gpu.value("hottest", 87),
        _ => Err(INVALID),
    });
    done(value.and_then(|value| put(place, value as c_uint)))
}

/// NVML's `nvmlDeviceGetClockInfo`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, place: *mut c_uint) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetClockInfo", device);
    let value = gpu.and_then(|gpu| match kind {
        1 => gpu.value("clock_sm", 1980),
        2 => gpu.value("clock_memory", 2619),
        _ => Err(INVALID),
    });
    done(value.and_then(|value| put(place, value as c_uint)))
}

/// NVML's `nvmlDeviceGetViolationStatus`: heat (1) alone.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetViolationStatus(device: Handle, kind: c_uint, place: *mut [u64; 2]) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetViolationStatus", device);
    done(gpu.and_then(|gpu| match kind {
        1 => put(place, [0, gpu.value("violation_thermal", 0)? as u64]),
        _ => Err(crate::script::NOT_SUPPORTED),
    }))
}

/// NVML's `nvmlDeviceGetEccMode`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetEccMode(device: Handle, now: *mut c_uint, pending: *mut c_uint) -> u32 {
    let value = Script::gpu("nvmlDeviceGetEccMode", device).and_then(|gpu| gpu.value("ecc_on", 1));
    done(value.and_then(|on| put(now, on as c_uint).and_then(|()| put(pending, on as c_uint))))
}

/// NVML's `nvmlDeviceGetGspFirmwareMode`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGspFirmwareMode(device: Handle, on: *mut c_uint, usual: *mut c_uint) -> u32 {
    let value = Script::gpu("nvmlDeviceGetGspFirmwareMode", device).and_then(|gpu| gpu.value("gsp", 1));
    done(value.and_then(|is_on| put(on, is_on as c_uint).and_then(|()| put(usual, 1))))
}

/// NVML's `nvmlDeviceGetVbiosVersion`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetVbiosVersion(device: Handle, place: *mut c_char, length: c_uint) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetVbiosVersion", device);
    done(gpu.and_then(|gpu| put_text(place, length, gpu.vbios.as_deref().unwrap_or("96.00.61.00.01"))))
}

/// NVML's `nvmlDeviceValidateInforom`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceValidateInforom(device: Handle) -> u32 {
    done(Script::gpu("nvmlDeviceValidateInforom", device).map(drop))
}

/// NVML's `nvmlDeviceGetRetiredPages`: how many for many corrected errors (0) and for one that was not (1).
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRetiredPages(
    device: Handle,
    cause: c_uint,
    count: *mut c_uint,
    _addresses: *mut c_ulonglong,
) -> u32 {
    let name = if cause == 0 { "pages_corrected" } else { "pages_uncorrected" };
    let gpu = Script::gpu("nvmlDeviceGetRetiredPages", device);
    done(gpu.and_then(|gpu| {
        let pages = gpu.value(name, 0)?;
        put(count, pages as c_uint)?;
        if pages > 0 { Err(TOO_SMALL) } else { Ok(()) }
    }))
}

/// NVML's older `nvmlDeviceGetPciInfo_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v2(device: Handle, place: *mut PciInfo) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetPciInfo_v2", device);
    done(gpu.and_then(|gpu| put(place, PciInfo::of(&gpu.pci))))
}

/// NVML's `nvmlDeviceGetP2PStatus`: over NVLink (2), the GPUs whose indices are not in the list of lost ones.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetP2PStatus(
    device: Handle,
    other: Handle,
    kind: c_uint,
    place: *mut c_uint,
) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetP2PStatus", device);
    done(gpu.and_then(|gpu| {
        let lost = (other % FRESH).checked_sub(1).is_none_or(|other| gpu.peers_lost.contains(&other));
        if kind == 2 { put(place, if lost { 5 } else { 0 }) } else { put(place, 0) }
    }))
}

/// NVML's `nvmlTemperature_v1_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Temperature {
    version: c_uint,
    sensor: c_uint,
    degrees: c_int,
}

/// NVML's `nvmlDeviceGetTemperatureV`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperatureV(device: Handle, place: *mut Temperature) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetTemperatureV", device);
    done(gpu.and_then(|gpu| {
        let version = right_version::<Temperature>(place.cast(), 1)?;
        let degrees = gpu.value("temperature", 41)? as c_int;
        put(place, Temperature { version, sensor: 0, degrees })
    }))
}
