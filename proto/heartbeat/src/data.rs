//! Where in its data a rank reads: a number that is the same whenever the same batch is read. A failure that comes again there, at
//! whatever step, is the data's.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// Since this minor the page can hold it.
const SINCE_MINOR: u64 = 6;

impl Page<'_> {
    /// The position of the data that the claimant told last, if it told one.
    #[must_use]
    pub fn data(&self) -> Option<u64> {
        if self.words.load(MINOR_AT) < SINCE_MINOR {
            return None;
        }
        self.words.load(DATA).checked_sub(1)
    }
}

/// Tells it. One word, so that it is there whole or not at all; nobody waits for it, and it is no beat.
#[inline]
pub(crate) fn report(words: Words<'_>, position: u64) {
    if words.load(MINOR_AT) >= SINCE_MINOR {
        // One more, so that 0 is none; nobody has 2^64 batches.
        words.store(DATA, position.saturating_add(1));
    }
}

/// A new claimant has told nothing yet. In a page of an older minor the word is a reserved one, which is zero.
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
