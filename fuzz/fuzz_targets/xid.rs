//! One message of the driver (an XID, an SXID or a report) and the PCI addresses in it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::parse::{host, nvidia};
use mainstay_model::pci::PciAddress;
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    if let Some(address) = PciAddress::parse(&text) {
        assert_eq!(PciAddress::parse(&address.to_string()), Some(address));
    }
    // A message is of one kind. The reader looks for an XID first.
    assert!(nvidia::xid(&text).is_none() || nvidia::sxid(&text).is_none());
    let _ = (nvidia::other(&text), nvidia::preface(&text), host::report(&text));
});
