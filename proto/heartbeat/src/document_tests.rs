//! Compares `docs/reference/heartbeat-page.md` with the constants in the code.
#![cfg(not(loom))]

use crate::layout::*;

const DOCUMENT: &str = include_str!("../../../docs/reference/heartbeat-page.md");

/// The rows of the document's tables that describe a field: offset, bytes, name.
fn documented() -> Vec<(String, usize, usize)> {
    DOCUMENT
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let (offset, bytes) = (cells.get(1)?.parse().ok()?, cells.get(2)?.parse().ok()?);
            Some((cells.get(3)?.trim_matches('`').to_owned(), offset, bytes))
        })
        .collect()
}

#[test]
fn every_field_is_documented_with_its_offset() {
    let in_code: Vec<(String, usize, usize)> = [FIELDS, SLOT_FIELDS, RECORD_FIELDS, COLLECTIVE_FIELDS]
        .into_iter()
        .flatten()
        .map(|&(name, offset, bytes)| (name.to_owned(), offset, bytes))
        .collect();
    assert_eq!(documented(), in_code);
}

#[test]
fn versions_and_limits_are_documented() {
    for reported in [
        format!("layout {MAJOR}.{MINOR}"),
        format!("{PAGE_BYTES} bytes"),
        format!("{RING_RECORDS} records"),
        format!("{NAME_ENTRIES} names"),
        format!("{NAME_BYTES} bytes of a name"),
        format!("{COLLECTIVE_ENTRIES} communicators"),
        format!("{SECTION_DEPTH} open sections"),
    ] {
        assert!(one_line(DOCUMENT).contains(&reported), "the document does not say {reported:?}");
    }
}

#[test]
fn fields_are_aligned_in_order_and_apart() {
    for (fields, room) in [
        (FIELDS, PAGE_BYTES),
        (SLOT_FIELDS, SLOT_BYTES),
        (RECORD_FIELDS, RECORD_BYTES),
        (COLLECTIVE_FIELDS, COLLECTIVE_BYTES),
    ] {
        let mut free = 0;
        for &(name, offset, bytes) in fields {
            assert!(offset >= free, "{name} at {offset} overlaps what ends at {free}");
            assert!(offset % WORD == 0 && bytes % WORD == 0, "{name} is not made of whole words");
            free = offset + bytes;
        }
        assert!(free <= room);
    }
    let claimed = FIELDS.iter().find(|(name, ..)| *name == "rank").map(|&(_, offset, _)| offset);
    assert_eq!(claimed, Some(IDENTITY_BYTES), "the identity zone holds only what is frozen");
}

/// The text without its line breaks: sentences may wrap anywhere.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
