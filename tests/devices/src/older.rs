//! Functions of older and unusual libraries.
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_char, c_uint, c_ulonglong};

use crate::events::{EventData, nvmlEventSetWait_v2};
use crate::functions::{Handle, PciInfo, done, put, right_version};
use crate::script::{INVALID, Script, TOO_SMALL, handle};

/// NVML's older `nvmlInit`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> u32 {
    done(Script::for_call("nvmlInit").map(drop))
}

/// NVML's `nvmlInitWithFlags`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> u32 {
    done(Script::for_call("nvmlInitWithFlags").map(drop))
}

/// NVML's older `nvmlDeviceGetCount`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount(place: *mut c_uint) -> u32 {
    let script = Script::for_call("nvmlDeviceGetCount");
    done(script.and_then(|script| put(place, script.gpus.len() as c_uint)))
}

/// NVML's older `nvmlDeviceGetHandleByIndex`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, place: *mut Handle) -> u32 {
    done(Script::now().and_then(|script| {
        let handle = handle(index, &script);
        Script::gpu("nvmlDeviceGetHandleByIndex", handle).and_then(|_| put(place, handle))
    }))
}

/// NVML's older `nvmlDeviceGetPciInfo`: here it returns numbers and no text.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo(device: Handle, place: *mut PciInfo) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetPciInfo", device);
    done(gpu.and_then(|gpu| put(place, PciInfo::in_numbers(&gpu.pci).ok_or(INVALID)?)))
}

/// NVML's `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Memory {
    version: c_uint,
    /// Total, reserved, free, used.
    bytes: [c_ulonglong; 4],
}

/// NVML's `nvmlDeviceGetMemoryInfo_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, place: *mut Memory) -> u32 {
    let total: u64 = 80 << 30;
    done(Script::gpu("nvmlDeviceGetMemoryInfo_v2", device).and_then(|gpu| {
        let version = right_version::<Memory>(place.cast(), 2)?;
        let used = gpu.value("memory_used", 0)? as u64;
        let reserved = gpu.value("memory_reserved", 0)? as u64;
        put(place, Memory { version, bytes: [total, reserved, total.saturating_sub(used + reserved), used] })
    }))
}

/// NVML's `nvmlDeviceGetRetiredPages_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRetiredPages_v2(
    device: Handle,
    cause: c_uint,
    count: *mut c_uint,
    addresses: *mut c_ulonglong,
    times: *mut c_ulonglong,
) -> u32 {
    let name = if cause == 0 { "pages_corrected" } else { "pages_uncorrected" };
    let gpu = Script::gpu("nvmlDeviceGetRetiredPages_v2", device);
    done(gpu.and_then(|gpu| {
        let pages = gpu.value(name, 0)? as c_uint;
        if count.is_null() || addresses.is_null() || times.is_null() {
            return Err(INVALID);
        }
        // SAFETY: NVML's callers give the length of their arrays here.
        let room = unsafe { count.read() };
        put(count, pages)?;
        if pages > room { Err(TOO_SMALL) } else { Ok(()) }
    }))
}

/// NVML's older `nvmlEventSetWait`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait(set: usize, place: *mut EventData, longest_ms: c_uint) -> u32 {
    nvmlEventSetWait_v2(set, place, longest_ms)
}

/// Writes a text, as a library does that writes to the standard output of its process.
pub(crate) fn chatter() {
    const TEXT: &[u8] = b"fake NVML: a call\n";
    // SAFETY: the bytes live as long as the program.
    let _ = unsafe { write(1, TEXT.as_ptr().cast(), TEXT.len()) };
}

unsafe extern "C" {
    fn write(file: i32, bytes: *const c_char, length: usize) -> isize;
}
