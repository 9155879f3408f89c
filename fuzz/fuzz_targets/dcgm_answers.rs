//! The output of the DCGM probe: it survives a round trip, and the judge reports components for it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::hardware::dcgm::{DcgmCatalog, DcgmJudge, DcgmReport};
use mainstay_model::time::Mono;
use mainstay_fuzz::survives_json;

fuzz_target!(|bytes: &[u8]| {
    let Some(report) = survives_json::<DcgmReport>(bytes) else { return };
    let file =
        toml::from_str(include_str!("../../agent/catalog/hardware/dcgm.toml")).expect("our own catalogue");
    let mut judge = DcgmJudge::new(DcgmCatalog::new(file).expect("each code has one entry"), true);
    for at in 1..3 {
        let judged = judge.step(Mono(at), &report);
        assert!(!judged.components.is_empty());
    }
});
