//! NVLinks, and values by number.
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::functions::{Handle, PciInfo, done, put};
use crate::script::{Gpu, INVALID, NOT_SUPPORTED, Script};

/// NVML's `nvmlDeviceGetNvLinkState`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, place: *mut c_uint) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetNvLinkState", device);
    done(gpu.and_then(|gpu| {
        gpu.link(link)?;
        gpu.link_value(link, "state", 1)?;
        put(place, c_uint::from(!gpu.links_down.contains(&link)))
    }))
}

/// NVML's `nvmlDeviceGetNvLinkErrorCounter`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkErrorCounter(
    device: Handle,
    link: c_uint,
    kind: c_uint,
    place: *mut c_ulonglong,
) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetNvLinkErrorCounter", device);
    let value = gpu.and_then(|gpu| {
        gpu.link(link)?;
        match kind {
            0 => gpu.link_value(link, "replays", 0),
            1 => gpu.link_value(link, "recoveries", 0),
            2 => gpu.link_value(link, "crc", 0),
            3 => Ok(0),
            _ => Err(INVALID),
        }
    });
    done(value.and_then(|value| put(place, value as c_ulonglong)))
}

/// NVML's `nvmlDeviceGetNvLinkRemotePciInfo_v2`: all links lead to one switch.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: Handle,
    link: c_uint,
    place: *mut PciInfo,
) -> u32 {
    let gpu = Script::gpu("nvmlDeviceGetNvLinkRemotePciInfo_v2", device);
    done(gpu.and_then(|gpu| {
        gpu.link(link)?;
        put(place, PciInfo::of("00000000:C1:00.0"))
    }))
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
        let script = Script::now()?;
        let driver = script.driver.clone();
        for place in 0..usize::try_from(count).map_err(|_| INVALID)? {
            // SAFETY: the caller's array has `count` fields.
            let field = unsafe { &mut *values.add(place) };
            // An unsigned long long; 0 means a floating-point number, and is the default if nothing wrote the
            // field.
            field.kind = if script.untyped_fields { 0 } else { 3 };
            match value_of(&gpu, field.field, field.scope, &driver) {
                Ok(value) => (field.code, field.value) = (0, value as c_ulonglong),
                Err(code) => field.code = code,
            }
        }
        Ok(())
    }))
}

fn value_of(gpu: &Gpu, field: u32, scope: u32, driver: &str) -> Result<i64, u32> {
    // These numbers changed with 580.82.
    let newer =
        driver.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major > 580);
    let (heat, brake) = if newer { (270, 271) } else { (252, 253) };
    let link = |name: &str| {
        gpu.link(scope)?;
        gpu.link_value(scope, name, 0)
    };
    // Some libraries know the numbers and count only through their functions.
    let counted = |name: &str| if gpu.value("link_fields_stand_still", 0)? == 1 { Ok(0) } else { link(name) };
    match field {
        3 => gpu.value("ecc_corrected", 0),
        4 => gpu.value("ecc_volatile", 0),
        6 => gpu.value("ecc_aggregate", 0),
        29 => gpu.value("pages_corrected", 0),
        30 => gpu.value("pages_uncorrected", 0),
        31 => gpu.value("pages_pending", 0),
        142 => gpu.value("remapped_corrected", 0),
        143 => gpu.value("remapped_corrected", 0).and_then(|_| gpu.value("remapped_uncorrected", 0)),
        144 => gpu.value("remapped_corrected", 0).and_then(|_| gpu.value("remap_pending", 0)),
        145 => gpu.value("remapped_corrected", 0).and_then(|_| gpu.value("remap_failed", 0)),
        94 => gpu.value("pcie_replays", 0),
        230 => gpu.value("recovery_action", 0),
        82 => gpu.value("memory_temperature", 50),
        194 => gpu.value("slowdown_margin", -2),
        161 => counted("replays"),
        162 => counted("recoveries"),
        163 => counted("crc"),
        213 => gpu.value("nvlink5", 0).and_then(|_| link("recovered")),
        214 => gpu.value("nvlink5", 0).and_then(|_| link("recovery_failed")),
        208 => gpu.value("nvlink5", 0).and_then(|_| link("received_errors")),
        211 => gpu.value("nvlink5", 0).and_then(|_| link("integrity_errors")),
        220 | 222 => gpu.value("nvlink5", 0).and_then(|_| {
            gpu.link(scope)?;
            gpu.link_value(scope, if field == 220 { "effective_ber" } else { "symbol_ber" }, 0xfff)
        }),
        _ if field == heat => gpu.value("slowdown_thermal", 0),
        _ if field == brake => gpu.value("slowdown_brake", 0),
        _ => Err(NOT_SUPPORTED),
    }
}
