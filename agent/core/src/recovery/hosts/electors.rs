//! Whether the followers of a job miss its leader. A leader whose host lost its power keeps its lease for some seconds; its
//! followers know sooner. One of them alone may have lost its own way to the leader, so some of them are electors: each says in
//! the store that it misses the leader, and what most of them say counts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// So many followers have a say: enough for what one sees to be checked by others, and few enough for the store.
const ELECTORS: usize = 5;

/// A leader in one of its epochs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missed {
    /// Its launcher.
    pub launcher: String,
    /// The epoch.
    pub epoch: u64,
}

/// What the members of a job say, as the store has it.
#[derive(Clone, Debug, Default)]
pub struct Electors {
    members: BTreeMap<String, Elector>,
}

#[derive(Clone, Debug, PartialEq)]
struct Elector {
    seated: bool,
    misses: Option<Missed>,
}

impl Electors {
    /// A member is there. `seated`: whether it has a seat; `misses`: the leader that it misses.
    pub fn set(&mut self, launcher: &str, seated: bool, misses: Option<Missed>) {
        self.members.insert(launcher.to_owned(), Elector { seated, misses });
    }

    /// A member is gone.
    pub fn remove(&mut self, launcher: &str) {
        self.members.remove(launcher);
    }

    /// Whether this launcher has a say while that one leads.
    #[must_use]
    pub fn has_say(&self, me: &str, leader: &str) -> bool {
        self.of(leader).any(|(launcher, _)| launcher == me)
    }

    /// Whether most of those who have a say miss this leader.
    #[must_use]
    pub fn miss(&self, leader: &Missed) -> bool {
        let say = self.of(&leader.launcher).map(|(_, elector)| elector.misses.as_ref() == Some(leader));
        let (missing, all) =
            say.fold((0, 0), |(missing, all), misses| (missing + u32::from(misses), all + 1));
        2 * missing > all
    }

    fn of<'a>(&'a self, leader: &'a str) -> impl Iterator<Item = (&'a str, &'a Elector)> {
        let others =
            self.members.iter().filter(move |(launcher, elector)| elector.seated && *launcher != leader);
        others.map(|(launcher, elector)| (launcher.as_str(), elector)).take(ELECTORS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> Missed {
        Missed { launcher: "l0".to_owned(), epoch: 3 }
    }

    /// Seated members l0 and up, of which these miss l0.
    fn members(count: usize, missing: &[usize]) -> Electors {
        let mut electors = Electors::default();
        for number in 0..count {
            let misses = missing.contains(&number).then(lost);
            electors.set(&format!("l{number}"), true, misses);
        }
        electors
    }

    #[test]
    fn most_of_those_with_a_say_have_to_miss_the_leader() {
        assert!(!members(1, &[]).miss(&lost()), "a leader without followers");
        assert!(members(2, &[1]).miss(&lost()));
        assert!(!members(3, &[2]).miss(&lost()));
        assert!(members(3, &[1, 2]).miss(&lost()));
        assert!(!members(9, &[1, 2]).miss(&lost()), "two of five");
        assert!(members(9, &[1, 4, 5]).miss(&lost()));
        assert!(!members(9, &[5, 6, 7, 8]).miss(&lost()), "only one of them has a say");
        assert!(members(9, &[]).has_say("l5", "l0") && !members(9, &[]).has_say("l6", "l0"));
    }

    #[test]
    fn members_without_a_seat_those_that_left_and_earlier_epochs_do_not_count() {
        let mut electors = members(3, &[1]);
        electors.set("k", false, Some(lost()));
        assert!(!electors.miss(&lost()));
        electors.set("l2", true, Some(Missed { epoch: 2, ..lost() }));
        assert!(!electors.miss(&lost()));
        electors.remove("l2");
        assert!(electors.miss(&lost()));
        assert!(!electors.miss(&Missed { epoch: 4, ..lost() }), "elected again");
    }
}
