//! When to ask again for a host that is not ready.

use mainstay_model::time::Span;

/// A host that is not ready is asked again after a quarter of the time waited so far, within these limits.
const SOONEST: Span = Span::millis(20);
const LATEST: Span = Span::seconds(2);

/// The time until a host that has been waited for this long is asked again. A GPU's memory is usually free within a
/// second, and a long wait needs few queries.
pub(super) fn ask_again_after(waited: Span) -> Span {
    Span((waited.0 / 4).clamp(SOONEST.0, LATEST.0))
}
