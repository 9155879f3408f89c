//! What was tried against a device's faults and did not help. A fault that comes again after a reset needs more than a
//! reset; one that comes again after a reboot, too, is for support.

use std::collections::BTreeMap;

use crate::base::time::{Mono, Span};
use crate::model::health::RecommendedAction;

/// When what comes again is the same fault, and when it was not mended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// After so long one that was not reset is taken for one that a reset would have healed if it could.
    pub(super) unhealed_after: Span,
    /// After so long a fault that comes again is another one.
    pub(super) remembered: Span,
}

/// The past of one device, by code of fault.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    past: BTreeMap<u32, Past>,
    /// Errors of each link.
    links: BTreeMap<u32, Bursts>,
    /// The same of codes that nobody knows.
    unknown: BTreeMap<u32, Bursts>,
}

/// When the last one came in this boot, and how many there were.
#[derive(Clone, Copy, Debug, Default)]
struct Bursts {
    last: Option<Mono>,
    count: u32,
}

impl Bursts {
    /// Counts one more; those that follow within a `burst` are one. Returns how many there were since it is `remembered`.
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
    /// What is recommended now.
    rung: Rung,
    /// When it came first since the last remedy, and last; none before that in this boot.
    came: Option<(Mono, Mono)>,
    /// The strongest thing that was done since it came.
    remedy: Remedy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rung {
    /// What the catalogue says.
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
    /// A fault came for which the catalogue recommends `base`. Returns what is recommended by what has been tried.
    pub(super) fn came(
        &mut self,
        code: u32,
        at: Mono,
        base: RecommendedAction,
        terms: Terms,
    ) -> RecommendedAction {
        if !matches!(base, RecommendedAction::ResetDevice | RecommendedAction::RebootNode) {
            return base;
        }
        let past =
            self.past.entry(code).or_insert(Past { rung: Rung::First, came: None, remedy: Remedy::None });
        if past.came.is_some_and(|(_, last)| at.since(last) > terms.remembered) {
            *past = Past { rung: Rung::First, came: None, remedy: Remedy::None };
        }
        let first = past.came.map_or(at, |(first, _)| first);
        match past.remedy {
            Remedy::None => {
                if at.since(first) > terms.unhealed_after {
                    past.rung = past.rung.max(Rung::Reboot);
                }
                past.came = Some((first, at));
            }
            Remedy::Reset => {
                past.rung = past.rung.max(Rung::Reboot);
                past.came = Some((at, at));
            }
            Remedy::Reboot => {
                let was_rebooted_for_it = past.rung > Rung::First || base == RecommendedAction::RebootNode;
                past.rung = if was_rebooted_for_it { Rung::Support } else { Rung::Reboot };
                past.came = Some((at, at));
            }
        }
        past.remedy = Remedy::None;
        match past.rung {
            Rung::First => base,
            Rung::Reboot => base.max(RecommendedAction::RebootNode),
            Rung::Support => RecommendedAction::ContactSupport,
        }
    }

    /// Counts an error of a link. Returns how many there were since it is `remembered`.
    pub(super) fn on_link(&mut self, link: u32, at: Mono, burst: Span, remembered: Span) -> u32 {
        self.links.entry(link).or_default().count(at, burst, remembered)
    }

    /// Counts a code that nobody knows. Returns how often it came since it is `remembered`.
    pub(super) fn of_unknown(&mut self, code: u32, at: Mono, burst: Span, remembered: Span) -> u32 {
        self.unknown.entry(code).or_default().count(at, burst, remembered)
    }

    /// The device was reset, or its driver loaded anew.
    pub(super) fn was_reset(&mut self) {
        self.remedied(Remedy::Reset);
    }

    /// The node was booted: clocks count anew.
    pub(super) fn was_booted(&mut self) {
        self.remedied(Remedy::Reboot);
        self.past.values_mut().for_each(|past| past.came = None);
        self.links.values_mut().chain(self.unknown.values_mut()).for_each(|of| of.last = None);
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
    fn a_fault_that_comes_again_after_a_reset_needs_a_reboot_and_then_support() {
        let mut history = History::default();
        let came = |history: &mut History, minutes| history.came(119, at(minutes), ResetDevice, HOUR);
        assert_eq!(came(&mut history, 1), ResetDevice);
        assert_eq!(came(&mut history, 2), ResetDevice, "a burst is one fault");
        history.was_reset();
        assert_eq!(came(&mut history, 30), RebootNode);
        history.was_reset();
        assert_eq!(came(&mut history, 40), RebootNode, "nobody has rebooted yet");
        history.was_booted();
        assert_eq!(came(&mut history, 1), ContactSupport);
        history.was_booted();
        assert_eq!(came(&mut history, 1), ContactSupport);
    }

    #[test]
    fn one_that_nobody_reset_for_long_needs_more_when_it_comes_again() {
        let mut history = History::default();
        assert_eq!(history.came(119, at(1), ResetDevice, HOUR), ResetDevice);
        assert_eq!(history.came(119, at(60), ResetDevice, HOUR), ResetDevice);
        assert_eq!(history.came(119, at(62), ResetDevice, HOUR), RebootNode);
    }

    #[test]
    fn a_boot_that_nobody_made_for_it_counts_as_a_reset() {
        let mut history = History::default();
        assert_eq!(history.came(48, at(1), ResetDevice, HOUR), ResetDevice);
        history.was_booted();
        assert_eq!(history.came(48, at(1), ResetDevice, HOUR), RebootNode);
        let mut history = History::default();
        assert_eq!(history.came(79, at(1), RebootNode, HOUR), RebootNode);
        history.was_booted();
        assert_eq!(history.came(79, at(1), RebootNode, HOUR), ContactSupport);
    }

    #[test]
    fn others_and_old_ones_are_no_repetition() {
        let mut history = History::default();
        assert_eq!(history.came(119, at(1), ResetDevice, HOUR), ResetDevice);
        history.was_reset();
        assert_eq!(history.came(95, at(2), ResetDevice, HOUR), ResetDevice);
        assert_eq!(history.came(119, at(8 * 24 * 60), ResetDevice, HOUR), ResetDevice);
        for mild in [Nothing, RestartProcess, ContactSupport] {
            assert_eq!(history.came(119, at(8 * 24 * 60 + 1), mild, HOUR), mild);
        }
    }
}
