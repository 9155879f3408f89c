//! Files as one sequence of bytes: a plain tar archive, so that replicas on holders and in buckets are readable without
//! Mainstay.
//!
//! The archive is never written on the host that has the files: [`layout`] maps offsets to bytes, and file contents are
//! read from the files themselves. Owner and times are left out, so that the same content has the same bytes on every
//! host. Long names and sizes from 8 GiB on are written as GNU tar does.

use std::collections::BTreeSet;

/// Size of a block, bytes.
pub const BLOCK_BYTES: u64 = 512;

/// Maximum length of a name, bytes.
const MAX_NAME_BYTES: u64 = 4096;

/// Maximum number of files in an archive.
const MAX_ENTRIES: usize = 1 << 20;

/// The name of an entry that contains the long name of the next entry.
const LONG_LINK: &str = "././@LongLink";

/// One file of an archive.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its path relative to the archived directory, with `/` between the parts.
    pub path: String,
    /// Size, bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
}

/// The content at one offset of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These bytes: headers and padding.
    Bytes(Vec<u8>),
    /// A whole file, by its index among the entries.
    Content(usize),
}

/// The layout of an archive, without the contents of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Each piece with its offset, in order and without gaps.
    pub pieces: Vec<(u64, Piece)>,
    /// Total size, bytes.
    pub size: u64,
}

/// Why bytes are not an archive, or files cannot be archived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArchiveError {
    /// The name leads out of the directory, or is invalid.
    #[error("{0:?} is not a file name below a directory")]
    Name(String),
    /// Two entries have the same name.
    #[error("the archive has {0:?} twice")]
    Twice(String),
    /// A block is not a valid header of a regular file.
    #[error("the block at byte {0} is not a header of a plain file")]
    Header(u64),
    /// The archive is truncated.
    #[error("it ends in the middle")]
    Short,
    /// More files than any checkpoint has.
    #[error("it has more than {MAX_ENTRIES} files")]
    Many,
    /// The bytes of the archive cannot be read.
    #[error("{0}")]
    Read(String),
}

/// Whether a name stays within the directory that it is joined to.
pub fn is_safe(path: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
    path.len() as u64 <= MAX_NAME_BYTES && path.split('/').all(plain)
}

/// Lays out the files in the given order.
///
/// # Errors
/// A name is invalid or occurs twice, or there are too many files.
pub fn layout(entries: &[Entry]) -> Result<Layout, ArchiveError> {
    check(entries)?;
    let mut pieces = Vec::new();
    let mut at = 0_u64;
    let mut waiting: Vec<u8> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let name = entry.path.as_bytes();
        if name.len() > 100 {
            waiting.extend(header(LONG_LINK.as_bytes(), name.len() as u64 + 1, 0o644, b'L'));
            waiting.extend(name);
            waiting.push(0);
            fill(&mut waiting, name.len() as u64 + 1);
        }
        waiting.extend(header(&name[..name.len().min(100)], entry.size, entry.mode, b'0'));
        if entry.size > 0 {
            let length = waiting.len() as u64;
            pieces.push((at, Piece::Bytes(std::mem::take(&mut waiting))));
            pieces.push((at + length, Piece::Content(index)));
            at = at.saturating_add(length).saturating_add(entry.size);
            fill(&mut waiting, entry.size);
        }
    }
    waiting.extend([0; 2 * BLOCK_BYTES as usize]);
    let length = waiting.len() as u64;
    pieces.push((at, Piece::Bytes(waiting)));
    Ok(Layout { pieces, size: at.saturating_add(length) })
}

fn check(entries: &[Entry]) -> Result<(), ArchiveError> {
    if entries.len() > MAX_ENTRIES {
        return Err(ArchiveError::Many);
    }
    let mut names = BTreeSet::new();
    for entry in entries {
        if !is_safe(&entry.path) {
            return Err(ArchiveError::Name(entry.path.clone()));
        }
        if !names.insert(&entry.path) {
            return Err(ArchiveError::Twice(entry.path.clone()));
        }
    }
    Ok(())
}

