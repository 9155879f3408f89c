//! The lifeline: a lock in the page that the claimant's first thread takes and never releases. When that thread
//! ends, for any reason, the kernel marks the lock's word and wakes its waiters before it tears the process down.
//! Freeing the memory of a large process takes tens of milliseconds, that of a process with a device seconds.

use crate::layout::*;
use crate::page::Page;
use crate::words::Words;

/// The first minor with this field.
const SINCE_MINOR: u64 = 4;

impl Page<'_> {
    /// The offset of the word that changes when the claimant dies, if the claimant has a lifeline. It is aligned
    /// and within [`LIFELINE`]'s room, even in a corrupt page.
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

/// Stores the offset of the word. The lock is already taken.
pub(crate) fn lay(words: Words<'_>, word_at: usize) {
    if has_room(words) {
        words.store_release(LIFELINE_WORD, word_at as u64);
    }
}

/// A new process claims the page: the previous lock has no owner any more.
pub(crate) fn forget(words: Words<'_>) {
    // In a page of an older minor the word is reserved and zero.
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
    fn a_lifeline_is_where_its_claimant_put_it() {
        assert_eq!(page(|_| {}), None);
        assert_eq!(page(|words| lay(words, LIFELINE)), Some(LIFELINE));
        assert_eq!(page(|words| lay(words, LIFELINE + 4)), Some(LIFELINE + 4));
    }

    #[test]
    fn an_invalid_lifeline_is_none() {
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
