//! Checks whether containers are whole: roughly from their first and last bytes, or thoroughly from their checksums.

use serde_json::Value;

use super::zip::{self, Reading};

/// Number of bytes at the end of a file that are enough to check a zip archive.
pub const TAIL_BYTES: usize = 66_000;

/// Number of bytes at the start of a file that are read first; [`head_wanted`] then returns how many are needed.
pub const HEAD_BYTES: usize = 8;

/// Maximum length of a safetensors header, bytes.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// Whether a file with this name is of a kind that is checked: files of torch and Lightning, and safetensors.
pub fn is_known(name: &str) -> bool {
    [".pt", ".pth", ".pth.tar", ".ckpt", ".bin", ".safetensors"].iter().any(|ending| name.ends_with(ending))
}

/// Number of bytes at the start that are needed; `head` are the first [`HEAD_BYTES`].
pub fn head_wanted(name: &str, head: &[u8]) -> u64 {
    if !name.ends_with(".safetensors") {
        return 0;
    }
    header_length(head).filter(|length| *length <= MAX_HEADER_BYTES).map_or(0, |length| length + 8)
}

fn header_length(head: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(head.get(..8)?.try_into().ok()?))
}

/// Whether a file is whole, from its first and last bytes. A writer that was killed leaves a file that is not whole.
///
/// A zip archive (`torch.save`) has its directory at the end, with the offset where it starts. A safetensors file has
/// its length in the header. The state of other files is unknown; they count as not whole.
pub fn is_whole(name: &str, size: u64, head: &[u8], tail: &[u8]) -> bool {
    if name.ends_with(".safetensors") {
        return safetensors_size(head) == Some(size);
    }
    // Archives of torch are zip files; other formats have no end marker.
    head.starts_with(b"PK") && zip_ends(size, tail)
}

/// Checks that a file of a checkpoint is complete, as far as its format allows: archives by their checksums,
/// safetensors files by their length, JSON and pickles by their start and end. Files of other formats count as sound.
///
/// # Errors
/// The problem with the file.
pub fn sound(name: &str, size: u64, read: &mut Reading<'_>) -> Result<(), String> {
    let name = name.rsplit('/').next().unwrap_or(name);
    let is = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    let is_archive = is(&[".pt", ".pth", ".pth.tar", ".ckpt", ".bin", ".distcp"]);
    let is_pickle = name == ".metadata";
    if !is_archive && !is_pickle && !is(&[".safetensors", ".json"]) {
        return Ok(());
    }
    let mut head = [0; HEAD_BYTES];
    if size < HEAD_BYTES as u64 {
        let mut short = vec![0; usize::try_from(size).unwrap_or(0)];
        read(0, &mut short)?;
        let is_json = name.ends_with(".json") && is_json_between(&short, &short);
        return if is_json { Ok(()) } else { Err(format!("it has {size} bytes only")) };
    }
    read(0, &mut head)?;
    let mut last = [0; HEAD_BYTES];
    read(size - HEAD_BYTES as u64, &mut last)?;
    if head == [0; HEAD_BYTES] {
        return Err("it starts with zeros".to_owned());
    }
    if is_archive {
        // Formats other than zip have no end marker.
        return if head.starts_with(b"PK") { zip::verify(size, read) } else { Ok(()) };
    }
    if name.ends_with(".safetensors") {
        let length = head_wanted(name, &head);
        let mut header = vec![0; usize::try_from(length.min(size)).unwrap_or(0)];
        read(0, &mut header)?;
        let is_whole = safetensors_size(&header) == Some(size);
        return if is_whole { Ok(()) } else { Err("it is not as long as its header says".to_owned()) };
    }
    let is_whole = if is_pickle {
        head[0] == 0x80 && last[HEAD_BYTES - 1] == b'.'
    } else {
        is_json_between(&head, &last)
    };
    if is_whole { Ok(()) } else { Err("it is cut off or damaged".to_owned()) }
}

/// Whether JSON starts and ends like this. The rest is not parsed: writers put `NaN` into it, which is not valid JSON.
fn is_json_between(head: &[u8], last: &[u8]) -> bool {
    let first = head.iter().find(|byte| !byte.is_ascii_whitespace());
    let end = last.iter().rfind(|byte| !byte.is_ascii_whitespace());
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'"';
    match (first, end) {
        (Some(b'{'), Some(b'}')) | (Some(b'['), Some(b']')) => true,
        (Some(first), Some(end)) => is_word(first) && is_word(end),
        _ => false,
    }
}

fn safetensors_size(head: &[u8]) -> Option<u64> {
    let length = header_length(head)?;
    let header: Value =
        serde_json::from_slice(head.get(8..usize::try_from(length).ok()?.checked_add(8)?)?).ok()?;
    let mut end = 0;
    for (name, tensor) in header.as_object()? {
        if name != "__metadata__" {
            let offsets = tensor.get("data_offsets")?.as_array()?;
            end = end.max(offsets.get(1)?.as_u64()?);
        }
    }
    end.checked_add(length)?.checked_add(8)
}

