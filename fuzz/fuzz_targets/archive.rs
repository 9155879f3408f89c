//! A tar archive from a holder or a bucket: names are unique, each file is below the archive's directory, and its
//! bytes are within the archive.
#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use mainstay_checkpoint::archive::{is_safe, read};

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