/// Pads content of `size` bytes to a full block.
fn fill(bytes: &mut Vec<u8>, size: u64) {
    let missing = (BLOCK_BYTES - size % BLOCK_BYTES) % BLOCK_BYTES;
    bytes.extend(std::iter::repeat_n(0, missing as usize));
}

fn header(name: &[u8], size: u64, mode: u32, kind: u8) -> [u8; BLOCK_BYTES as usize] {
    let mut block = [0_u8; BLOCK_BYTES as usize];
    block[..name.len()].copy_from_slice(name);
    block[100..108].copy_from_slice(format!("{:07o}\0", mode & 0o7777).as_bytes());
    block[108..116].copy_from_slice(b"0000000\0");
    block[116..124].copy_from_slice(b"0000000\0");
    if size < 1 << 33 {
        block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    } else {
        block[124] = 0x80;
        block[128..136].copy_from_slice(&size.to_be_bytes());
    }
    block[136..148].copy_from_slice(b"00000000000\0");
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar  \0");
    let sum = sum(&block);
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// The checksum of a header. The checksum field counts as spaces.
fn sum(block: &[u8; BLOCK_BYTES as usize]) -> u32 {
    let summand = |(at, byte): (usize, &u8)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) };
    block.iter().enumerate().map(summand).sum()
}

/// Fills a buffer with the bytes of an archive from an offset.
pub type Reading<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), String> + 'a;

/// Lists the files in an archive of `size` bytes, each with the offset of its content. `read` reads at an offset.
///
/// # Errors
/// [`ArchiveError`]; do not use anything from an archive with an error.
pub fn read(size: u64, read: &mut Reading<'_>) -> Result<Vec<(Entry, u64)>, ArchiveError> {
    let mut found: Vec<(Entry, u64)> = Vec::new();
    let mut at = 0_u64;
    let mut long: Option<String> = None;
    loop {
        let mut block = [0; BLOCK_BYTES as usize];
        if at.checked_add(BLOCK_BYTES).is_none_or(|end| end > size) {
            return Err(ArchiveError::Short);
        }
        read(at, &mut block).map_err(ArchiveError::Read)?;
        if block.iter().all(|byte| *byte == 0) {
            break;
        }
        let (name, length, mode, kind) = head(&block).ok_or(ArchiveError::Header(at))?;
        let content = at + BLOCK_BYTES;
        let end = content.checked_add(length).filter(|end| *end <= size).ok_or(ArchiveError::Short)?;
        match kind {
            b'L' if length <= MAX_NAME_BYTES + 1 && long.is_none() => {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
                read(content, &mut bytes).map_err(ArchiveError::Read)?;
                long = Some(text(&bytes).ok_or(ArchiveError::Header(at))?);
            }
            b'0' | 0 => {
                let path = long.take().unwrap_or(name);
                found.push((Entry { path, size: length, mode }, content));
                if found.len() > MAX_ENTRIES {
                    return Err(ArchiveError::Many);
                }
            }
            _ => return Err(ArchiveError::Header(at)),
        }
        at = end.checked_next_multiple_of(BLOCK_BYTES).ok_or(ArchiveError::Short)?;
    }
    check(&found.iter().map(|(entry, _)| entry.clone()).collect::<Vec<_>>())?;
    Ok(found)
}

fn head(block: &[u8; BLOCK_BYTES as usize]) -> Option<(String, u64, u32, u8)> {
    let stored = octal(&block[148..156])?;
    (u64::from(sum(block)) == stored).then_some(())?;
    let size = if block[124] == 0x80 {
        u64::from_be_bytes(block[128..136].try_into().ok()?)
    } else {
        octal(&block[124..136])?
    };
    let mode = u32::try_from(octal(&block[100..108])?).ok()? & 0o777;
    Some((text(&block[..100])?, size, mode, block[156]))
}

fn octal(field: &[u8]) -> Option<u64> {
    let digits = text(field)?;
    let digits = digits.trim();
    if digits.is_empty() { Some(0) } else { u64::from_str_radix(digits, 8).ok() }
}

