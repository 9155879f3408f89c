//! Stacks from faulthandler and py-spy: the innermost frame is not longer than the text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_hang::{innermost_of_faulthandler, innermost_of_py_spy};
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    for place in [innermost_of_faulthandler(&text), innermost_of_py_spy(&text)].into_iter().flatten() {
        assert!(place.len() <= text.len() + 16, "{place:?}");
    }
});
