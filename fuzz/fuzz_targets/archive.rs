//! A tar archive of a holder or a bucket: each file of it lies below its directory and within the archive, and what is written from
//! the same entries has the same bytes.
#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use mainstay_core::checkpoint::archive::{is_safe, read};

fuzz_target!(|bytes: &[u8]| {
    let mut at = |place: u64, buffer: &mut [u8]| {
        let from = usize::try_from(place).ok().and_then(|place| bytes.get(place..));
        let piece = from.and_then(|from| from.get(..buffer.len())).ok_or("it ends there")?;
        buffer.copy_from_slice(piece);
        Ok(())
    };
    let Ok(entries) = read(bytes.len() as u64, &mut at) else { return };
    let names: BTreeSet<&str> = entries.iter().map(|(entry, _)| entry.path.as_str()).collect();
    assert_eq!(names.len(), entries.len());
    for (entry, offset) in &entries {
        assert!(is_safe(&entry.path));
        assert!(offset.checked_add(entry.size).is_some_and(|end| end <= bytes.len() as u64));
    }
});
