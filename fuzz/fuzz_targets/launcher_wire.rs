//! Messages between launcher and agent: a message that is read survives a round trip, the others are refused one by
//! one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_fuzz::text;
use mainstay_model::id::Incident;
use mainstay_model::time::Stamp;
use mainstay_proto::v1;
use mainstay_view::convert::{evidence, failure};
use mainstay_view::replay::replay;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let entries: Vec<_> = text(bytes).lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let _ = replay(&entries);
    if let Some(verdict) = v1::Verdict::decode(bytes).ok().and_then(|sent| failure::verdict_in(sent).ok()) {
        let again = failure::verdict_in(failure::verdict(&verdict, Stamp::default())).expect("it was read");
        // NaN is not equal to itself.
        assert_eq!(format!("{again:?}"), format!("{verdict:?}"));
    }
    if let Ok(sent) = v1::HostEvidence::decode(bytes) {
        let (Incident(incident), read) = evidence::host_evidence_in(sent);
        let again = evidence::host_evidence(Incident(incident), &read, Stamp::default());
        assert_eq!(format!("{:?}", evidence::host_evidence_in(again)), format!("{:?}", (Incident(incident), read)));
    }
    if let Ok(sent) = v1::RankContext::decode(bytes) {
        let known = evidence::rank_context_in(sent);
        assert_eq!(evidence::rank_context_in(evidence::rank_context(&known)), known);
    }
});
