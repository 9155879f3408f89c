//! Which remedies did not help against a device's faults. A fault that recurs after a reset needs a reboot; one that
//! also recurs after a reboot needs support.

use std::collections::BTreeMap;

use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::RecommendedAction;
use mainstay_model::time::{Mono, Span};

/// When a recurring fault counts as the same fault, and when as not fixed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// A fault that lasts longer than this without a reset is treated as one that a reset cannot heal.
    pub(super) unhealed_after: Span,
    /// A fault that recurs later than this is a new one.
    pub(super) remembered: Span,
}

/// The fault history of one device, by code.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    past: BTreeMap<FaultCode, Past>,
    /// Errors of each link.
    links: BTreeMap<u32, Bursts>,
    /// Occurrences of each code with unknown meaning.
    unknown: BTreeMap<FaultCode, Bursts>,
}

/// The last occurrence in this boot, and the number of occurrences.
#[derive(Clone, Copy, Debug, Default)]
struct Bursts {
    last: Option<Mono>,
    count: u32,
}

impl Bursts {
    /// Counts one more. Occurrences within `burst` count as one. Returns the count; it restarts after a pause of
    /// `remembered`.
    fn count(&mut self, at: Mono, burst: Span, remembered: Span) -> u32 {
        let since = self.last.map(|last| at.since(last));
        if since.is_some_and(|since| since > remembered) {
            self.count = 0;
        }
        if since.is_none_or(|since| since > burst) {
            self.count = self.count.saturating_add(1);
        }
        self.last = Some(at);
        self.count
    }
}

