//! Verifies the checksums of all entries of zip archives that `torch.save` writes.
//!
//! PyTorch does not verify these checksums when it loads a file. A file may contain several archives one after the
//! other, like the `.distcp` files of distributed checkpoints.

use std::fmt::Write as _;

/// Fills a buffer with the bytes from an offset on.
pub type Reading<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), String> + 'a;

/// Number of bytes at the end that contain the end record: a comment of up to 64 KiB may follow it.
const MAX_END_BYTES: u64 = 66_000;

/// Maximum length of a directory, bytes.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;

/// Number of bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

const END_BYTES: usize = 22;
const LOCATOR_BYTES: u64 = 20;
const END_64_BYTES: u64 = 56;

/// Verifies the checksums of all archives in a file of `size` bytes.
///
/// # Errors
/// The problem with the first damaged archive, counted from the end.
pub fn verify(size: u64, read: &mut Reading<'_>) -> Result<(), String> {
    let mut end = size;
    while end > 0 {
        end = verify_last(end, read)?;
    }
    Ok(())
}

/// One entry of a directory.
struct Entry {
    name: String,
    is_stored: bool,
    sum: u32,
    packed: u64,
    header: u64,
}

/// Verifies the archive that ends at `end` and returns its start.
fn verify_last(end: u64, read: &mut Reading<'_>) -> Result<u64, String> {
    let (directory, length, offset) = find_directory(end, read)?;
    let begin = directory.checked_sub(offset).ok_or("its directory is not where it says")?;
    let mut bytes = vec![0; usize::try_from(length).map_err(|_| "its directory is too long")?];
    read(directory, &mut bytes)?;
    for entry in entries(&bytes)? {
        verify_entry(begin, directory, &entry, read)?;
    }
    Ok(begin)
}

/// The position of the directory, its length, and its recorded offset.
fn find_directory(end: u64, read: &mut Reading<'_>) -> Result<(u64, u64, u64), String> {
    let tail_length = end.min(MAX_END_BYTES);
    let mut tail = vec![0; usize::try_from(tail_length).unwrap_or(0)];
    read(end - tail_length, &mut tail)?;
    let is_end = |at: &usize| {
        let record = &tail[*at..];
        record.starts_with(b"PK\x05\x06") && usize::from(u16_at(record, 20)) == record.len() - END_BYTES
    };
    let last = tail.len().checked_sub(END_BYTES).ok_or("it is cut off")?;
    let at = (0..=last).rev().find(is_end).ok_or("it is cut off: the record at its end is missing")?;
    let record = &tail[at..];
    let (mut length, mut offset) = (u64::from(u32_at(record, 12)), u64::from(u32_at(record, 16)));
    let mut below = end - tail_length + at as u64;
    if let Some(locator) = below.checked_sub(LOCATOR_BYTES) {
        let mut bytes = [0; LOCATOR_BYTES as usize];
        read(locator, &mut bytes)?;
        if bytes.starts_with(b"PK\x06\x07") {
            let large = locator.checked_sub(END_64_BYTES).ok_or("it is cut off")?;
            let mut bytes = [0; END_64_BYTES as usize];
            read(large, &mut bytes)?;
            if !bytes.starts_with(b"PK\x06\x06") {
                return Err("the record at its end is damaged".to_owned());
            }
            (length, offset, below) = (u64_at(&bytes, 40), u64_at(&bytes, 48), large);
        }
    }
    if length > MAX_DIRECTORY_BYTES {
        return Err("its directory is too long".to_owned());
    }
    let directory = below.checked_sub(length).ok_or("its directory is not where it says")?;
    Ok((directory, length, offset))
}

fn entries(mut bytes: &[u8]) -> Result<Vec<Entry>, String> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        const CENTRAL_HEADER_BYTES: usize = 46;
        if bytes.len() < CENTRAL_HEADER_BYTES || !bytes.starts_with(b"PK\x01\x02") {
            return Err("its directory is damaged".to_owned());
        }
        let length = |from: usize| usize::from(u16_at(bytes, from));
        let (name, extra, comment) = (length(28), length(30), length(32));
        let all = CENTRAL_HEADER_BYTES + name + extra + comment;
        if bytes.len() < all {
            return Err("its directory is damaged".to_owned());
        }
        let mut entry = Entry {
            name: shown(&bytes[CENTRAL_HEADER_BYTES..CENTRAL_HEADER_BYTES + name]),
            is_stored: u16_at(bytes, 10) == 0,
            sum: u32_at(bytes, 16),
            packed: u64::from(u32_at(bytes, 20)),
            header: u64::from(u32_at(bytes, 42)),
        };
        let is_large = |at: usize| u32_at(bytes, at) == u32::MAX;
        let wanted = (is_large(24), is_large(20), is_large(42));
        large_fields(
            &bytes[CENTRAL_HEADER_BYTES + name..CENTRAL_HEADER_BYTES + name + extra],
            wanted,
            &mut entry,
        );
        found.push(entry);
        bytes = &bytes[all..];
    }
    Ok(found)
}

