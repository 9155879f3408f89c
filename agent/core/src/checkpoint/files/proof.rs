//! Containers that can be seen to be whole from their first and last bytes.

use serde_json::Value;

/// So many bytes of a file's end are enough for a zip archive.
pub const TAIL: usize = 66_000;

/// So many bytes of its beginning are asked for at first; [`head_wanted`] says how many it takes.
pub const HEAD: usize = 8;

/// A safetensors header longer than this is none.
const LONGEST_HEADER: u64 = 100 << 20;

/// Whether a file of this name is of a kind that is looked at: what torch and Lightning write, and safetensors.
pub fn is_known(name: &str) -> bool {
    [".pt", ".pth", ".ckpt", ".bin", ".safetensors"].iter().any(|ending| name.ends_with(ending))
}

/// How many of its first bytes are needed, where `head` are the first [`HEAD`].
pub fn head_wanted(name: &str, head: &[u8]) -> u64 {
    if !name.ends_with(".safetensors") {
        return 0;
    }
    header_length(head).filter(|length| *length <= LONGEST_HEADER).map_or(0, |length| length + 8)
}

fn header_length(head: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(head.get(..8)?.try_into().ok()?))
}

/// Whether a file is whole, by its first and last bytes. A writer that was killed leaves one that is not.
///
/// A zip archive (`torch.save`) has its directory at the end, and it says where that begins; a safetensors file says at the
/// beginning how long it is. Others cannot be told, and count as not whole.
pub fn is_whole(name: &str, size: u64, head: &[u8], tail: &[u8]) -> bool {
    if name.ends_with(".safetensors") {
        return safetensors_size(head) == Some(size);
    }
    // Torch's archives are zip files; what begins otherwise is of a form that has no end.
    head.starts_with(b"PK") && zip_ends(size, tail)
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

/// Looks for the end of a zip archive's directory: it must be the last thing in the file, and the directory must lie where it says.
fn zip_ends(size: u64, tail: &[u8]) -> bool {
    const END: usize = 22;
    let Some(last) = tail.len().checked_sub(END) else { return false };
    (0..=last).rev().any(|at| {
        let end = &tail[at..];
        let of = |from: usize| u32::from_le_bytes([end[from], end[from + 1], end[from + 2], end[from + 3]]);
        let comment = usize::from(u16::from_le_bytes([end[20], end[21]]));
        if !end.starts_with(b"PK\x05\x06") || comment != end.len() - END {
            return false;
        }
        let (directory, offset) = (u64::from(of(12)), u64::from(of(16)));
        let begins = size - (tail.len() - at) as u64;
        // In larger archives these are in a record of their own right before.
        let is_large = of(16) == u32::MAX || of(12) == u32::MAX;
        is_large || offset.checked_add(directory).is_some_and(|end| end <= begins && begins - end < 128)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A zip archive of one file that is stored as it is.
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
        let wanted = head_wanted(name, bytes).max(HEAD as u64) as usize;
        let tail = &bytes[bytes.len().saturating_sub(TAIL)..];
        is_whole(name, bytes.len() as u64, &bytes[..wanted.min(bytes.len())], tail)
    }

    #[test]
    fn what_torch_saved_is_whole_and_every_beginning_of_it_is_not() {
        let bytes = zip(&[7; 300]);
        assert!(whole("a_1.pt", &bytes));
        assert!((0..bytes.len()).all(|end| !whole("a_1.pt", &bytes[..end])));
        assert!(!whole("a_1.pt", &[bytes.as_slice(), b"more"].concat()));
        assert!(!whole("a_1.pt", b"a pickle of before"));
    }

    #[test]
    fn a_safetensors_file_is_as_long_as_it_says() {
        let header = br#"{"__metadata__":{"a":"b"},"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend([1, 2, 3, 4]);
        assert!(whole("m_1.safetensors", &bytes));
        assert!((0..bytes.len()).all(|end| !whole("m_1.safetensors", &bytes[..end])));
        assert!(!whole("m_1.safetensors", &[bytes.as_slice(), b"!"].concat()));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (whole("a.pt", &bytes), whole("a.safetensors", &bytes));
        }
    }
}
