//! Values of a configuration survive a round trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_model::units::{Bytes, Percent, Period};
use mainstay_fuzz::{survives_json, text};

fuzz_target!(|bytes: &[u8]| {
    let text = text(bytes);
    if let Ok(period) = Period::parse(&text) {
        assert_eq!(Period::parse(&period.to_string()), Ok(period));
    }
    if let Ok(bytes) = Bytes::parse(&text) {
        assert_eq!(Bytes::parse(&bytes.to_string()), Ok(bytes));
        assert!(!bytes.rounded().is_empty());
    }
    assert!(survives_json::<Percent>(bytes).is_none_or(|percent| (0.0..=100.0).contains(&percent.0)));
});
