//! The script.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Script {
    pub(crate) driver: String,
    pub(crate) codes: BTreeMap<String, u32>,
    pub(crate) hang: Vec<String>,
    /// How long each call takes, in milliseconds.
    pub(crate) slow_ms: u64,
    pub(crate) gpus: Vec<Gpu>,
    /// Events: those that are added while a caller waits are reported.
    pub(crate) events: Vec<Event>,
    /// Whether each call writes to standard output.
    pub(crate) chatter: bool,
    /// Whether waiting for events returns at once if there are none. A caller that polls without end is aborted.
    pub(crate) impatient: bool,
    /// How often the library must have been initialized by now: otherwise it acts as uninitialized.
    pub(crate) begins: u64,
    /// Kinds of events that GPUs offer; all if none are named.
    pub(crate) event_kinds: Option<u64>,
    /// Functions that end the process.
    pub(crate) crash: Vec<String>,
    /// The number of GPUs to report, if it differs.
    pub(crate) count: Option<u32>,
    /// Whether each call returns a different handle for the same GPU.
    pub(crate) fresh_handles: bool,
    /// Whether values by number are returned without their type.
    pub(crate) untyped_fields: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    pub(crate) pci: String,
    pub(crate) codes: BTreeMap<String, u32>,
    /// Functions that hang for this GPU only.
    pub(crate) hang: Vec<String>,
    /// Functions that end the process for this GPU only.
    pub(crate) crash: Vec<String>,
    /// Its product name as bytes, which may be invalid text.
    pub(crate) name_bytes: Option<Vec<u8>>,
    pub(crate) uuid_bytes: Option<Vec<u8>>,
    pub(crate) values: BTreeMap<String, Option<i64>>,
    /// Links that are down.
    pub(crate) links_down: Vec<u32>,
    /// Values of one link, by its number.
    pub(crate) links: BTreeMap<u32, BTreeMap<String, Option<i64>>>,
    /// Processes with their memory.
    pub(crate) processes: Vec<(u32, u64)>,
    pub(crate) vbios: Option<String>,
    /// Indices of GPUs that it cannot reach over NVLink.
    pub(crate) peers_lost: Vec<usize>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Event {
    pub(crate) gpu: usize,
    pub(crate) kind: u64,
    pub(crate) data: u64,
    pub(crate) instance: Option<u32>,
    /// The event carries no device.
    pub(crate) of_nobody: bool,
}

/// NVML_ERROR_UNKNOWN: the script cannot be read.
pub(crate) const UNKNOWN: u32 = 999;
/// NVML_ERROR_UNINITIALIZED.
const UNINITIALIZED: u32 = 1;
/// The value of `begins` at the last initialization.
static STARTED: AtomicU64 = AtomicU64::new(0);
/// NVML_ERROR_INVALID_ARGUMENT.
pub(crate) const INVALID: u32 = 2;
/// NVML_ERROR_NOT_SUPPORTED.
pub(crate) const NOT_SUPPORTED: u32 = 3;
/// NVML_ERROR_INSUFFICIENT_SIZE.
pub(crate) const TOO_SMALL: u32 = 7;
/// NVML_ERROR_TIMEOUT.
pub(crate) const TIMEOUT: u32 = 10;
/// NVML_ERROR_ARGUMENT_VERSION_MISMATCH.
pub(crate) const OTHER_VERSION: u32 = 25;

/// The path of the script: next to the loaded library.
pub(crate) fn beside_the_library() -> Option<&'static Path> {
    static PLACE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let line = maps.lines().find(|line| line.ends_with(crate::LIBRARY))?;
        let library = &line[line.find('/')?..];
        Some(Path::new(library).with_file_name(crate::SCRIPT))
    };
    PLACE.get_or_init(find).as_deref()
}

/// A script, and the file that it was read from: a replaced file is read again.
type Kept = Option<((u64, i64), Arc<Script>)>;

