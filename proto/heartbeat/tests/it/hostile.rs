//! Pages whose bytes are anything at all: no panic, no endless loop, nothing out of proportion.
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

use crate::support;

use std::sync::atomic::Ordering;

use mainstay_heartbeat::layout::{
    COLLECTIVE_ENTRIES, EXCEPTION_BYTES, JOB_BYTES, MESSAGE_BYTES, NAME_BYTES, RECORD_SECTIONS, RING_RECORDS,
    SECTION_DEPTH, TRACEBACK_BYTES,
};
use mainstay_heartbeat::{
    Claim, Collective, ExitKind, LayoutError, MINOR, Measures, Note, Operation, OperationKind, PAGE_BYTES,
    Page, PageWords, SectionId, Writer, format,
};
use proptest::prelude::*;
use support::{fresh, process, spec, words};

/// A lossy reading makes at most three bytes of one.
const LOSSY: usize = 3;

fn read_everything(page: &Page<'_>, cursor: u64) {
    assert!(page.identity().job.len() <= LOSSY * JOB_BYTES);
    let _ = (page.claim(), page.refusal(), page.counters());
    if let Some(beat) = page.beat() {
        assert!(beat.open_sections().len() <= SECTION_DEPTH);
    }
    let mut records = Vec::new();
    let drained = page.records_since(cursor, &mut records);
    assert!(records.len() <= RING_RECORDS);
    assert!(records.iter().all(|record| record.sections().len() <= RECORD_SECTIONS));
    assert_eq!(page.records_since(drained.next_cursor, &mut records).next_cursor, drained.next_cursor);
    for id in 0..100 {
        assert!(page.section_name(SectionId::new(id)).is_none_or(|name| name.len() <= LOSSY * NAME_BYTES));
    }
    assert!(page.collectives().len() <= COLLECTIVE_ENTRIES);
    if let Some(note) = page.exit_note() {
        assert!(note.exception.len() <= LOSSY * EXCEPTION_BYTES);
        assert!(note.message.len() <= LOSSY * MESSAGE_BYTES);
        assert!(note.traceback.len() <= LOSSY * TRACEBACK_BYTES);
    }
}

/// A writer over garbage must also complete, and leave a beat that can be read.
fn write_everything(words: &PageWords) {
    let (writer, page) = (Writer::new(words).unwrap(), Page::new(words).unwrap());
    let who = process(1);
    assert!(writer.claim(10, &who));
    let write = || writer.try_write(who.key()).unwrap();
    let section = write().intern("forward");
    for step in 0..3 {
        write().enter(20, section);
        write().step(30, step, Measures { loss: Some(f64::NAN), ..Measures::default() });
        write().leave(40, section);
        write().collective(u64::MAX, 2, 1);
    }
    assert!(
        writer.exit_note(50, &Note { kind: ExitKind::Clean, exception: "", message: "m", traceback: "" })
    );
    let beat = page.beat().unwrap();
    assert_eq!((beat.count, beat.step, beat.depth), (9, Some(2), 0));
    assert_eq!(page.exit_note().unwrap().message, "m");
    write().close(60);
    assert!(matches!(page.claim(), Claim::Closed { mono_ns: 60, .. }));
}

#[test]
fn what_minor_version_1_added_is_not_touched_in_a_page_of_minor_version_0() {
    let operation = Operation { kind: OperationKind::Barrier, bytes: 7 };
    let reported = |minor: u64| {
        let words = fresh();
        words[2].store(minor.to_le(), Ordering::Relaxed);
        let writer = Writer::new(&words).unwrap();
        assert!(writer.claim(10, &process(1)));
        let counts = Collective { comm: 4, entered: 2, completed: 1, signature: operation.signature() };
        writer.try_write(process(1).key()).unwrap().collective_with(counts);
        let reported = Page::new(&words).unwrap().collectives()[0];
        Operation::of_signature(reported.signature)
    };
    assert_eq!((reported(0), reported(1)), (None, Some(operation)));
}

#[test]
fn operations_of_a_later_layout_are_other_ones() {
    let unknown = Operation::of_signature(5 << 8 | 200);
    assert_eq!(unknown, Some(Operation { kind: OperationKind::Other, bytes: 5 }));
}

