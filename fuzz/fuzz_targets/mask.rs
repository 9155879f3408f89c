//! Secrets in texts: masking a masked text changes nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_model::redact::mask;
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let once = mask(&text(bytes));
    assert_eq!(mask(&once), once);
});