impl Script {
    /// The script as it is now.
    pub(crate) fn now() -> Result<Arc<Script>, u32> {
        static KEPT: Mutex<Kept> = Mutex::new(None);
        let place = beside_the_library().ok_or(UNKNOWN)?;
        let file = std::fs::metadata(place).map_err(|_| UNKNOWN)?;
        let which = (file.ino(), file.mtime_nsec());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, script)) = kept.as_ref().filter(|(of, _)| *of == which) {
            return Ok(script.clone());
        }
        let text = std::fs::read(place).map_err(|_| UNKNOWN)?;
        let script: Arc<Script> = Arc::new(serde_json::from_slice(&text).map_err(|_| UNKNOWN)?);
        *kept = Some((which, script.clone()));
        Ok(script)
    }

    /// The current script, for a call of `function`; does not return if the call must hang.
    pub(crate) fn for_call(function: &str) -> Result<Arc<Script>, u32> {
        let script = Script::now()?;
        if script.chatter {
            crate::older::chatter();
        }
        hang_if(&script.hang, function);
        crash_if(&script.crash, function);
        if function.starts_with("nvmlInit") {
            STARTED.store(script.begins, Ordering::Relaxed);
        } else if STARTED.load(Ordering::Relaxed) < script.begins {
            return Err(UNINITIALIZED);
        }
        if script.slow_ms > 0 {
            // This simulates a slow driver.
            std::thread::sleep(Duration::from_millis(script.slow_ms));
        }
        match script.codes.get(function) {
            Some(code) if *code != 0 => Err(*code),
            _ => Ok(script),
        }
    }

    /// The GPU of a handle, for a call of `function`.
    pub(crate) fn gpu(function: &str, handle: usize) -> Result<OneGpu, u32> {
        let script = Script::for_call(function)?;
        let place = handle % FRESH;
        let index = place.checked_sub(1).filter(|index| *index < script.gpus.len()).ok_or(INVALID)?;
        let gpu = OneGpu { script, index };
        hang_if(&gpu.hang, function);
        crash_if(&gpu.crash, function);
        match gpu.codes.get(function).or_else(|| gpu.codes.get("*")) {
            Some(code) if *code != 0 => Err(*code),
            _ => Ok(gpu),
        }
    }
}

fn hang_if(hanging: &[String], function: &str) {
    while hanging.iter().any(|of| of == function) {
        std::thread::park();
    }
}

fn crash_if(crashing: &[String], function: &str) {
    if crashing.iter().any(|of| of == function) {
        std::process::abort();
    }
}

/// The distance between handles of one GPU, if each call returns another.
pub(crate) const FRESH: usize = 4096;

/// A handle for the GPU at a place of the script.
pub(crate) fn handle(index: u32, script: &Script) -> usize {
    static GIVEN: AtomicUsize = AtomicUsize::new(1);
    let own = index as usize + 1;
    // Not the address of anything: a caller that dereferences it crashes.
    if script.fresh_handles { GIVEN.fetch_add(1, Ordering::Relaxed) * FRESH + own } else { own }
}

/// One GPU of a script.
pub(crate) struct OneGpu {
    script: Arc<Script>,
    index: usize,
}

impl std::ops::Deref for OneGpu {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.script.gpus[self.index]
    }
}

impl Gpu {
    /// A value by its name, or that of a healthy GPU.
    pub(crate) fn value(&self, name: &str, healthy: i64) -> Result<i64, u32> {
        of(&self.values, name, healthy)
    }

    /// A value of one link.
    pub(crate) fn link_value(&self, link: u32, name: &str, healthy: i64) -> Result<i64, u32> {
        match self.links.get(&link) {
            Some(values) => of(values, name, healthy),
            None => Ok(healthy),
        }
    }

    /// Whether it has this link.
    pub(crate) fn link(&self, link: u32) -> Result<(), u32> {
        if i64::from(link) < self.value("nvlinks", 18)? { Ok(()) } else { Err(INVALID) }
    }
}

fn of(values: &BTreeMap<String, Option<i64>>, name: &str, healthy: i64) -> Result<i64, u32> {
    match values.get(name) {
        Some(Some(value)) => Ok(*value),
        Some(None) => Err(NOT_SUPPORTED),
        None => Ok(healthy),
    }
}
