//! When a host that is not ready is asked again.

use crate::base::time::Span;

/// A host that is not ready is asked for again after a quarter of the time that was waited, within these.
const SOONEST: Span = Span::millis(20);
const LATEST: Span = Span::seconds(2);

/// When a host that has been waited for so long is asked again: a GPU's memory is free within a second as a rule, and who
/// waits long need not ask often.
pub(super) fn ask_again_after(waited: Span) -> Span {
    Span((waited.0 / 4).clamp(SOONEST.0, LATEST.0))
}
