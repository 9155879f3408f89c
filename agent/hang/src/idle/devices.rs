//! The activity of the ranks' devices, if a driver or libtpu reports it. A job whose devices always had work and are
//! now idle rests, whatever its processes spin on. Devices with work prove nothing: a collective that never ends is
//! work to a GPU.

use mainstay_model::time::{Mono, Span};

/// An older report does not count: its sender may be gone.
const FRESH: Span = Span::seconds(30);

/// The rests of a job, during which all devices are idle.
#[derive(Clone, Debug, Default)]
pub(super) struct Devices {
    reported_at: Option<Mono>,
    /// When one of them last had work, as far as known.
    active: Mono,
    at_work: Span,
    rested: Span,
    longest: Span,
}

impl Devices {
    /// Records how long all devices have been idle; zero while one has work.
    pub(super) fn take(&mut self, now: Mono, idle: Span) {
        let active = Mono(now.0.saturating_sub(idle.0));
        match self.reported_at.replace(now).filter(|before| now.since(*before) <= FRESH) {
            Some(before) if active > before => {
                let rest = before.since(self.active);
                self.rested = self.rested.plus(rest);
                self.longest = self.longest.max(rest);
                self.at_work = self.at_work.plus(active.since(before));
                self.active = active;
            }
            Some(_) => {}
            None => self.active = active,
        }
    }

    /// New processes: what was learned is kept.
    pub(super) fn forget_the_present(&mut self) {
        self.reported_at = None;
    }

    /// How long all devices have been idle. `None` if unknown.
    pub(super) fn rest(&self, now: Mono) -> Option<Span> {
        self.reported_at.filter(|last| now.since(*last) <= FRESH).map(|_| now.since(self.active))
    }

    /// The longest rest that ended by itself.
    pub(super) fn longest(&self) -> Span {
        self.longest
    }

    /// Whether they had work for at least `least` and were idle for less than one part in `seldom`.
    pub(super) fn usually_work(&self, least: Span, seldom: u64) -> bool {
        self.at_work >= least
            && self.rested.0.saturating_mul(seldom) <= self.at_work.0.saturating_add(self.rested.0)
    }
}
