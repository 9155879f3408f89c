//! A site's overrides of the hardware catalog: refused, or in force.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::hardware::catalog::OverrideFile;
use mainstay_fuzz::{catalog, text};

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = toml::from_str::<OverrideFile>(&text(bytes)) else { return };
    let codes: Vec<u32> = file.xid.iter().flat_map(|meaning| meaning.ids.clone()).collect();
    if let Ok(catalog) = catalog().overridden("site.toml", file) {
        for code in codes {
            let meaning = catalog.xid(code).expect("what was added is there");
            assert_eq!(meaning.origin.as_deref(), Some("site.toml"));
        }
    }
});