/// Reads the zip64 fields of an entry: size, packed size, header offset. Only the `wanted` ones exist, in this order.
fn large_fields(mut extra: &[u8], wanted: (bool, bool, bool), entry: &mut Entry) {
    while extra.len() >= 4 {
        let (kind, length) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let Some(field) = extra.get(4..4 + length) else { return };
        if kind == 1 {
            let mut at = 0;
            let mut next = |is_wanted: bool| {
                let value = (is_wanted && field.len() >= at + 8).then(|| u64_at(field, at));
                at += if is_wanted { 8 } else { 0 };
                value
            };
            let _size = next(wanted.0);
            entry.packed = next(wanted.1).unwrap_or(entry.packed);
            entry.header = next(wanted.2).unwrap_or(entry.header);
        }
        extra = &extra[4 + length..];
    }
}

fn verify_entry(begin: u64, directory: u64, entry: &Entry, read: &mut Reading<'_>) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{} in it {what}", entry.name));
    let header = begin.saturating_add(entry.header);
    let mut head = [0; 30];
    if header.checked_add(30).is_none_or(|end| end > directory) {
        return wrong("is not where it says");
    }
    read(header, &mut head)?;
    if !head.starts_with(b"PK\x03\x04") {
        return wrong("has a damaged header");
    }
    let mut at = header + 30 + u64::from(u16_at(&head, 26)) + u64::from(u16_at(&head, 28));
    let mut left = entry.packed;
    if at.checked_add(left).is_none_or(|end| end > directory) {
        return wrong("is cut off");
    }
    // The checksum of a compressed entry covers the uncompressed bytes; torch and Lightning do not compress.
    if !entry.is_stored {
        return Ok(());
    }
    let mut sum = crc32fast::Hasher::new();
    let mut buffer = vec![0; READ_BYTES.min(usize::try_from(left).unwrap_or(READ_BYTES))];
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(READ_BYTES).min(READ_BYTES);
        read(at, &mut buffer[..piece])?;
        sum.update(&buffer[..piece]);
        (at, left) = (at + piece as u64, left - piece as u64);
    }
    if sum.finalize() == entry.sum { Ok(()) } else { wrong("is not what its checksum says") }
}

/// A name from an untrusted file, shortened and without control characters.
fn shown(name: &[u8]) -> String {
    let mut text = String::new();
    for letter in String::from_utf8_lossy(name).chars().take(80) {
        let _ = if letter.is_control() { write!(text, "?") } else { write!(text, "{letter}") };
    }
    text
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An archive of uncompressed entries.
    fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut bytes, mut directory) = (Vec::new(), Vec::new());
        for (name, content) in entries {
            let (length, offset) = (content.len() as u32, bytes.len() as u32);
            let mut common = vec![0; 10];
            common.extend(crc32fast::hash(content).to_le_bytes());
            common.extend(length.to_le_bytes());
            common.extend(length.to_le_bytes());
            common.extend((name.len() as u16).to_le_bytes());
            common.extend([0, 0]);
            bytes.extend(b"PK\x03\x04");
            bytes.extend(&common);
            bytes.extend(name.as_bytes());
            bytes.extend(*content);
            directory.extend(b"PK\x01\x02\0\0");
            directory.extend(&common);
            directory.extend([0; 10]);
            directory.extend(offset.to_le_bytes());
            directory.extend(name.as_bytes());
        }
        let (offset, length) = (bytes.len() as u32, directory.len() as u32);
        bytes.extend(directory);
        bytes.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
        bytes.extend(length.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.extend([0, 0]);
        bytes
    }

    fn verified(bytes: &[u8]) -> Result<(), String> {
        let mut read = |at: u64, buffer: &mut [u8]| {
            let at = usize::try_from(at).unwrap();
            let found = bytes.get(at..at + buffer.len()).ok_or("short")?;
            buffer.copy_from_slice(found);
            Ok(())
        };
        verify(bytes.len() as u64, &mut read)
    }

    #[test]
    fn a_changed_or_missing_byte_is_detected_in_a_file_of_several_archives() {
        let content: Vec<u8> = (0..200).collect();
        let one = archive(&[("data.pkl", &content), ("data/0", b"weights")]);
        let both = [one.clone(), archive(&[("data/1", &content)])].concat();
        assert_eq!((verified(&one), verified(&both)), (Ok(()), Ok(())));
        let first = 30 + "data.pkl".len();
        for at in first..first + content.len() {
            let mut damaged = both.clone();
            damaged[at] ^= 4;
            assert!(verified(&damaged).unwrap_err().contains("data.pkl"), "byte {at}");
        }
        for length in 1..both.len() {
            // If the whole second archive is missing, the first one is intact.
            assert_eq!(verified(&both[..length]).is_ok(), length == one.len(), "{length} bytes");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_verification_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), at in 0_usize..400, by: u8) {
            let mut whole = archive(&[("a", &bytes)]);
            let length = whole.len();
            whole[at % length] ^= by;
            let _ = (verified(&whole), verified(&bytes));
        }
    }
}
