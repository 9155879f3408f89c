//! GPUs for which a call has not returned, and when they are retried.

use mainstay_model::time::{Mono, Span};

use super::RENEW_EVERY;

/// Time until the first retry of a GPU for which a call has hung.
const FIRST_RETRY: Span = Span::seconds(10);

/// A GPU for which a call has not returned, or has ended the probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hung {
    /// Since when.
    pub(super) since: Mono,
    /// The library crashed instead of hanging.
    pub(super) crashed: bool,
    /// When it was last retried.
    pub(super) tried: Mono,
    /// How often it was retried.
    pub(super) tries: u32,
}

impl Hung {
    pub(super) fn new(since: Mono, crashed: bool) -> Hung {
        Hung { since, crashed, tried: since, tries: 0 }
    }

    /// Whether it is time for a retry: soon at first, then less and less often, because each retry takes a deadline and a new probe.
    pub(super) fn is_due(&self, now: Mono) -> bool {
        let wait = Span(FIRST_RETRY.0 << self.tries.saturating_sub(1).min(8));
        now.since(self.tried) >= wait.min(RENEW_EVERY)
    }
}
