//! Ranks and keepers on one page.

use super::*;

fn blank() -> Box<ControlWords> {
    Box::new([const { AtomicU64::new(0) }; WORDS])
}

fn page(words: &ControlWords) -> Control<'_> {
    let page = Control::format(words, 3, 4, 0, 7);
    page.set_slots(2);
    page.set_file(0, 0, 4096);
    page.set_file(1, 1, 4096);
    page
}

#[test]
fn a_shard_goes_through_its_states_and_late_comers_change_nothing() {
    let words = blank();
    let page = page(&words);
    let taken = page.take(99, 0, 10, 4).expect("a free slot");
    assert_eq!((taken.state, taken.step), (State::Filling, 10));
    let filled = page.fill(&taken, 99).expect("in time");
    assert_eq!(page.slot(filled.index), filled);
    assert!(page.fill(&taken, 50).is_none(), "a second time");
    assert_eq!(page.slot(filled.index).used, 99);
    let sealed = page.advance(&filled, State::Sealing).and_then(|slot| page.advance(&slot, State::Sealed));
    let sealed = sealed.expect("sealed");
    assert!(page.advance(&filled, State::Free).is_none(), "as it was seen before");
    let other = page.take(99, 0, 11, 4).expect("the other slot");
    assert_ne!(other.index, sealed.index);
    assert!(page.take(99, 0, 12, 4).is_none(), "none is free");
    let free = page.advance(&sealed, State::Free).expect("given up");
    assert!(page.take(4097, 0, 12, 4).is_none(), "it is too small");
    assert_eq!(page.take(4096, 0, 12, 4).expect("it fits").index, free.index);
}

#[test]
fn a_slot_that_was_taken_back_cannot_be_filled() {
    let words = blank();
    let page = page(&words);
    let taken = page.take(99, 0, 10, 4).expect("a slot");
    let back = page.advance(&taken, State::Free).expect("taken back");
    page.set_file(back.index, 9, 4096);
    assert!(page.fill(&taken, 1).is_none());
    assert_eq!(page.slot(back.index).state, State::Free);
}

#[test]
fn what_readers_found_counts_for_one_life_and_one_attempt() {
    let words = blank();
    let page = page(&words);
    let taken = page.take(99, 0, 10, 4).expect("a slot");
    assert_eq!(page.checked(&taken, 5), Checked::No);
    assert!(page.begin_check(&taken, 5) && !page.begin_check(&taken, 5) && page.begin_check(&taken, 6));
    page.report_checked(&taken, 5, true);
    assert_eq!(page.checked(&taken, 5), Checked::Good);
    assert_eq!(page.checked(&taken, 6), Checked::No);
    page.report_checked(&taken, 5, false);
    page.report_checked(&taken, 5, true);
    assert_eq!(page.checked(&taken, 5), Checked::Bad, "bad stays bad");
    let filled = page.fill(&taken, 1).expect("filled");
    assert_eq!(page.checked(&filled, 5), Checked::No);
}

#[test]
fn a_slot_is_left_alone_for_as_long_as_was_asked_and_in_this_life_only() {
    let words = blank();
    let page = page(&words);
    let slot = page.take(99, 0, 10, 4).expect("a slot");
    assert!(!page.is_pinned(&slot, 5));
    let (at, word) = Control::pin(&slot, 1000);
    words[at as usize / 8].store(u64::from_ne_bytes(word), Ordering::SeqCst);
    assert!(page.is_pinned(&slot, 999) && !page.is_pinned(&slot, 1000));
    let next = page.advance(&slot, State::Free).expect("given up");
    assert!(!page.is_pinned(&next, 999), "it has another generation");
    let (_, word) = Control::pin(&next, 1 << 40);
    words[at as usize / 8].store(u64::from_ne_bytes(word), Ordering::SeqCst);
    assert!(!page.is_pinned(&next, 999), "nobody may ask for so long");
}

#[test]
fn a_page_of_another_kind_is_not_used() {
    let words = blank();
    assert_eq!(Control::new(&words).err(), Some(ControlError::Magic));
    let page = Control::format(&words, 0, 1, 0, 1);
    page.put(AT_VERSION, 9);
    assert_eq!(Control::new(&words).err(), Some(ControlError::Version(9)));
}

#[test]
fn a_reservation_is_answered_by_its_number() {
    let words = blank();
    let page = page(&words);
    assert_eq!(page.asked(), None);
    let number = page.ask(100);
    assert_eq!((page.asked(), page.answer(number)), (Some((number, 100)), Answer::None));
    page.give(number, Answer::NoRoom);
    assert_eq!((page.asked(), page.answer(number)), (None, Answer::NoRoom));
}
