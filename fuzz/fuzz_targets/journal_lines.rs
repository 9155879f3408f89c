//! Lines of a journal, our own or from a bundle: they survive a round trip, and can be masked and replayed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_model::entry::Entry;
use mainstay_model::redact::mask_json;
use mainstay_view::replay::replay;
use mainstay_fuzz::survives_json;

fuzz_target!(|bytes: &[u8]| {
    let mut entries = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        entries.extend(survives_json::<Entry>(line));
        if let Ok(mut value) = serde_json::from_slice(line) {
            mask_json(&mut value);
        }
    }
    let _ = replay(&entries);
});
