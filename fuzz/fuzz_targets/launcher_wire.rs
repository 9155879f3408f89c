//! Messages between launcher and agent: a message that is parsed survives a round trip, the others are refused one by
//! one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_model::messages;
use mainstay_view::replay::replay;
use mainstay_fuzz::{survives_json, text};

fuzz_target!(|bytes: &[u8]| {
    let all = text(bytes);
    let mut entries = Vec::new();
    for part in all.lines() {
        entries.extend(messages::entry(part).ok());
        if let Ok(verdict) = messages::verdict(part) {
            let written = serde_json::to_vec(&verdict).expect("JSON");
            assert_eq!(survives_json(&written), Some(verdict));
        }
        if let Ok(component) = messages::component(part) {
            let written = serde_json::to_vec(&component).expect("JSON");
            assert_eq!(survives_json(&written), Some(component));
        }
        if let Ok(known) = messages::rank_context(part) {
            let written = serde_json::to_vec(&known).expect("JSON");
            assert_eq!(survives_json(&written), Some(known));
        }
        let _ = messages::record(part);
    }
    let _ = replay(&entries);
});
