//! Which rooms watch the host and whether they have looked: without it a part of the host that nobody has looked at yet
//! cannot be told from one that is not there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainstay_core::time::{Mono, Span};

/// The rooms by name. Clones are the same roster.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    rooms: Arc<Mutex<BTreeMap<String, Looking>>>,
}

/// How far a room is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looking {
    /// When it began the look that it is at.
    pub began: Option<Mono>,
    /// How long its last look took, once there was one.
    pub took: Option<Span>,
    /// The components that it told of.
    pub components: BTreeSet<String>,
}

impl Roster {
    /// A room begins a look.
    pub fn begins(&self, room: &str, at: Mono) {
        self.lock().entry(room.to_owned()).or_default().began = Some(at);
    }

    /// A room has looked, and told of these components. True the first time.
    pub fn has_looked<'a>(&self, room: &str, at: Mono, components: impl Iterator<Item = &'a str>) -> bool {
        let mut rooms = self.lock();
        let looking = rooms.entry(room.to_owned()).or_default();
        let first = looking.took.is_none();
        looking.took = Some(looking.began.take().map_or(Span(0), |began| at.since(began)));
        for component in components {
            if !looking.components.contains(component) {
                looking.components.insert(component.to_owned());
            }
        }
        first
    }

    /// All rooms as they stand.
    pub fn rooms(&self) -> BTreeMap<String, Looking> {
        self.lock().clone()
    }

    /// Whether every room has looked at least once.
    pub fn is_complete(&self) -> bool {
        self.lock().values().all(|looking| looking.took.is_some())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Looking>> {
        // Nothing in here can be left half done.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_counts_once_it_has_looked() {
        let roster = Roster::default();
        roster.begins("host", Mono(10));
        assert!(!roster.is_complete());
        assert!(roster.has_looked("host", Mono(14), ["host.cpu"].into_iter()));
        assert!(roster.is_complete());
        roster.begins("host", Mono(20));
        let looking = roster.rooms().remove("host").unwrap();
        assert_eq!((looking.began, looking.took), (Some(Mono(20)), Some(Span(4))));
        assert!(looking.components.contains("host.cpu"));
    }
}
