//! What launcher and agent send to each other: what is understood is written again as the same, the rest is refused by
//! its part.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_core::model::messages;
use mainstay_core::view::replay::replay;
use mainstay_fuzz::{survives_json, text};

fuzz_target!(|bytes: &[u8]| {
    let all = text(bytes);
    let mut parts = all.lines();
    let mut entries = Vec::new();
    while let Some(part) = parts.next() {
        entries.extend(messages::entry(part).ok());
        if let Ok((verdict, decision)) = messages::proposal(part, parts.clone().next().unwrap_or("")) {
            let both = [serde_json::to_vec(&verdict), serde_json::to_vec(&decision)].map(|text| text.expect("JSON"));
            assert_eq!(survives_json(&both[0]), Some(verdict));
            assert_eq!(survives_json(&both[1]), Some(decision));
        }
        if let Ok(component) = messages::component(part) {
            let written = serde_json::to_vec(&component).expect("JSON");
            assert_eq!(survives_json(&written), Some(component));
        }
        if let Ok(known) = messages::surroundings(part) {
            let written = serde_json::to_vec(&known).expect("JSON");
            assert_eq!(survives_json(&written), Some(known));
        }
        let _ = (messages::decision(part), messages::record(part));
    }
    let _ = replay(&entries);
});
