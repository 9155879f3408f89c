//! NCCL's report of its communicators, as text and as JSON, and its counts and judgement.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_hang::nccl_ras::{RasReply, NcclJudge, NcclLimits, RasReport, Wire, parse_text};
use mainstay_model::time::{Mono, Span};
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let of_json = serde_json::from_slice::<Wire>(bytes).ok().map(RasReport::from);
    for report in of_json.into_iter().chain(parse_text(&text(bytes))) {
        let _ = report.counts();
        for communicator in &report.communicators {
            let _ = (communicator.behind(), communicator.mismatch());
        }
        let mut judge = NcclJudge::new(NcclLimits::default());
        let reported = RasReply::Reported(report);
        for seconds in [0, 700, 1400] {
            let _ = judge.step(Mono(1).after(Span::seconds(seconds)), &reported);
        }
    }
});
