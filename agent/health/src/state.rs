//! What all judges know about a component's state: when it changes, and as what it was last reported.

use mainstay_model::health::HealthState;
use mainstay_model::time::Mono;

/// How many readings a change needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hysteresis {
    pub(crate) worsen_after: u32,
    pub(crate) recover_after: u32,
}

/// The last reported state of a component, and since when.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReportedState {
    pub(crate) last: Option<(HealthState, Mono)>,
    read_at: Option<Mono>,
}

impl ReportedState {
    /// Reports this state. Returns since when the component is in it.
    pub(crate) fn since(&mut self, state: HealthState, now: Mono) -> Mono {
        let since = self.last.filter(|(before, _)| *before == state).map_or(now, |(_, since)| since);
        self.last = Some((state, since));
        since
    }

    /// Like [`ReportedState::since`] for a state that began earlier: the log of a fault may be older than the agent.
    pub(crate) fn since_it_began(&mut self, state: HealthState, now: Mono, began: Option<Mono>) -> Mono {
        let got_worse = self.last.is_none_or(|(before, _)| before < state);
        self.since(state, if got_worse { began.map_or(now, |began| began.min(now)) } else { now })
    }

    /// When the component was last read completely.
    pub(crate) fn read_at(&mut self, complete: bool, now: Mono) -> Option<Mono> {
        if complete {
            self.read_at = Some(now);
        }
        self.read_at
    }
}
