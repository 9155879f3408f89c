//! A library with DCGM's functions (its C ABI, those that the agent calls) that reports what a script contains.
//!
//! The script is the file `dcgm.json` next to the library, read again at every call:
//!
//! ```json
//! {"gpus": [0, 1], "codes": {"dcgmConnect_v2": -21}, "hang": [], "newest_response": 5,
//!  "incidents": [{"gpu": 0, "system": 16, "health": 20, "code": 4, "message": "…"}]}
//! ```
//!
//! As with the real library, the first check after its watches were set finds nothing.

#![allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "the library's callers know them by their names in C, where nothing is marked"
)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use serde::Deserialize;

/// The script's name, next to the library.
pub const SCRIPT: &str = "dcgm.json";

/// The library's name in the directory where cargo puts it: that of the test that uses it.
pub const LIBRARY: &str = "libfake_dcgm.so";

/// DCGM_ST_BADPARAM.
const BAD: c_int = -1;
/// DCGM_ST_VER_MISMATCH.
const MISMATCH: c_int = -12;
/// The only handle.
const HANDLE: usize = 7;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Script {
    gpus: Vec<u32>,
    codes: BTreeMap<String, c_int>,
    hang: Vec<String>,
    /// The newest version of the response that it knows.
    newest_response: u32,
    incidents: Vec<Incident>,
    /// The PCI addresses of the GPUs.
    addresses: BTreeMap<u32, String>,
    /// Policies that are violated: condition, GPU, value. Added ones are reported at the next check, if a policy
    /// with that condition is set.
    violations: Vec<(u32, u32, u32)>,
    /// Conditions of the policy that another client set.
    policy: u32,
}

impl Default for Script {
    fn default() -> Script {
        let (gpus, codes, hang, incidents) = (Vec::new(), BTreeMap::new(), Vec::new(), Vec::new());
        let (addresses, violations) = (BTreeMap::new(), Vec::new());
        Script { gpus, codes, hang, newest_response: 5, incidents, addresses, violations, policy: 0 }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Incident {
    gpu: Option<u32>,
    system: u32,
    health: u32,
    code: u32,
    message: String,
}

static CHECKED: AtomicBool = AtomicBool::new(false);

fn beside_the_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with(LIBRARY))?;
    Some(Path::new(&line[line.find('/')?..]).with_file_name(SCRIPT))
}

/// The script for a call of `function`; does not return if the call must hang.
fn script(function: &str) -> Result<Script, c_int> {
    let text = std::fs::read(beside_the_library().ok_or(BAD)?).map_err(|_| BAD)?;
    let script: Script = serde_json::from_slice(&text).map_err(|_| BAD)?;
    while script.hang.iter().any(|hanging| hanging == function) {
        std::thread::park();
    }
    match script.codes.get(function) {
        Some(code) if *code != 0 => Err(*code),
        _ => Ok(script),
    }
}

fn done(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// Writes to the caller's variable.
fn put<T>(place: *mut T, value: T) -> Result<(), c_int> {
    if place.is_null() {
        return Err(BAD);
    }
    // SAFETY: DCGM's contract: the caller's pointer is to a variable of the type.
    unsafe { place.write(value) };
    Ok(())
}

/// Reads a word of a caller's struct.
fn word(place: *const c_uint, index: usize) -> Result<c_uint, c_int> {
    if place.is_null() {
        return Err(BAD);
    }
    // SAFETY: DCGM's contract: the struct has as many words as its version says, and it starts with the version.
    Ok(unsafe { place.add(index).read_unaligned() })
}

/// DCGM's `dcgmInit`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmInit() -> c_int {
    done(script("dcgmInit").map(drop))
}

/// DCGM's `dcgmConnect_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmConnect_v2(_: *const c_char, parameters: *const c_uint, handle: *mut usize) -> c_int {
    done(script("dcgmConnect_v2").and_then(|_| match word(parameters, 0)? {
        0x0200_0010 => put(handle, HANDLE),
        _ => Err(MISMATCH),
    }))
}

