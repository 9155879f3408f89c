//! Several threads beat at once: nothing blocks, nothing is torn, and what is dropped is counted.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic here is the test's report"
)]

use crate::support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use mainstay_client::{Client, Measures};
use support::TestPage;

#[test]
fn every_beat_of_every_thread_is_made_or_counted_as_dropped() {
    const THREADS: u64 = 4;
    const BEATS: u64 = 20_000;
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| (0..BEATS).for_each(|_| client.beat()));
        }
    });
    let beat = page.page.beat().unwrap();
    assert_eq!(beat.count + page.page.counters().skipped, THREADS * BEATS);
    assert!(beat.count > BEATS, "{} of {} beats were made", beat.count, THREADS * BEATS);
}

#[test]
fn a_reader_never_sees_half_a_beat() {
    const STEPS: u64 = 200_000;
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for step in 0..STEPS {
                client.step_with(
                    step,
                    Measures {
                        loss: Some(step as f64),
                        grad_norm: Some(-(step as f64)),
                        digest: Some(!step),
                    },
                );
            }
            done.store(true, Ordering::Release);
        });
        let (mut cursor, mut seen, mut missed, mut last) = (0, 0, 0, 0);
        let mut records = Vec::new();
        loop {
            let finished = done.load(Ordering::Acquire);
            if let Some(beat) = page.page.beat() {
                let step = beat.step.unwrap();
                assert!(step >= last, "steps went back from {last} to {step}");
                last = step;
                assert_eq!((beat.loss, beat.digest), (Some(step as f64), Some(!step)));
                assert_eq!((beat.grad_norm, beat.count), (Some(-(step as f64)), step + 1));
                assert_eq!(beat.step_mono_ns, Some(beat.mono_ns));
            }
            records.clear();
            let drained = page.page.records_since(cursor, &mut records);
            for record in &records {
                assert_eq!((record.number, record.loss), (record.step + 1, Some(record.step as f64)));
                assert_eq!(record.digest, Some(!record.step));
                assert!(record.start_mono_ns <= record.end_mono_ns);
            }
            (cursor, seen, missed) =
                (drained.next_cursor, seen + records.len() as u64, missed + drained.missed);
            if finished {
                break;
            }
        }
        assert_eq!(seen + missed, STEPS);
        assert!(seen >= 512);
    });
}

#[test]
fn names_interned_by_many_threads_are_interned_once() {
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    let names: Vec<String> = (0..30).map(|index| format!("section {index}")).collect();
    let intern_all = || names.iter().map(|name| client.intern(name)).collect::<Vec<_>>();
    let ids: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(intern_all)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ids.iter().all(|of_thread| *of_thread == ids[0]));
    for (id, name) in ids[0].iter().zip(&names) {
        assert_eq!(page.page.section_name(*id).as_ref(), Some(name));
    }
}
