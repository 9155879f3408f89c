//! Ranks that declare that they save the same as others: the same tensors with the same bytes, as data-parallel
//! peers do. The shared content has its own root, without anything that is specific to a rank: its name and the
//! small state next to the tensors.

use crate::container::{Header, STATE_TENSOR};
use crate::manifest::hex;

/// The key of the container's metadata with which a rank declares it.
pub const SHARED_CONTENT_KEY: &str = "alike";

/// A longer group name is ignored.
const MAX_GROUP_BYTES: usize = 200;

/// Prefix of the hashed data, so that no other digest of Mainstay can be mistaken for this one.
const ROOT_PREFIX: &[u8] = b"mainstay checkpoint content 1\n";

/// The group of ranks that should have saved the same, and the root of what was saved.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SharedContent {
    /// The name of the group; only ranks of one step are compared.
    pub group: String,
    /// BLAKE3 over the table of tensors and the checksum of their bytes, in hexadecimal digits.
    pub root: String,
}

impl SharedContent {
    /// The group that a container names, and the byte range of its tensors in the file. None if it names no group,
    /// or if its tensors are not contiguous before the rest of the state.
    #[must_use]
    pub fn asked(header: &Header) -> Option<(String, std::ops::Range<u64>)> {
        let group = header.metadata.get(SHARED_CONTENT_KEY).filter(|group| is_name(group))?;
        let (last, before) = header.tensors.split_last()?;
        let tensors = if last.tensor.name == STATE_TENSOR { before } else { &header.tensors };
        if tensors.iter().any(|placed| placed.tensor.name == STATE_TENSOR) {
            return None;
        }
        let (first, last) = (tensors.first()?, tensors.last()?);
        Some((group.clone(), first.at..last.at + last.bytes))
    }

    /// The root for the tensors of a container whose bytes have this checksum.
    #[must_use]
    pub fn new(group: String, header: &Header, bytes_xxh3_128: u128) -> SharedContent {
        let mut hasher = blake3::Hasher::new();
        hasher.update(ROOT_PREFIX);
        for placed in header.tensors.iter().filter(|placed| placed.tensor.name != STATE_TENSOR) {
            for text in [&placed.tensor.name, &placed.tensor.dtype] {
                hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
            }
            hasher.update(&(placed.tensor.shape.len() as u64).to_le_bytes());
            for length in &placed.tensor.shape {
                hasher.update(&length.to_le_bytes());
            }
        }
        hasher.update(&bytes_xxh3_128.to_le_bytes());
        SharedContent { group, root: hex(hasher.finalize().as_bytes()) }
    }

    /// Reads the group and root from a manifest, if they are valid.
    pub(crate) fn read(group: &str, root: &str) -> Option<SharedContent> {
        let is_root = root.len() == 64
            && root.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        (is_name(group) && is_root).then(|| SharedContent { group: group.to_owned(), root: root.to_owned() })
    }
}

fn is_name(group: &str) -> bool {
    !group.is_empty() && group.len() <= MAX_GROUP_BYTES && !group.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::container::{Tensor, encode};

    fn header(rank: &str, tensors: &[(&str, u64)]) -> Header {
        let words = [("rank", rank), (SHARED_CONTENT_KEY, "dp")];
        let words: BTreeMap<String, String> =
            words.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let tensor = |(name, length): &(&str, u64)| Tensor {
            name: (*name).to_owned(),
            dtype: "F32".to_owned(),
            shape: vec![*length],
        };
        encode(&words, tensors.iter().map(tensor).collect()).unwrap().1
    }

    #[test]
    fn the_rank_and_its_own_state_are_not_part_of_the_root() {
        let (one, other) =
            (header("3", &[("w", 6), (STATE_TENSOR, 5)]), header("12", &[("w", 6), (STATE_TENSOR, 9)]));
        let (group, range) = SharedContent::asked(&one).unwrap();
        assert_eq!((group.as_str(), range.end - range.start), ("dp", 24));
        assert_eq!(SharedContent::new(group.clone(), &one, 7), SharedContent::new(group, &other, 7));
    }

    #[test]
    fn other_bytes_names_or_shapes_give_another_root() {
        let root = |header: &Header, sum| SharedContent::new("dp".to_owned(), header, sum).root;
        let one = header("0", &[("w", 6)]);
        assert_ne!(root(&one, 7), root(&one, 8));
        assert_ne!(root(&one, 7), root(&header("0", &[("v", 6)]), 7));
        assert_ne!(root(&one, 7), root(&header("0", &[("w", 7)]), 7));
    }

    #[test]
    fn a_container_without_group_or_with_its_state_in_front_is_not_compared() {
        let mut nameless = header("0", &[("w", 6)]);
        nameless.metadata.remove(SHARED_CONTENT_KEY);
        assert_eq!(SharedContent::asked(&nameless), None);
        assert_eq!(SharedContent::asked(&header("0", &[(STATE_TENSOR, 2), ("w", 6)])), None);
        assert_eq!(SharedContent::asked(&header("0", &[])), None);
    }
}
