//! The heartbeat page of a rank: with any bytes, no method of the reader panics or returns more than the page holds.
#![no_main]

use std::sync::atomic::AtomicU64;

use libfuzzer_sys::fuzz_target;
use mainstay_heartbeat::{PAGE_BYTES, Page, PageSpec, PageWords, SectionId, Writer, format};

/// The maximum number of records that one read returns.
const MOST: usize = 512;

fuzz_target!(|bytes: &[u8]| {
    // Parts of the input overwrite a valid page at offsets they name. Few fully random pages would pass the header
    // checks.
    let mut page = format(&PageSpec {
        job: "job",
        rank: 3,
        local_rank: 1,
        world_size: 8,
        attempt: 2,
        boot_id: *b"0123456789abcdef",
        creator_pid: 99,
        created_mono_ns: 5,
    });
    assert_eq!(page.len(), PAGE_BYTES);
    let mut rest = bytes;
    while let Some(([low, high, length], after)) = rest.split_first_chunk::<3>() {
        let at = (usize::from(u16::from_le_bytes([*low, *high])) * 8) % PAGE_BYTES;
        let length = usize::from(*length).min(after.len()).min(PAGE_BYTES - at);
        page[at..at + length].copy_from_slice(&after[..length]);
        rest = &after[length..];
    }
    let words: Box<[AtomicU64]> =
        page.as_chunks::<8>().0.iter().map(|bytes| AtomicU64::new(u64::from_ne_bytes(*bytes))).collect();
    let words: Box<PageWords> = words.try_into().expect("a page has as many words");
    let Ok(page) = Page::new(&words) else { return };
    let mut records = Vec::new();
    let _ = page.records_since(0, &mut records);
    assert!(records.len() <= MOST);
    for record in &records {
        let _ = record.sections();
    }
    let beat = page.beat();
    let _ = beat.as_ref().map(|beat| beat.open_sections().len());
    let _ = (
        page.identity(),
        page.claim(),
        page.refusal(),
        page.exit_note(),
        page.collectives(),
        page.counters(),
    );
    for number in 0..=u64::from(u8::MAX) {
        let _ = page.section_name(SectionId::new(number));
    }
    if let Ok(writer) = Writer::new(&words) {
        let _ = (writer.find_section("step"), writer.next_ring());
    }
});
