//! Time spent on a device, as a reader of the page sees it.
#![allow(clippy::unwrap_used, reason = "a panic here is the test's report")]

use crate::support;

use mainstay_client::Client;
use support::TestPage;

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
