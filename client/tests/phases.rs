//! Phases that take long, and pauses, as whoever reads the page sees them.
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

mod support;

use mainstay_client::Client;
use mainstay_heartbeat::{LONG_PREFIX, PAUSE_SECTION};
use support::TestPage;

fn open_sections(test: &TestPage) -> Vec<String> {
    let beat = test.page.beat().unwrap();
    beat.open_sections().iter().map(|open| test.page.section_name(open.id).unwrap()).collect()
}

#[test]
fn a_phase_known_to_take_long_is_open_until_its_guard_goes_and_survives_steps() {
    let test = TestPage::new();
    let client = Client::open(&test.path).unwrap();
    let compiling = client.expect_long("compile");
    client.step(1);
    assert_eq!(open_sections(&test), [format!("{LONG_PREFIX}compile")]);
    drop(compiling);
    assert_eq!(open_sections(&test), Vec::<String>::new());
}

#[test]
fn a_pause_is_one_however_often_it_is_called_for_and_ends_once() {
    let test = TestPage::new();
    let client = Client::open(&test.path).unwrap();
    client.resume();
    client.pause();
    client.pause();
    let within = client.section("forward");
    assert_eq!(open_sections(&test), [PAUSE_SECTION, "forward"]);
    client.resume();
    client.resume();
    assert_eq!(open_sections(&test), Vec::<String>::new());
    assert_eq!(test.page.counters().unmatched_leaves, 0);
    drop(within);
    assert_eq!(test.page.counters().unmatched_leaves, 1, "it ended with the pause");
}

#[test]
fn in_a_page_without_room_for_its_name_a_pause_is_not_mistaken_for_another_section() {
    let test = TestPage::new();
    let client = Client::open(&test.path).unwrap();
    (0..64).for_each(|n| drop(client.section(&format!("section {n}"))));
    let other = client.section("one too many");
    client.pause();
    client.resume();
    assert_eq!(open_sections(&test), ["other"]);
    drop(other);
}

#[test]
fn time_on_a_device_is_charged_to_the_step() {
    let test = TestPage::new();
    let client = Client::open(&test.path).unwrap();
    let device = client.intern("forward@device");
    client.spend(device, 700);
    client.spend(device, 77);
    client.step(1);
    let mut records = Vec::new();
    test.page.records_since(0, &mut records);
    let spent = records[0].sections()[0];
    assert_eq!((test.page.section_name(spent.id).unwrap().as_str(), spent.ns), ("forward@device", 777));
}