#[derive(Clone, Debug)]
struct Past {
    /// The current recommendation.
    rung: Rung,
    /// First time since the last remedy, and last time; `None` if not seen in this boot.
    occurred: Option<(Mono, Mono)>,
    /// The strongest remedy since it was last seen.
    remedy: Remedy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rung {
    /// The catalog's action.
    First,
    Reboot,
    Support,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Remedy {
    None,
    Reset,
    Reboot,
}

impl History {
    /// Records a fault for which the catalog recommends `base`. Returns the action, given the earlier remedies.
    pub(super) fn record(
        &mut self,
        code: FaultCode,
        at: Mono,
        base: RecommendedAction,
        terms: Terms,
    ) -> RecommendedAction {
        if !matches!(base, RecommendedAction::ResetDevice | RecommendedAction::RebootNode) {
            return base;
        }
        let past =
            self.past.entry(code).or_insert(Past { rung: Rung::First, occurred: None, remedy: Remedy::None });
        if past.occurred.is_some_and(|(_, last)| at.since(last) > terms.remembered) {
            *past = Past { rung: Rung::First, occurred: None, remedy: Remedy::None };
        }
        let first = past.occurred.map_or(at, |(first, _)| first);
        match past.remedy {
            Remedy::None => {
                if at.since(first) > terms.unhealed_after {
                    past.rung = past.rung.max(Rung::Reboot);
                }
                past.occurred = Some((first, at));
            }
            Remedy::Reset => {
                past.rung = past.rung.max(Rung::Reboot);
                past.occurred = Some((at, at));
            }
            Remedy::Reboot => {
                let was_rebooted_for_it = past.rung > Rung::First || base == RecommendedAction::RebootNode;
                past.rung = if was_rebooted_for_it { Rung::Support } else { Rung::Reboot };
                past.occurred = Some((at, at));
            }
        }
        past.remedy = Remedy::None;
        match past.rung {
            Rung::First => base,
            Rung::Reboot => base.max(RecommendedAction::RebootNode),
            Rung::Support => RecommendedAction::ContactSupport,
        }
    }

    /// Counts an error of a link. Returns the count; it restarts after a pause of `remembered`.
    pub(super) fn on_link(&mut self, link: u32, at: Mono, burst: Span, remembered: Span) -> u32 {
        self.links.entry(link).or_default().count(at, burst, remembered)
    }

    /// Counts a code with unknown meaning. Returns the count; it restarts after a pause of `remembered`.
    pub(super) fn of_unknown(&mut self, code: FaultCode, at: Mono, burst: Span, remembered: Span) -> u32 {
        self.unknown.entry(code).or_default().count(at, burst, remembered)
    }

    /// The device was reset, or its driver was reloaded.
    pub(super) fn was_reset(&mut self) {
        self.remedied(Remedy::Reset);
    }

    /// The node was rebooted: its clocks restart.
    pub(super) fn was_booted(&mut self) {
        self.remedied(Remedy::Reboot);
        self.past.values_mut().for_each(|past| past.occurred = None);
        self.links.values_mut().chain(self.unknown.values_mut()).for_each(|link| link.last = None);
    }

    fn remedied(&mut self, remedy: Remedy) {
        self.past.values_mut().for_each(|past| past.remedy = past.remedy.max(remedy));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ResetDevice, RestartProcess};

    const HOUR: Terms = Terms { unhealed_after: Span::seconds(3600), remembered: Span::seconds(7 * 86_400) };

    fn at(minutes: u64) -> Mono {
        Mono(minutes * 60_000_000_000)
    }

    #[test]
    fn a_fault_that_recurs_after_a_reset_needs_a_reboot_and_then_support() {
        let mut history = History::default();
        let record = |history: &mut History, minutes| {
            history.record(FaultCode::Xid(119), at(minutes), ResetDevice, HOUR)
        };
        assert_eq!(record(&mut history, 1), ResetDevice);
        assert_eq!(record(&mut history, 2), ResetDevice, "a burst is one fault");
        history.was_reset();
        assert_eq!(record(&mut history, 30), RebootNode);
        history.was_reset();
        assert_eq!(record(&mut history, 40), RebootNode, "nobody has rebooted yet");
        history.was_booted();
        assert_eq!(record(&mut history, 1), ContactSupport);
        history.was_booted();
        assert_eq!(record(&mut history, 1), ContactSupport);
    }

    #[test]
    fn a_recurring_fault_without_a_reset_for_long_needs_a_reboot() {
        let mut history = History::default();
        assert_eq!(history.record(FaultCode::Xid(119), at(1), ResetDevice, HOUR), ResetDevice);
        assert_eq!(history.record(FaultCode::Xid(119), at(60), ResetDevice, HOUR), ResetDevice);
        assert_eq!(history.record(FaultCode::Xid(119), at(62), ResetDevice, HOUR), RebootNode);
    }

    #[test]
    fn a_reboot_for_another_reason_counts_as_a_reset() {
        let mut history = History::default();
        assert_eq!(history.record(FaultCode::Xid(48), at(1), ResetDevice, HOUR), ResetDevice);
        history.was_booted();
        assert_eq!(history.record(FaultCode::Xid(48), at(1), ResetDevice, HOUR), RebootNode);
        let mut history = History::default();
        assert_eq!(history.record(FaultCode::Xid(79), at(1), RebootNode, HOUR), RebootNode);
        history.was_booted();
        assert_eq!(history.record(FaultCode::Xid(79), at(1), RebootNode, HOUR), ContactSupport);
    }

    #[test]
    fn other_faults_and_old_faults_do_not_count_as_recurring() {
        let mut history = History::default();
        assert_eq!(history.record(FaultCode::Xid(119), at(1), ResetDevice, HOUR), ResetDevice);
        history.was_reset();
        assert_eq!(history.record(FaultCode::Xid(95), at(2), ResetDevice, HOUR), ResetDevice);
        assert_eq!(history.record(FaultCode::Xid(119), at(8 * 24 * 60), ResetDevice, HOUR), ResetDevice);
        for mild in [Nothing, RestartProcess, ContactSupport] {
            assert_eq!(history.record(FaultCode::Xid(119), at(8 * 24 * 60 + 1), mild, HOUR), mild);
        }
    }
}
