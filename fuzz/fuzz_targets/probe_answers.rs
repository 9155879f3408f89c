//! The output of the probe of the NVIDIA driver: it survives a round trip, and the judge accepts it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::hardware::gpu::{DeviceJudge, DeviceLimits, DeviceReport, ProbeAnswer, ProbeLine, ProbeRequest};
use mainstay_health::host::preflight::deep::{Probe, Probed};
use mainstay_model::time::Mono;
use mainstay_fuzz::{catalog, survives_json};

fuzz_target!(|bytes: &[u8]| {
    let _ = survives_json::<ProbeRequest>(bytes);
    let _ = (survives_json::<Probe>(bytes), survives_json::<Probed>(bytes));
    let _ = survives_json::<ProbeLine>(bytes);
    if let Some(answer) = survives_json::<ProbeAnswer>(bytes) {
        let mut judge = DeviceJudge::new(catalog(), DeviceLimits::default());
        for at in 1..3 {
            let _ = judge.report(Mono(at), DeviceReport::Answered(answer.clone()));
            let _ = judge.components(Mono(at));
        }
    }
});