/// DCGM's `dcgmStartEmbedded_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmStartEmbedded_v2(parameters: *mut c_uint) -> c_int {
    done(script("dcgmStartEmbedded_v2").and_then(|_| match word(parameters, 0)? {
        // SAFETY: as above; the handle is the second pair of words.
        0x0100_0048 => put(unsafe { parameters.add(2) }.cast::<usize>(), HANDLE),
        _ => Err(MISMATCH),
    }))
}

/// DCGM's `dcgmHealthSet_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmHealthSet_v2(handle: usize, parameters: *const c_uint) -> c_int {
    CHECKED.store(false, Ordering::Relaxed);
    done(script("dcgmHealthSet_v2").and_then(|_| match (handle, word(parameters, 0)?) {
        (HANDLE, 0x0200_0028) => Ok(()),
        (HANDLE, _) => Err(MISMATCH),
        _ => Err(BAD),
    }))
}

/// DCGM's `dcgmGetAllSupportedDevices`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmGetAllSupportedDevices(_: usize, ids: *mut c_uint, count: *mut c_int) -> c_int {
    done(script("dcgmGetAllSupportedDevices").and_then(|script| {
        for (place, gpu) in script.gpus.iter().enumerate() {
            // SAFETY: the caller's array has room for DCGM_MAX_NUM_DEVICES.
            put(unsafe { ids.add(place) }, *gpu)?;
        }
        put(count, script.gpus.len() as c_int)
    }))
}

/// DCGM's `dcgmHealthCheck`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmHealthCheck(_: usize, _: usize, response: *mut c_uint) -> c_int {
    const INCIDENT: usize = 1044 / 4;
    done(script("dcgmHealthCheck").and_then(|script| {
        let room = match word(response, 0)? {
            0x0510_500c if script.newest_response >= 5 => 1024,
            0x0401_050c => 64,
            _ => return Err(MISMATCH),
        };
        tell_violations(&script);
        let found = if CHECKED.swap(true, Ordering::Relaxed) { script.incidents } else { Vec::new() };
        let count = found.len().min(room);
        let write = |index: usize, value: c_uint| {
            // SAFETY: as above; the index is within the bounds of the version.
            put(unsafe { response.add(index) }, value)
        };
        write(1, if count > 0 { 20 } else { 0 })?;
        write(2, count as c_uint)?;
        for (place, incident) in found.iter().take(count).enumerate() {
            let begin = 3 + place * INCIDENT;
            write(begin, incident.system)?;
            write(begin + 1, incident.health)?;
            let mut message = [0_u8; 1024];
            let length = incident.message.len().min(1023);
            message[..length].copy_from_slice(&incident.message.as_bytes()[..length]);
            // SAFETY: as above; the message has 1024 bytes from its third word on.
            put(unsafe { response.add(begin + 2) }.cast::<[u8; 1024]>(), message)?;
            write(begin + 2 + 256, incident.code)?;
            // DCGM_FE_GPU, or DCGM_FE_SWITCH.
            write(begin + 3 + 256, if incident.gpu.is_some() { 1 } else { 3 })?;
            write(begin + 4 + 256, incident.gpu.unwrap_or(0))?;
        }
        Ok(())
    }))
}

type Callback = extern "C" fn(*const [u32; 8], u64) -> c_int;

static LISTENER: Mutex<Option<Callback>> = Mutex::new(None);
static REPORTED_VIOLATIONS: AtomicUsize = AtomicUsize::new(0);

fn tell_violations(script: &Script) {
    let listener = LISTENER.lock().map_or(None, |listener| *listener);
    let Some(listener) = listener else { return };
    let reported = REPORTED_VIOLATIONS.swap(script.violations.len(), Ordering::Relaxed);
    let set = script.policy | POLICY.load(Ordering::Relaxed);
    let violated = script.violations.iter().skip(reported);
    for (condition, gpu, value) in violated.filter(|(condition, ..)| condition & set != 0) {
        // Version 2: version, condition, a time in two words, two numbers, the GPU.
        let response = [0x0200_0020, *condition, 0, 0, *value, *value, *gpu, 0];
        listener(&raw const response, 0);
    }
}

