//! The lifeline: a lock in the page that the claimant's first thread takes and never gives back. When that thread ends, for
//! whatever reason, the kernel marks the lock's word and wakes who waits for it, before it takes the process apart: the
//! memory of a large process takes the kernel tens of milliseconds, that of one with a device seconds.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// Since this minor the page can hold it.
const SINCE_MINOR: u64 = 4;

impl Page<'_> {
    /// Where in the page the word lies that changes when the claimant dies, if it laid out a lifeline. Aligned, and
    /// within [`LIFELINE`]'s room, whatever the page says.
    #[must_use]
    pub fn lifeline(&self) -> Option<usize> {
        let reported = usize::try_from(self.words.load_acquire(LIFELINE_WORD)).ok()?;
        let room = LIFELINE..LIFELINE + LIFELINE_BYTES;
        (has_room(self.words) && room.contains(&reported) && reported.is_multiple_of(size_of::<u32>()))
            .then_some(reported)
    }
}

/// Whether the page has room for one.
pub(crate) fn has_room(words: Words<'_>) -> bool {
    words.load(MINOR_AT) >= SINCE_MINOR
}

/// Says where the word lies. The lock is taken already.
pub(crate) fn lay(words: Words<'_>, word_at: usize) {
    if has_room(words) {
        words.store_release(LIFELINE_WORD, word_at as u64);
    }
}

/// A new process claims the page: the lock of the one before is nobody's.
pub(crate) fn forget(words: Words<'_>) {
    // In a page of an older minor the word is a reserved one, which is zero.
    if words.load(LIFELINE_WORD) != 0 {
        words.store(LIFELINE_WORD, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Writer;
    use crate::fresh::fresh;

    fn page(spoil: impl FnOnce(Words<'_>)) -> Option<usize> {
        let words = fresh();
        spoil(Words(&words));
        Writer::new(&words).ok()?.page().lifeline()
    }

    #[test]
    fn a_lifeline_is_where_its_claimant_says() {
        assert_eq!(page(|_| {}), None);
        assert_eq!(page(|words| lay(words, LIFELINE)), Some(LIFELINE));
        assert_eq!(page(|words| lay(words, LIFELINE + 4)), Some(LIFELINE + 4));
    }

    #[test]
    fn what_cannot_be_one_is_none() {
        for reported in [1, LIFELINE - 4, LIFELINE + 2, LIFELINE + LIFELINE_BYTES, usize::MAX] {
            assert_eq!(page(|words| lay(words, reported)), None, "{reported}");
        }
        let older = |words: Words<'_>| {
            words.store(MINOR_AT, 3);
            words.store(LIFELINE_WORD, LIFELINE as u64);
        };
        assert_eq!(page(older), None);
    }
}