/// Finds the end record of a zip archive. It must end the file, and the directory must be at the recorded offset.
fn zip_ends(size: u64, tail: &[u8]) -> bool {
    const END_BYTES: usize = 22;
    let Some(last) = tail.len().checked_sub(END_BYTES) else { return false };
    (0..=last).rev().any(|at| {
        let end = &tail[at..];
        let u32_at =
            |from: usize| u32::from_le_bytes([end[from], end[from + 1], end[from + 2], end[from + 3]]);
        let comment = usize::from(u16::from_le_bytes([end[20], end[21]]));
        if !end.starts_with(b"PK\x05\x06") || comment != end.len() - END_BYTES {
            return false;
        }
        let (directory, offset) = (u64::from(u32_at(12)), u64::from(u32_at(16)));
        let starts = size - (tail.len() - at) as u64;
        // Larger archives (zip64) have these values in a separate record right before.
        let is_large = u32_at(16) == u32::MAX || u32_at(12) == u32::MAX;
        is_large || offset.checked_add(directory).is_some_and(|end| end <= starts && starts - end < 128)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A zip archive of one uncompressed file.
    pub(crate) fn zip(content: &[u8]) -> Vec<u8> {
        let mut bytes = b"PK\x03\x04".to_vec();
        bytes.extend(content);
        let (offset, directory) = (bytes.len() as u32, b"PK\x01\x02directory");
        bytes.extend(directory);
        bytes.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
        bytes.extend((directory.len() as u32).to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.extend([0, 0]);
        bytes
    }

    fn whole(name: &str, bytes: &[u8]) -> bool {
        let wanted = head_wanted(name, bytes).max(HEAD_BYTES as u64) as usize;
        let tail = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        is_whole(name, bytes.len() as u64, &bytes[..wanted.min(bytes.len())], tail)
    }

    #[test]
    fn an_archive_of_torch_is_whole_and_no_truncated_part_is() {
        let bytes = zip(&[7; 300]);
        assert!(whole("a_1.pt", &bytes));
        assert!((0..bytes.len()).all(|end| !whole("a_1.pt", &bytes[..end])));
        assert!(!whole("a_1.pt", &[bytes.as_slice(), b"more"].concat()));
        assert!(!whole("a_1.pt", b"a pickle of before"));
    }

    #[test]
    fn a_safetensors_file_is_as_long_as_its_header_says() {
        let header = br#"{"__metadata__":{"a":"b"},"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend([1, 2, 3, 4]);
        assert!(whole("m_1.safetensors", &bytes));
        assert!((0..bytes.len()).all(|end| !whole("m_1.safetensors", &bytes[..end])));
        assert!(!whole("m_1.safetensors", &[bytes.as_slice(), b"!"].concat()));
    }

    fn soundness(name: &str, bytes: &[u8]) -> Result<(), String> {
        let mut read = |at: u64, buffer: &mut [u8]| {
            let at = usize::try_from(at).map_err(|error| error.to_string())?;
            buffer.copy_from_slice(bytes.get(at..at + buffer.len()).ok_or("short")?);
            Ok(())
        };
        sound(name, bytes.len() as u64, &mut read)
    }

    #[test]
    fn truncated_or_zeroed_files_are_not_sound_and_files_of_unknown_formats_are() {
        let header = br#"{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        let mut tensors = (header.len() as u64).to_le_bytes().to_vec();
        tensors.extend(header);
        tensors.extend([1, 2, 3, 4]);
        let whole: [(&str, &[u8]); 4] = [
            ("checkpoint-5/model.safetensors", &tensors),
            ("checkpoint-5/trainer_state.json", br#"{"loss": NaN, "global_step": 5}"#),
            ("step-5/.metadata", b"\x80\x02}q\x00(what is pickled)."),
            ("5/d/0f3a", b"of another format"),
        ];
        for (name, bytes) in whole {
            assert_eq!(soundness(name, bytes), Ok(()), "{name}");
            if !name.contains("/d/") {
                assert!(soundness(name, &bytes[..bytes.len() - 1]).is_err(), "{name} truncated");
                assert!(soundness(name, &vec![0; bytes.len()]).is_err(), "{name} of zeros");
                assert!(soundness(name, b"").is_err(), "{name} empty");
            }
        }
        assert!(soundness("a/optimizer.pt", b"PK\x03\x04 and no end").is_err());
        assert_eq!(soundness("a/old.pt", b"a pickle of before"), Ok(()));
        assert_eq!(soundness("a/empty.json", b"{}"), Ok(()));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_checks_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (whole("a.pt", &bytes), whole("a.safetensors", &bytes));
            for name in ["a.pt", "a.safetensors", "a.json", ".metadata"] {
                let _ = soundness(name, &bytes);
            }
        }
    }
}
