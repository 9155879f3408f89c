//! A library with NVML's functions (its C ABI, those that the agent calls) that says what a script tells it to.
//!
//! The script is the file `devices.json` beside the library, read anew when it was replaced, so that the world can
//! change while the agent looks at it. A test copies the library to a directory of its own:
//!
//! ```json
//! {"driver": "550.54.15", "codes": {"nvmlInit_v2": 18}, "hang": ["nvmlDeviceGetTemperature"], "slow_ms": 0,
//!  "gpus": [{"uuid": "GPU-1", "pci": "00000000:01:00.0", "values": {"temperature": 40}, "codes": {"*": 15},
//!            "links_down": [3], "links": {"4": {"replays": 12}}, "processes": [[4711, 1000000]]}],
//!  "events": [{"gpu": 0, "kind": 8, "data": 79}]}
//! ```
//!
//! `codes` are what functions return instead of an answer, `*` all of a GPU's; a value that is not in `values` is one
//! of a healthy GPU, `null` is not supported (3). Events are told that are added while someone waits. Functions of
//! newer drivers are taken out of a copy with [`without`].

mod events;
mod functions;
mod links;
mod older;
mod script;

/// The script's name, beside the library.
pub const SCRIPT: &str = "devices.json";

/// The library's name in the directory where cargo puts it: that of the test that uses it.
pub const LIBRARY: &str = "libfake_devices.so";

/// A copy of the library in which these functions are not to be found: their names are written over in its table of
/// symbols, where each stands between zeros.
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