/// The text before the first zero byte.
fn text(field: &[u8]) -> Option<String> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    String::from_utf8(field[..end].to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(path: &str, size: u64) -> Entry {
        Entry { path: path.to_owned(), size, mode: 0o644 }
    }

    /// The archive as bytes; each file is filled with its index plus one.
    fn written(entries: &[Entry]) -> Vec<u8> {
        let laid = layout(entries).unwrap();
        let mut bytes = Vec::new();
        for (at, piece) in &laid.pieces {
            assert_eq!(*at, bytes.len() as u64, "a gap between pieces");
            match piece {
                Piece::Bytes(some) => bytes.extend(some),
                Piece::Content(index) => {
                    let size = entries[*index].size as usize;
                    bytes.extend(std::iter::repeat_n(*index as u8 + 1, size));
                }
            }
        }
        assert_eq!(laid.size, bytes.len() as u64);
        bytes
    }

    fn again(bytes: &[u8]) -> Result<Vec<(Entry, u64)>, ArchiveError> {
        read(bytes.len() as u64, &mut |at, buffer| {
            let from = usize::try_from(at).map_err(|error| error.to_string())?;
            let some = bytes.get(from..from + buffer.len()).ok_or("beyond the end")?;
            buffer.copy_from_slice(some);
            Ok(())
        })
    }

    #[test]
    fn files_that_are_laid_out_are_read_back() {
        let long = format!("{}/model.pt", "deep".repeat(60));
        let entries = [entry("a/b.pt", 1000), entry("empty", 0), entry(&long, 512), entry("z", 1)];
        let bytes = written(&entries);
        let found = again(&bytes).unwrap();
        assert_eq!(found.iter().map(|(entry, _)| entry.clone()).collect::<Vec<_>>(), entries);
        for (index, (entry, at)) in found.iter().enumerate() {
            let content = &bytes[*at as usize..(*at + entry.size) as usize];
            assert!(content.iter().all(|byte| *byte == index as u8 + 1));
        }
        assert_eq!(bytes.len() as u64 % BLOCK_BYTES, 0);
    }

    #[test]
    fn a_size_that_needs_more_than_eleven_octal_digits_is_preserved() {
        let block = header(b"huge", 1 << 40, 0o600, b'0');
        assert_eq!(head(&block), Some(("huge".to_owned(), 1 << 40, 0o600, b'0')));
    }

    #[test]
    fn names_outside_the_directory_duplicate_names_and_links_are_rejected() {
        for name in ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/./b", "nul\0"] {
            assert!(!is_safe(name), "{name:?}");
            assert!(layout(&[entry(name, 1)]).is_err(), "{name:?}");
        }
        assert_eq!(layout(&[entry("a", 1), entry("a", 2)]), Err(ArchiveError::Twice("a".to_owned())));
        let link = [header(b"a", 0, 0o777, b'2').as_slice(), &[0; 1024]].concat();
        assert_eq!(again(&link), Err(ArchiveError::Header(0)));
        let out = [header(b"../a", 0, 0o777, b'0').as_slice(), &[0; 1024]].concat();
        assert_eq!(again(&out), Err(ArchiveError::Name("../a".to_owned())));
    }

    #[test]
    fn a_truncated_or_corrupted_archive_is_rejected() {
        let bytes = written(&[entry("a", 700), entry("b", 3)]);
        for end in [0, 100, 512, 600, 1536, bytes.len() - 1024] {
            assert!(again(&bytes[..end]).is_err(), "cut at {end}");
        }
        let mut changed = bytes;
        changed[130] ^= 1;
        assert_eq!(again(&changed), Err(ArchiveError::Header(0)));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2048), flips in proptest::collection::vec((0_usize..3000, any::<u8>()), 0..8)) {
            let _ = again(&bytes);
            let mut real = written(&[entry("a/b", 700), entry(&"n".repeat(150), 10)]);
            for (at, with) in flips {
                let length = real.len();
                real[at % length] ^= with;
            }
            let _ = again(&real);
        }
    }
}
