//! The position of a rank in its data: a number that is the same whenever the same batch is read. A failure that
//! recurs at the same position, at any step, is caused by the data.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// The first minor with this field.
const SINCE_MINOR: u64 = 6;

impl Page<'_> {
    /// The last position in the data that the claimant reported, if any.
    #[must_use]
    pub fn data(&self) -> Option<u64> {
        if self.words.load(MINOR_AT) < SINCE_MINOR {
            return None;
        }
        self.words.load(DATA).checked_sub(1)
    }
}

/// Stores the position. It is one word, so it is never half written. It needs no lock and is not a beat.
#[inline]
pub(crate) fn report(words: Words<'_>, position: u64) {
    if words.load(MINOR_AT) >= SINCE_MINOR {
        // The position plus one, so that 0 means none. No run reads 2^64 batches.
        words.store(DATA, position.saturating_add(1));
    }
}

/// Clears the position for a new claimant. In a page of an older minor the word is reserved and zero.
pub(crate) fn forget(words: Words<'_>) {
    if words.load(DATA) != 0 {
        words.store(DATA, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fresh::fresh;

    #[test]
    fn the_last_position_counts_and_0_is_one() {
        let words = fresh();
        let page = Page::new(&words).unwrap();
        assert_eq!(page.data(), None);
        report(Words(&words), 0);
        assert_eq!(page.data(), Some(0));
        report(Words(&words), 7);
        assert_eq!(page.data(), Some(7));
        forget(Words(&words));
        assert_eq!(page.data(), None);
    }

    #[test]
    fn a_page_of_an_older_minor_is_left_alone() {
        let words = fresh();
        Words(&words).store(MINOR_AT, 5);
        report(Words(&words), 7);
        assert_eq!(Words(&words).load(DATA), 0);
        Words(&words).store(DATA, 8);
        assert_eq!(Page::new(&words).unwrap().data(), None, "there the word is another's");
    }
}