/// A value that is likely to cause errors.
fn nasty() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0_u64..70),
        (0_u64..40).prop_map(|below| u64::MAX - below),
        (0_u32..64).prop_map(|bit| 1 << bit),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn random_bytes_under_a_good_header(seed in any::<u64>(), density in 1_u64..100, cursor in nasty()) {
        let page = fresh();
        let mut state = seed | 1;
        for word in page.iter().skip(4) {
            // xorshift64: a page of random numbers from one seed is quicker than one from a strategy.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if state % 100 < density {
                word.store(state.rotate_left(29), Ordering::Relaxed);
            }
        }
        read_everything(&Page::new(&page).unwrap(), cursor);
    }

    #[test]
    fn nasty_words_in_the_fields_that_steer(
        stored in prop::collection::vec(((4_usize..1024), nasty()), 1..60),
        head in nasty(),
        cursor in nasty(),
        note in prop::collection::vec(nasty(), 9),
    ) {
        let page = fresh();
        stored.iter().for_each(|&(index, value)| page[index].store(value.to_le(), Ordering::Relaxed));
        page[2560 / 8].store(head.to_le(), Ordering::Relaxed);
        note.iter().enumerate().for_each(|(at, value)| page[73728 / 8 + at].store(value.to_le(), Ordering::Relaxed));
        page[73728 / 8].store(2_u64.to_le(), Ordering::Relaxed);
        read_everything(&Page::new(&page).unwrap(), cursor);
    }

    #[test]
    fn a_claim_cures_whatever_an_earlier_writer_left(
        stored in prop::collection::vec(((32_usize..1024), nasty()), 1..200),
        head in nasty(),
    ) {
        let page = fresh();
        // The table of names is append-only and survives claims, so it is left as it is.
        for (index, value) in stored {
            if !(4096 / 8..8192 / 8).contains(&index) {
                page[index].store(value.to_le(), Ordering::Relaxed);
            }
        }
        page[2560 / 8].store(head.to_le(), Ordering::Relaxed);
        write_everything(&page);
    }

    #[test]
    fn random_bytes_without_a_header_are_no_page(seed in any::<u8>()) {
        let bytes: Vec<u8> = (0..PAGE_BYTES).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
        let refused = matches!(Page::new(&words(&bytes)), Err(LayoutError::Magic { .. }));
        prop_assert!(refused);
    }

    #[test]
    fn a_truncated_page_is_refused_and_one_with_a_lost_tail_is_read(kept in 0..PAGE_BYTES) {
        let whole = format(&spec());
        let mut aligned = vec![0_u64; kept / 8 + 1];
        aligned.iter_mut().zip(whole.as_chunks::<8>().0).for_each(|(to, from)| *to = u64::from_ne_bytes(*from));
        // SAFETY: `kept` bytes are there, aligned for u64, and outlive the call, which refuses them by their length.
        let refused = unsafe { Page::from_raw(aligned.as_ptr().cast(), kept) };
        prop_assert_eq!(refused.unwrap_err(), LayoutError::TooShort { length: kept, needed: PAGE_BYTES });

        let mut torn = whole[..kept].to_vec();
        torn.resize(PAGE_BYTES, 0);
        if let Ok(page) = Page::new(&words(&torn)) {
            read_everything(&page, 0);
        }
    }
}

#[test]
fn headers_that_do_not_fit_are_named() {
    let with = |at: usize, value: u64| {
        let page = fresh();
        page[at].store(value.to_le(), Ordering::Relaxed);
        Page::new(&page).map(|_| ()).unwrap_err()
    };
    assert!(matches!(with(0, 0), LayoutError::Magic { found: 0 }));
    assert_eq!(with(1, 2), LayoutError::Major { major: 2, minor: MINOR.into() });
    assert_eq!(with(3, 4096), LayoutError::PageBytes { found: 4096 });
    let aligned = fresh();
    // SAFETY: the bytes are there; the call refuses them by their address.
    let refused = unsafe { Page::from_raw(aligned.as_ptr().cast::<u8>().wrapping_add(1), PAGE_BYTES) };
    assert_eq!(refused.unwrap_err(), LayoutError::Misaligned);
}
