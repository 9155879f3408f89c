//! The number of steps after which the program ends: with the pace it gives the time that is left.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// The first minor with this field.
const SINCE_MINOR: u64 = 7;

impl Page<'_> {
    /// The number of steps that the claimant will train, if it reported one.
    #[must_use]
    pub fn total_steps(&self) -> Option<u64> {
        let known = self.words.load(MINOR_AT) >= SINCE_MINOR;
        known.then(|| self.words.load(TOTAL_STEPS)).filter(|steps| *steps > 0)
    }
}

/// Stores the number; 0 is unknown. It is one word, so it is never half written. It needs no lock and is not a beat.
pub(crate) fn report(words: Words<'_>, steps: u64) {
    if words.load(MINOR_AT) >= SINCE_MINOR {
        words.store(TOTAL_STEPS, steps);
    }
}

/// Clears the number for a new claimant. In a page of an older minor the word is reserved and zero.
pub(crate) fn forget(words: Words<'_>) {
    if words.load(TOTAL_STEPS) != 0 {
        words.store(TOTAL_STEPS, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fresh::fresh;

    #[test]
    fn the_last_number_counts_and_0_is_none() {
        let words = fresh();
        let page = Page::new(&words).unwrap();
        assert_eq!(page.total_steps(), None);
        for (reported, read) in [(500, Some(500)), (600, Some(600)), (0, None)] {
            report(Words(&words), reported);
            assert_eq!(page.total_steps(), read);
        }
        report(Words(&words), 500);
        forget(Words(&words));
        assert_eq!(page.total_steps(), None);
    }

    #[test]
    fn a_page_of_an_older_minor_is_left_alone() {
        let words = fresh();
        Words(&words).store(MINOR_AT, 6);
        report(Words(&words), 500);
        assert_eq!(Words(&words).load(TOTAL_STEPS), 0);
        Words(&words).store(TOTAL_STEPS, 500);
        assert_eq!(Page::new(&words).unwrap().total_steps(), None, "there the word is another's");
    }
}
