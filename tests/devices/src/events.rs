//! Events. One set is enough here: events after the registration are reported, one for each wait.
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_uint, c_ulonglong};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::functions::{Handle, done, put};
use crate::script::{INVALID, Script, TIMEOUT, beside_the_library, handle};

/// How many events of the script were reported, or were there before the registration.
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

/// Changes in the script's directory. A driver wakes its waiters, and so does this library: polling would count as
/// a cost of the agent.
struct Changes(Option<OwnedFd>);

impl Changes {
    fn of_the_script() -> Changes {
        let watch = || {
            let place = beside_the_library()?.parent()?;
            let changes = inotify::init(CreateFlags::CLOEXEC).ok()?;
            inotify::add_watch(&changes, place, WatchFlags::MOVED_TO | WatchFlags::CLOSE_WRITE).ok()?;
            Some(changes)
        };
        Changes(watch())
    }

    /// Returns at the next change, or at this time.
    fn wait(&self, until: Instant) {
        // If nothing can be watched, the script is polled.
        let longest = if self.0.is_some() { Duration::from_secs(1) } else { Duration::from_millis(5) };
        let left = until.saturating_duration_since(Instant::now()).min(longest);
        let mut watched: Vec<PollFd<'_>> =
            self.0.iter().map(|changes| PollFd::new(changes, PollFlags::IN)).collect();
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // Whatever the result, the script is read next.
        let _ = poll(&mut watched, Some(&left));
    }
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
    let until = Instant::now() + Duration::from_millis(longest_ms.into());
    loop {
        // Before the read, so that no change is lost between it and the wait.
        let changes = Changes::of_the_script();
        let script = match Script::for_call("nvmlEventSetWait_v2") {
            Ok(script) => script,
            Err(code) => return code,
        };
        let reported = TOLD.load(Ordering::SeqCst);
        if let Some(event) = script.events.get(reported) {
            TOLD.store(reported + 1, Ordering::SeqCst);
            let instances = [event.instance.unwrap_or(u32::MAX), u32::MAX];
            let device = if event.of_nobody { 0 } else { handle(event.gpu as u32, &script) };
            let data = EventData { device, kind: event.kind, data: event.data, instances };
            return done(put(place, data));
        }
        if script.impatient {
            static ASKED: AtomicUsize = AtomicUsize::new(0);
            // Far more calls than a caller that waits in between makes.
            if ASKED.fetch_add(1, Ordering::SeqCst) > 10_000 {
                std::process::abort();
            }
            return TIMEOUT;
        }
        if Instant::now() >= until {
            return TIMEOUT;
        }
        changes.wait(until);
    }
}
