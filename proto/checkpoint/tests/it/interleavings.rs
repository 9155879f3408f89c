//! A rank and a keeper of one control page on two threads: a filled slot holds what the rank recorded for it, in
//! whatever order the machine's memory shows the rank's stores. Under Miri (`docs/internals/testing.md`) with few
//! steps.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test's report")]

use std::sync::atomic::AtomicU64;
use std::thread;

use mainstay_checkpoint_format::control::{Control, ControlWords, State};

const STEPS: u64 = if cfg!(miri) { 8 } else { 20_000 };
const SLOTS: usize = 2;

fn page(words: &ControlWords) -> Control<'_> {
    let page = Control::format(words, 3, 4, 0, 7);
    page.set_slots(SLOTS);
    (0..SLOTS).for_each(|slot| page.set_file(slot, slot as u64, 1 << 40));
    page
}

#[test]
fn a_filled_slot_holds_what_the_rank_recorded() {
    let words: Box<ControlWords> = Box::new([const { AtomicU64::new(0) }; _]);
    let pool_owner = page(&words);
    let rank = Control::new(&words).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            for step in 1..=STEPS {
                let taken = loop {
                    match rank.take(2 * step, step + 1, step, 4) {
                        Some(taken) => break taken,
                        None => thread::yield_now(),
                    }
                };
                rank.fill(&taken, 2 * step).expect("nobody takes it back");
            }
        });
        let mut newest = 0;
        while newest < STEPS {
            let filled: Vec<_> = pool_owner.all().filter(|slot| slot.state == State::Filled).collect();
            if filled.is_empty() {
                thread::yield_now();
            }
            for slot in filled {
                assert_eq!((slot.used, slot.epoch), (2 * slot.step, slot.step + 1), "{slot:?}");
                newest = newest.max(slot.step);
                let sealing = pool_owner.advance(&slot, State::Sealing).expect("the keeper's alone");
                let sealed = pool_owner.advance(&sealing, State::Sealed).expect("the keeper's alone");
                pool_owner.advance(&sealed, State::Free).expect("the keeper's alone");
            }
        }
    });
}
