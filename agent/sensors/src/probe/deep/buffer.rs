//! Patterns that are written and read back. Each word depends on its position, so that a misplaced word is detected.

/// The word of a pattern at a position (the mixing step of SplitMix64).
fn pattern_word(seed: u64, place: u64) -> u64 {
    let mut word = seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Fills whole words of `bytes`, which start at byte `from` of all that is written.
pub(super) fn fill(bytes: &mut [u8], seed: u64, from: u64) {
    for (chunk, place) in bytes.chunks_exact_mut(8).zip(from / 8..) {
        chunk.copy_from_slice(&pattern_word(seed, place).to_le_bytes());
    }
}

/// The first byte that differs from the pattern, counted from the start of all that was written.
pub(super) fn difference(bytes: &[u8], seed: u64, from: u64) -> Option<u64> {
    let wrong = |chunk: &[u8], place| chunk != pattern_word(seed, place).to_le_bytes();
    bytes
        .chunks_exact(8)
        .zip(from / 8..)
        .find(|(chunk, place)| wrong(chunk, *place))
        .map(|(_, place)| place * 8)
}

/// Page-aligned memory of `length` bytes, as O_DIRECT requires: the vector and the offset of the memory in it.
pub(super) fn page_aligned(length: usize) -> (Vec<u8>, usize) {
    const PAGE: usize = 4096;
    let bytes = vec![0; length + PAGE];
    let begin = bytes.as_ptr().align_offset(PAGE);
    (bytes, begin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_or_moved_shows() {
        let mut bytes = vec![0; 4096];
        fill(&mut bytes, 7, 8192);
        assert_eq!(difference(&bytes, 7, 8192), None);
        assert_eq!(difference(&bytes, 7, 0), Some(0), "another place");
        assert_eq!(difference(&bytes, 8, 8192), Some(8192), "another seed");
        bytes[100] ^= 1;
        assert_eq!(difference(&bytes, 7, 8192), Some(8192 + 96));
    }

    #[test]
    fn memory_for_direct_input_starts_on_a_page() {
        let (bytes, begin) = page_aligned(10_000);
        assert_eq!(bytes[begin..].as_ptr() as usize % 4096, 0);
        assert!(bytes.len() - begin >= 10_000);
    }
}
