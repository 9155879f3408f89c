//! Phases that take long, pauses, and descriptions of operations: a page of minor 1 can hold them, one of minor 0
//! cannot.
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

use crate::support;

use std::time::Duration;

use mainstay_client::{Client, Collective};
use support::TestPage;

#[test]
fn a_long_phase_a_pause_and_their_end_reach_the_page() {
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    let quiet = || page.page.beat().unwrap();

    client.expect_long(Duration::from_secs(60));
    let beat = quiet();
    assert_eq!(beat.quiet_until_ns - beat.mono_ns, 60_000_000_000);
    client.step(1);
    assert_eq!(quiet().quiet_until_ns, beat.quiet_until_ns, "it stands until it is set again");
    client.pause();
    assert_eq!(quiet().quiet_until_ns, u64::MAX);
    client.resume();
    assert_eq!(quiet().quiet_until_ns, 0);
    client.expect_long(Duration::MAX);
    assert_eq!(quiet().quiet_until_ns, u64::MAX);
}

#[test]
fn a_description_of_an_operation_is_stored_with_its_count() {
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    let counts = Collective { comm: 7, entered: 3, completed: 2, signature: 99 };
    client.collective_with(counts);
    assert_eq!(page.page.collectives(), [counts]);
    client.collective(7, 4, 3);
    assert_eq!(page.page.collectives()[0].signature, 0);
}

#[test]
fn a_page_of_minor_0_is_not_changed_in_words_it_does_not_know() {
    const MINOR_AT: usize = 16;
    let directory = support::scratch();
    let path = directory.path().join("old.page");
    let mut bytes = support::fresh();
    bytes[MINOR_AT..MINOR_AT + 8].fill(0);
    std::fs::write(&path, bytes).unwrap();
    let page = support::map(&path);
    let client = Client::open(&path).unwrap();

    client.step(5);
    client.pause();
    client.collective_with(Collective { comm: 7, entered: 3, completed: 2, signature: 99 });
    assert_eq!(page.beat().unwrap().quiet_until_ns, 0);
    assert_eq!(page.collectives()[0].signature, 0);
    assert_eq!(page.beat().unwrap().count, 1, "what the page cannot hold is no beat either");
}

#[test]
fn a_data_position_and_a_number_of_steps_are_no_beats_and_are_cleared_by_the_next_round() {
    let page = TestPage::new();
    let client = Client::open(&page.path).unwrap();
    client.step(1);
    client.data_at(12);
    assert_eq!((page.page.data(), page.page.beat().unwrap().count), (Some(12), 1));
    client.total_steps(500);
    assert_eq!((page.page.total_steps(), page.page.beat().unwrap().count), (Some(500), 1));
    client.begin_round();
    assert_eq!((page.page.data(), page.page.total_steps()), (None, None));
}
