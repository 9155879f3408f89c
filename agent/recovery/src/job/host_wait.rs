//! A wait for a host that is not ready for the next ranks.

use mainstay_model::entry::Body;
use mainstay_model::time::{Mono, Span};

use super::{Command, Output};

/// A host that is not ready is asked again after a quarter of the time waited so far, within these limits.
const MIN_ASK_INTERVAL: Span = Span::millis(20);
const MAX_ASK_INTERVAL: Span = Span::seconds(2);

/// A wait, which may not have begun.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HostWait {
    /// When the host was first found not to be ready.
    since: Option<Mono>,
    /// The reason, as recorded.
    why: Option<String>,
    /// When to ask again. `None` while an answer is awaited.
    pub(super) wake_at: Option<Mono>,
}

impl HostWait {
    /// How long the host has been waited for.
    pub(super) fn waited(&self, at: Mono) -> Span {
        self.since.map_or(Span::default(), |since| at.since(since))
    }

    /// The host is still not ready: records the reason once, and again if it changes, and asks
    /// again after a while. A GPU's memory is usually free within a second, and a long wait needs
    /// few queries.
    pub(super) fn go_on(
        &mut self,
        at: Mono,
        why: &str,
        record: impl FnOnce() -> Body,
        out: &mut Vec<Output>,
    ) {
        if self.why.as_deref() != Some(why) {
            self.why = Some(why.to_owned());
            out.push(Output::Record(record()));
        }
        let waited = at.since(*self.since.get_or_insert(at));
        let pause = Span((waited.0 / 4).clamp(MIN_ASK_INTERVAL.0, MAX_ASK_INTERVAL.0));
        let wake_at = at.after(pause);
        self.wake_at = Some(wake_at);
        out.push(Output::Command(Command::Wake { at: wake_at }));
    }
}
