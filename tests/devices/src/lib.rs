//! A library with NVML's functions (its C ABI, those that the agent calls) that says what a script tells it to.
//!
//! The script is the file `devices.json` beside the library, read anew at every call, so that the world can change
//! while the agent looks at it. A test copies the library to a directory of its own:
//!
//! ```json
//! {"driver": "550.54.15", "codes": {"nvmlInit_v2": 18}, "hang": ["nvmlDeviceGetTemperature"],
//!  "gpus": [{"uuid": "GPU-1", "pci": "00000000:01:00.0", "values": {"temperature": 40}, "codes": {"*": 15}}]}
//! ```
//!
//! `codes` are what functions return instead of an answer, `*` all of a GPU's; a value that is not in `values` is one
//! of a healthy GPU, `null` is not supported (3).

mod functions;
mod script;

/// The script's name, beside the library.
pub const SCRIPT: &str = "devices.json";

/// The library's name in the directory where cargo puts it: that of the test that uses it.
pub const LIBRARY: &str = "libfake_devices.so";