/// Conditions of the policy that was set here.
static POLICY: AtomicU32 = AtomicU32::new(0);

/// `dcgmPolicy_v1`, by its size and version.
const POLICY_VERSION: c_uint = 0x0100_0090;

/// DCGM's `dcgmPolicyGet`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmPolicyGet(_: usize, _: usize, count: c_int, policies: *mut c_uint, _: usize) -> c_int {
    done(script("dcgmPolicyGet").and_then(|script| {
        for gpu in 0..usize::try_from(count).map_err(|_| BAD)?.min(script.gpus.len()) {
            // SAFETY: DCGM's contract: the caller's list has `count` policies of 144 bytes each.
            let policy = unsafe { policies.add(gpu * 36) };
            if word(policy, 0)? != POLICY_VERSION {
                return Err(MISMATCH);
            }
            // SAFETY: as above; the conditions are its second word.
            put(unsafe { policy.add(1) }, script.policy | POLICY.load(Ordering::Relaxed))?;
        }
        Ok(())
    }))
}

/// DCGM's `dcgmPolicySet`: a policy that does more than report is refused, so that the agent cannot set one
/// unnoticed.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmPolicySet(_: usize, _: usize, policy: *const c_uint, _: usize) -> c_int {
    done(script("dcgmPolicySet").and_then(|_| {
        if word(policy, 0)? != POLICY_VERSION {
            return Err(MISMATCH);
        }
        if (2..7).any(|deed| word(policy, deed) != Ok(0)) {
            return Err(BAD);
        }
        POLICY.store(word(policy, 1)?, Ordering::Relaxed);
        Ok(())
    }))
}

/// DCGM's `dcgmPolicyRegister_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmPolicyRegister_v2(_: usize, _: usize, _: c_uint, listener: Callback, _: u64) -> c_int {
    done(script("dcgmPolicyRegister_v2").map(|_| {
        if let Ok(mut place) = LISTENER.lock() {
            *place = Some(listener);
        }
    }))
}

/// DCGM's `dcgmEntitiesGetLatestValues`: the PCI addresses of GPUs (field 57), as text.
#[unsafe(no_mangle)]
pub extern "C" fn dcgmEntitiesGetLatestValues(
    _: usize,
    entities: *const [c_uint; 2],
    count: c_uint,
    fields: *const u16,
    field_count: c_uint,
    _: c_uint,
    values: *mut u8,
) -> c_int {
    const VALUE: usize = 4128;
    done(script("dcgmEntitiesGetLatestValues").and_then(|script| {
        // SAFETY: DCGM's contract: the lists have the lengths that the caller passes.
        if field_count != 1 || unsafe { fields.read() } != 57 {
            return Err(BAD);
        }
        for place in 0..count as usize {
            // SAFETY: as above.
            let [_, gpu] = unsafe { entities.add(place).read() };
            // SAFETY: as above; each value has 4128 bytes.
            let value = unsafe { values.add(place * VALUE) };
            let Some(address) = script.addresses.get(&gpu) else { continue };
            // SAFETY: entity, status and text are at these places of the value, and the text has room for 4096.
            unsafe {
                value.add(8).cast::<u32>().write_unaligned(gpu);
                value.add(16).cast::<i32>().write_unaligned(0);
                value.add(32).copy_from_nonoverlapping(address.as_ptr(), address.len().min(255));
                value.add(32 + address.len().min(255)).write(0);
            }
        }
        Ok(())
    }))
}

/// DCGM's `errorString`.
#[unsafe(no_mangle)]
pub extern "C" fn errorString(code: c_int) -> *const c_char {
    let text = match code {
        -21 => c"The connection to the host engine is not valid any longer",
        MISMATCH => c"The version of the struct is not the one that is expected",
        _ => c"An error",
    };
    text.as_ptr()
}
