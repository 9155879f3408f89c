//! A writer and a reader of one page on two threads: what is read is of one piece, in whatever order the memory of the
//! machine shows the writer's stores. Under Miri, which tries orders that no machine at hand shows
//! (`docs/internals/testing.md`), with few steps.
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use mainstay_heartbeat::{Measures, Page, Writer};

use crate::support::{fresh, process};

const STEPS: u64 = if cfg!(miri) { 6 } else { 20_000 };

#[test]
fn a_reader_sees_whole_beats_and_whole_records() {
    let words = fresh();
    let (writer, page) = (Writer::new(&words).unwrap(), Page::new(&words).unwrap());
    assert!(writer.claim(1, &process(7)));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for step in 0..STEPS {
                let measures = Measures {
                    loss: Some(step as f64),
                    grad_norm: Some(-(step as f64)),
                    digest: Some(!step),
                };
                let key = 7;
                if let Some(mut writing) = writer.try_write(key) {
                    writing.step(step + 1, step, measures);
                }
            }
            over.store(true, Ordering::Release);
        });
        let (mut cursor, mut newest, mut records) = (0, 0, Vec::new());
        loop {
            let is_over = over.load(Ordering::Acquire);
            if let Some(beat) = page.beat()
                && let Some(step) = beat.step
            {
                assert!(step >= newest, "steps went back from {newest} to {step}");
                newest = step;
                assert_eq!((beat.loss, beat.digest), (Some(step as f64), Some(!step)));
                assert_eq!((beat.grad_norm, beat.mono_ns), (Some(-(step as f64)), step + 1));
            }
            records.clear();
            cursor = page.records_since(cursor, &mut records).next_cursor;
            for record in &records {
                assert_eq!((record.loss, record.digest), (Some(record.step as f64), Some(!record.step)));
            }
            if is_over {
                break;
            }
        }
        assert_eq!(newest, STEPS - 1, "the last beat is seen");
    });
}
