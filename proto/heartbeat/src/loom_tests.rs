//! All orders in which the memory of a machine may show the writer's stores to a reader, tried by loom on the protocols of the page:
//! a sequence word over what it guards, two slots in turn, and the lock. With `RUSTFLAGS="--cfg loom"` alone
//! (`docs/internals/testing.md`).
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

use crate::layout::WORD;
use crate::words::{PageWords, Words};

const SEQUENCE: usize = 0;
const ONE: usize = WORD;
const OTHER: usize = 2 * WORD;
/// Behind the first slot.
const SECOND: usize = 3 * WORD;
const LOCK: usize = 6 * WORD;
const COUNTED: usize = 7 * WORD;

fn page() -> Arc<PageWords> {
    Arc::new(std::array::from_fn(|_| AtomicU64::new(0)))
}

/// As `beat::publish` writes a beat: number n into slot n mod 2.
fn publish(words: Words<'_>, number: u64) {
    let at = if number % 2 == 0 { 0 } else { SECOND };
    words.begin(at + SEQUENCE, 2 * number - 1);
    words.store(at + ONE, number);
    words.store(at + OTHER, 10 * number);
    words.store_release(at + SEQUENCE, 2 * number);
}

fn read(words: Words<'_>, at: usize, expected: u64) -> Option<(u64, u64)> {
    words.read_under(at + SEQUENCE, expected, || (words.load(at + ONE), words.load(at + OTHER)))
}

#[test]
fn what_is_read_under_a_sequence_word_is_of_one_piece() {
    loom::model(|| {
        let page = page();
        let shared = page.clone();
        let writer = thread::spawn(move || {
            // Twice into the same slot.
            publish(Words(&shared), 2);
            publish(Words(&shared), 4);
        });
        let words = Words(&page);
        for number in [2, 4] {
            if let Some(read) = read(words, 0, 2 * number) {
                assert_eq!(read, (number, 10 * number));
            }
        }
        writer.join().expect("the writer does not panic");
        assert_eq!(read(words, 0, 8), Some((4, 40)), "the last one is whole");
    });
}

#[test]
fn of_two_slots_one_is_whole_at_each_instant() {
    loom::model(|| {
        let page = page();
        publish(Words(&page), 1);
        let shared = page.clone();
        let writer = thread::spawn(move || publish(Words(&shared), 2));
        let words = Words(&page);
        let sequences = [0, SECOND].map(|at| words.load_acquire(at + SEQUENCE));
        // The writer is at slot 0 and leaves the other alone.
        assert_eq!(sequences[1], 2);
        assert_eq!(read(words, SECOND, 2), Some((1, 10)));
        if sequences[0] == 4 {
            assert_eq!(read(words, 0, 4), Some((2, 20)));
        }
        writer.join().expect("the writer does not panic");
    });
}

#[test]
fn of_two_threads_of_a_rank_one_writes_at_a_time() {
    loom::model(|| {
        let page = page();
        let threads = [7, 7].map(|key| {
            let shared = page.clone();
            thread::spawn(move || {
                let words = Words(&shared);
                if words.exchange(LOCK, 0, key).is_err() {
                    return 0;
                }
                let counted = words.load(COUNTED);
                words.store(COUNTED, counted + 1);
                words.store_release(LOCK, 0);
                1
            })
        });
        let written: u64 = threads.into_iter().map(|thread| thread.join().expect("it does not panic")).sum();
        assert_eq!(Words(&page).load(COUNTED), written, "no beat overwrites another's");
    });
}
