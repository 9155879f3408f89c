//! Events. One set is enough here: those that come after the registration are told, one for each wait.
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_uint, c_ulonglong};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::functions::{Handle, done, put};
use crate::script::{INVALID, Script, TIMEOUT, handle};

/// How many events of the script were told, or had come before the registration.
static TOLD: AtomicUsize = AtomicUsize::new(usize::MAX);

/// NVML's `nvmlEventData_t`.
#[repr(C)]
#[derive(Debug)]
pub struct EventData {
    device: Handle,
    kind: c_ulonglong,
    data: c_ulonglong,
    instances: [c_uint; 2],
}

/// NVML's `nvmlEventSetCreate`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(place: *mut usize) -> u32 {
    done(Script::for_call("nvmlEventSetCreate").and_then(|_| put(place, 1)))
}

/// NVML's `nvmlEventSetFree`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(_set: usize) -> u32 {
    0
}

/// NVML's `nvmlDeviceRegisterEvents`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: Handle, kinds: c_ulonglong, _set: usize) -> u32 {
    done(Script::gpu("nvmlDeviceRegisterEvents", device).and_then(|_| {
        let script = Script::now()?;
        if script.event_kinds.is_some_and(|offered| kinds & !offered != 0) {
            return Err(INVALID);
        }
        let _ = TOLD.compare_exchange(usize::MAX, script.events.len(), Ordering::SeqCst, Ordering::SeqCst);
        Ok(())
    }))
}

/// NVML's `nvmlEventSetWait_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(_set: usize, place: *mut EventData, longest_ms: c_uint) -> u32 {
    const LOOK_EVERY: Duration = Duration::from_millis(5);
    let until = Instant::now() + Duration::from_millis(longest_ms.into());
    loop {
        let script = match Script::for_call("nvmlEventSetWait_v2") {
            Ok(script) => script,
            Err(code) => return code,
        };
        let told = TOLD.load(Ordering::SeqCst);
        if let Some(event) = script.events.get(told) {
            TOLD.store(told + 1, Ordering::SeqCst);
            let instances = [event.instance.unwrap_or(u32::MAX), u32::MAX];
            let device = if event.of_nobody { 0 } else { handle(event.gpu as u32, &script) };
            let data = EventData { device, kind: event.kind, data: event.data, instances };
            return done(put(place, data));
        }
        if script.impatient {
            static ASKED: AtomicUsize = AtomicUsize::new(0);
            // Far more than anybody asks who waits between.
            if ASKED.fetch_add(1, Ordering::SeqCst) > 10_000 {
                std::process::abort();
            }
            return TIMEOUT;
        }
        if Instant::now() >= until {
            return TIMEOUT;
        }
        // Nothing tells of a change of the script but the script.
        std::thread::sleep(LOOK_EVERY);
    }
}
