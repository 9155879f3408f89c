//! The record of a step in durable storage and the names of objects there: a record is written again as the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_checkpoint_format::bucket::{StepRecord, rank_of_manifest, run_directory, step_of_directory};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = StepRecord::decode(bytes) {
        assert_eq!(record.encode(), bytes);
        assert_eq!(record.shards.len(), record.name.world_size as usize);
        assert_eq!(step_of_directory(&record.name.directory()), Some((record.name.step, record.name.attempt)));
    }
    let Ok(name) = std::str::from_utf8(bytes) else { return };
    assert!(!run_directory(name).contains('/') && !run_directory(name).starts_with('.'));
    let _ = (step_of_directory(name), rank_of_manifest(name));
});
