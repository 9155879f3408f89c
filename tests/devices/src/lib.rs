//! A library with NVML's functions (its C ABI, those that the agent calls) that reports what a script contains.
//!
//! The script is the file `devices.json` next to the library, read again when it was replaced, so that the hardware
//! can change while the agent reads it. A test copies the library to its own directory:
//!
//! ```json
//! {"driver": "550.54.15", "codes": {"nvmlInit_v2": 18}, "hang": ["nvmlDeviceGetTemperature"], "slow_ms": 0,
//!  "gpus": [{"uuid": "GPU-1", "pci": "00000000:01:00.0", "values": {"temperature": 40}, "codes": {"*": 15},
//!            "links_down": [3], "links": {"4": {"replays": 12}}, "processes": [[4711, 1000000]]}],
//!  "events": [{"gpu": 0, "kind": 8, "data": 79}]}
//! ```
//!
//! `codes` are returned by functions instead of an answer, `*` by all functions of a GPU; a value that is not in
//! `values` is that of a healthy GPU, `null` is not supported (3). Events that are added while a caller waits are
//! reported. [`without`] removes functions of newer drivers from a copy.

mod events;
mod functions;
mod links;
mod older;
mod script;

/// The script's name, next to the library.
pub const SCRIPT: &str = "devices.json";

/// The library's name in the directory where cargo puts it: that of the test that uses it.
pub const LIBRARY: &str = "libfake_devices.so";

/// A copy of the library without these functions: their names are overwritten in its symbol table, where each is
/// between zeros.
pub fn without(library: &[u8], functions: &[&str]) -> Vec<u8> {
    let mut copy = library.to_vec();
    for function in functions {
        let name = [b"\0".as_slice(), function.as_bytes(), b"\0"].concat();
        let places: Vec<usize> = copy
            .windows(name.len())
            .enumerate()
            .filter(|(_, of)| *of == name)
            .map(|(place, _)| place)
            .collect();
        places.iter().for_each(|place| copy[place + 1] = b'x');
    }
    copy
}
