//! The script.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Script {
    pub(crate) driver: String,
    pub(crate) codes: BTreeMap<String, u32>,
    pub(crate) hang: Vec<String>,
    pub(crate) gpus: Vec<Gpu>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    pub(crate) pci: String,
    pub(crate) codes: BTreeMap<String, u32>,
    pub(crate) values: BTreeMap<String, Option<u64>>,
    /// Links that are down.
    pub(crate) links_down: Vec<u32>,
}

/// NVML_ERROR_UNKNOWN: the script cannot be read.
pub(crate) const UNKNOWN: u32 = 999;
/// NVML_ERROR_INVALID_ARGUMENT.
pub(crate) const INVALID: u32 = 2;
/// NVML_ERROR_NOT_SUPPORTED.
pub(crate) const NOT_SUPPORTED: u32 = 3;

/// Where the script is: the process knows from where it loaded us.
fn beside_the_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with(crate::LIBRARY))?;
    let library = &line[line.find('/')?..];
    Some(Path::new(library).with_file_name(crate::SCRIPT))
}

impl Script {
    /// The script as it is now, for a call of `function`; does not return if that is to hang.
    pub(crate) fn for_call(function: &str) -> Result<Script, u32> {
        let text = std::fs::read(beside_the_library().ok_or(UNKNOWN)?).map_err(|_| UNKNOWN)?;
        let script: Script = serde_json::from_slice(&text).map_err(|_| UNKNOWN)?;
        while script.hang.iter().any(|hanging| hanging == function) {
            std::thread::park();
        }
        match script.codes.get(function) {
            Some(code) if *code != 0 => Err(*code),
            _ => Ok(script),
        }
    }

    /// The GPU of a handle, for a call of `function`.
    pub(crate) fn gpu(function: &str, handle: usize) -> Result<Gpu, u32> {
        let script = Script::for_call(function)?;
        let gpu =
            handle.checked_sub(1).and_then(|index| script.gpus.into_iter().nth(index)).ok_or(INVALID)?;
        match gpu.codes.get(function).or_else(|| gpu.codes.get("*")) {
            Some(code) if *code != 0 => Err(*code),
            _ => Ok(gpu),
        }
    }
}

impl Gpu {
    /// A value by its name, or that of a healthy GPU.
    pub(crate) fn value(&self, name: &str, healthy: u64) -> Result<u64, u32> {
        match self.values.get(name) {
            Some(Some(value)) => Ok(*value),
            Some(None) => Err(NOT_SUPPORTED),
            None => Ok(healthy),
        }
    }
}
