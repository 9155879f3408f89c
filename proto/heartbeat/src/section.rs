//! Section names: an append-only table, so that an id, once seen, means the same for the page's whole life.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// A section's number in the page's table of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SectionId(u8);

impl SectionId {
    /// What sections are counted under once the table is full.
    pub const OTHER: Self = Self(0);

    /// The id with this number; numbers that no page has become [`SectionId::OTHER`].
    #[inline]
    #[must_use]
    pub const fn new(number: u64) -> Self {
        if number < NAME_ENTRIES as u64 { Self(number as u8) } else { Self::OTHER }
    }

    /// The number.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl Page<'_> {
    /// The name of a section, if the page has it.
    #[must_use]
    pub fn section_name(&self, id: SectionId) -> Option<String> {
        let entry = entry(id);
        let length = self.words.load_acquire(entry);
        (length != 0).then(|| self.words.load_text(entry + WORD, length, NAME_BYTES))
    }
}

fn entry(id: SectionId) -> usize {
    NAMES + usize::from(id.0) * NAME_ENTRY_BYTES
}

/// A name as the table keeps it: cut to what fits, and never empty (a length of zero means "no entry").
fn storable(name: &str) -> &[u8] {
    let name = if name.is_empty() { "?" } else { name };
    &name.as_bytes()[..name.floor_char_boundary(NAME_BYTES)]
}

/// The id of `name` if it is in the table already; needs no lock.
pub(crate) fn find(words: Words<'_>, name: &str) -> Option<SectionId> {
    let name = storable(name);
    (0..NAME_ENTRIES as u64)
        .map(SectionId::new)
        .map_while(|id| holds(words, id, name))
        .find_map(|found| found)
}

/// Adds `name`, or finds it; `None` when the table is full. The caller holds the page's lock.
pub(crate) fn add(words: Words<'_>, name: &str) -> Option<SectionId> {
    if let Some(id) = find(words, name) {
        return Some(id);
    }
    let id = (0..NAME_ENTRIES as u64).map(SectionId::new).find(|&id| words.load(entry(id)) == 0)?;
    let name = storable(name);
    words.store_bytes(entry(id) + WORD, name);
    words.store_release(entry(id), name.len() as u64);
    Some(id)
}

/// `None` when the entry is empty, `Some(Some(id))` when it holds exactly `name`.
fn holds(words: Words<'_>, id: SectionId, name: &[u8]) -> Option<Option<SectionId>> {
    let length = words.load_acquire(entry(id));
    if length == 0 {
        return None;
    }
    let equal = length == name.len() as u64
        && name.chunks(WORD).enumerate().all(|(index, chunk)| {
            let word = words.load(entry(id) + WORD + index * WORD).to_le_bytes();
            &word[..chunk.len()] == chunk
        });
    Some(equal.then_some(id))
}
