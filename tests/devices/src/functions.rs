//! The functions, by NVML's names and with its types.
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use crate::script::{INVALID, Script};

/// A device: its place in the script, from 1.
type Handle = usize;

fn done(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(0)
}

/// Writes what a caller asked for.
fn put<T>(place: *mut T, value: T) -> Result<(), u32> {
    if place.is_null() {
        return Err(INVALID);
    }
    // SAFETY: NVML's callers give a pointer to a variable of theirs of this type.
    unsafe { place.write(value) };
    Ok(())
}

fn put_text(place: *mut c_char, length: c_uint, text: &str) -> Result<(), u32> {
    if place.is_null() || text.len() >= length as usize {
        return Err(7);
    }
    for (offset, byte) in text.bytes().chain([0]).enumerate() {
        // SAFETY: the text with its end is shorter than the caller's buffer of `length`.
        unsafe { place.add(offset).write(byte as c_char) };
    }
    Ok(())
}

/// The functions that give one number of a GPU: name, type, name in the script, value of a healthy one.
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
    done(script.and_then(|script| put(place, script.gpus.len() as c_uint)))
}

/// NVML's `nvmlDeviceGetHandleByIndex_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, place: *mut Handle) -> u32 {
    let handle = index as usize + 1;
    done(Script::gpu("nvmlDeviceGetHandleByIndex_v2", handle).and_then(|_| put(place, handle)))
}

/// NVML's `nvmlDeviceGetUUID`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: Handle, place: *mut c_char, length: c_uint) -> u32 {
    done(Script::gpu("nvmlDeviceGetUUID", device).and_then(|gpu| put_text(place, length, &gpu.uuid)))
}

/// NVML's `nvmlDeviceGetName`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: Handle, place: *mut c_char, length: c_uint) -> u32 {
    done(
        Script::gpu("nvmlDeviceGetName", device)
            .and_then(|_| put_text(place, length, "NVIDIA H100 80GB HBM3")),
    )
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

/// NVML's `nvmlDeviceGetPciInfo_v3`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, place: *mut PciInfo) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetPciInfo_v3", device);
    done(gpu.and_then(|gpu| {
        let mut info = PciInfo { bus_id_legacy: [0; 16], numbers: [0; 5], bus_id: [0; 32] };
        for (place, byte) in info.bus_id.iter_mut().take(31).zip(gpu.pci.bytes()) {
            *place = byte as c_char;
        }
        put(place, info)
    }))
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
    _errors: c_uint,
    counter: c_uint,
    place: *mut c_ulonglong,
) -> u32 {
    let name = if counter == 0 { "ecc_volatile" } else { "ecc_aggregate" };
    let value = Script::gpu("nvmlDeviceGetTotalEccErrors", device).and_then(|gpu| gpu.value(name, 0));
    done(value.and_then(|value| put(place, value)))
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

/// NVML's `nvmlDeviceGetNvLinkState`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, place: *mut c_uint) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetNvLinkState", device);
    done(gpu.and_then(|gpu| {
        if u64::from(link) >= gpu.value("nvlinks", 18)? {
            return Err(INVALID);
        }
        put(place, c_uint::from(!gpu.links_down.contains(&link)))
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
    let value = Script::gpu("nvmlDeviceGetMemoryInfo", device).and_then(|gpu| gpu.value("memory_used", 0));
    done(value.and_then(|used| put(place, [total, total.saturating_sub(used), used])))
}

/// NVML's `nvmlDeviceGetComputeRunningProcesses_v3`: nobody runs here.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    _processes: *mut u8,
) -> u32 {
    done(Script::gpu("nvmlDeviceGetComputeRunningProcesses_v3", device).and_then(|_| put(count, 0)))
}

/// NVML's `nvmlFieldValue_t`.
#[repr(C)]
#[derive(Debug)]
pub struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    code: c_uint,
    value: c_ulonglong,
}

/// NVML's `nvmlDeviceGetFieldValues`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: *mut FieldValue) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetFieldValues", device);
    done(gpu.and_then(|gpu| {
        if values.is_null() {
            return Err(INVALID);
        }
        for place in 0..usize::try_from(count).map_err(|_| INVALID)? {
            // SAFETY: the caller's array has `count` fields.
            let field = unsafe { &mut *values.add(place) };
            // An unsigned int.
            field.kind = 1;
            match gpu.value("recovery_action", 0) {
                Ok(value) if field.field == 230 => (field.code, field.value) = (0, value),
                Ok(_) => field.code = crate::script::NOT_SUPPORTED,
                Err(code) => field.code = code,
            }
        }
        Ok(())
    }))
}
