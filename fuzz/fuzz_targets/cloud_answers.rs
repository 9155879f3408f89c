//! Answers of the metadata servers of clouds: each is parsed into notices or an error, and can be judged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::host::cloud::{CloudJudge, CloudLimits, CloudSample, Notice, amazon, azure, google};
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_fuzz::text;

type Read = fn(&str) -> Result<Vec<Notice>, String>;

const READERS: [Read; 7] = [
    google::maintenance_event,
    google::preempted,
    google::upcoming_maintenance,
    amazon::instance_action,
    amazon::rebalance,
    amazon::scheduled,
    |body| azure::events(body, "train_17"),
];

fuzz_target!(|bytes: &[u8]| {
    let body = text(bytes);
    for read in READERS {
        let notices = read(&body);
        // The error is for people: it does not repeat the whole answer.
        if let Err(why) = &notices {
            assert!(!why.is_empty() && why.len() < 1024, "{why}");
        }
        let mut judge = CloudJudge::new(CloudLimits::default());
        let sample = CloudSample { provider: "a cloud".to_owned(), notices };
        let judged = judge.step(Stamp { mono: Mono(1), wall: Wall(1_800_000_000_000_000_000) }, &sample);
        assert!(!judged.components[0].reason.is_empty());
    }
});
