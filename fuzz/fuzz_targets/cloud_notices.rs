//! Notices of a cloud with any times, judged repeatedly: no time is so extreme that judging fails.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::host::cloud::{CloudJudge, CloudLimits, CloudSample, Notice, NoticeKind};
use mainstay_model::time::{Mono, Stamp, Wall};
use mainstay_fuzz::text;

const KINDS: [NoticeKind; 5] = [
    NoticeKind::AtRisk,
    NoticeKind::Migration,
    NoticeKind::Maintenance,
    NoticeKind::Termination,
    NoticeKind::Preemption,
];

fuzz_target!(|bytes: &[u8]| {
    let Some((now, mut rest)) = bytes.split_first_chunk::<8>() else { return };
    let wall = Wall(i64::from_le_bytes(*now));
    let mut notices = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<18>() {
        let time = |at: usize| {
            let bytes = head[at..at + 8].try_into().expect("eight bytes");
            Some(Wall(i64::from_le_bytes(bytes))).filter(|time| time.0 != 0)
        };
        notices.push(Notice {
            id: text(&head[17..]).into_owned(),
            kind: KINDS[usize::from(head[16] >> 1) % KINDS.len()],
            starts: time(0),
            ends: time(8),
            ongoing: head[16] & 1 == 1,
            detail: text(after).into_owned(),
            source: String::new(),
        });
        rest = after;
        if notices.len() == 16 {
            break;
        }
    }
    let mut judge = CloudJudge::new(CloudLimits::default());
    let sample = CloudSample { provider: "a cloud".to_owned(), notices: Ok(notices) };
    let stamp = |mono| Stamp { mono: Mono(mono), wall };
    let first = judge.step(stamp(1), &sample);
    assert!(!first.components[0].reason.is_empty());
    // A notice is reported once, and its end is reported once.
    let again = judge.step(stamp(2), &sample);
    let over = judge.step(stamp(3), &CloudSample { notices: Ok(Vec::new()), ..sample });
    assert!(again.facts.len() <= first.facts.len() && over.facts.len() <= first.facts.len());
});
