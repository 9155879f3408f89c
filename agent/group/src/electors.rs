//! Decides whether the followers of a job miss its leader. A leader whose host lost power keeps its lease for some
//! seconds; its followers notice sooner. A single follower may have lost only its own connection to the leader. So
//! some followers are electors: each writes to the store that it misses the leader, and the majority of them decides.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The number of electors: enough for others to check what one sees, and few enough for the store.
const ELECTORS: usize = 5;

/// A leader in one of its epochs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missed {
    /// Its launcher.
    pub launcher: String,
    /// The epoch.
    pub epoch: u64,
}

/// The votes of the members of a job, as stored.
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
    /// Adds or updates a member. `seated`: whether it has a seat; `misses`: the leader that it misses.
    pub fn set(&mut self, launcher: &str, seated: bool, misses: Option<Missed>) {
        self.members.insert(launcher.to_owned(), Elector { seated, misses });
    }

    /// Removes a member that is gone.
    pub fn remove(&mut self, launcher: &str) {
        self.members.remove(launcher);
    }

    /// Whether launcher `me` is an elector while `leader` leads.
    #[must_use]
    pub fn has_vote(&self, me: &str, leader: &str) -> bool {
        self.reports_on(leader).any(|(launcher, _)| launcher == me)
    }

    /// Whether the majority of the electors misses this leader.
    #[must_use]
    pub fn miss(&self, leader: &Missed) -> bool {
        let say =
            self.reports_on(&leader.launcher).map(|(_, elector)| elector.misses.as_ref() == Some(leader));
        let (missing, all) =
            say.fold((0, 0), |(missing, all), misses| (missing + u32::from(misses), all + 1));
        2 * missing > all
    }

    fn reports_on<'a>(&'a self, leader: &'a str) -> impl Iterator<Item = (&'a str, &'a Elector)> {
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

    /// Seated members l0 and up. Those listed in `missing` miss l0.
    fn members(count: usize, missing: &[usize]) -> Electors {
        let mut electors = Electors::default();
        for number in 0..count {
            let misses = missing.contains(&number).then(lost);
            electors.set(&format!("l{number}"), true, misses);
        }
        electors
    }

    #[test]
    fn a_majority_of_the_electors_has_to_miss_the_leader() {
        assert!(!members(1, &[]).miss(&lost()), "a leader without followers");
        assert!(members(2, &[1]).miss(&lost()));
        assert!(!members(3, &[2]).miss(&lost()));
        assert!(members(3, &[1, 2]).miss(&lost()));
        assert!(!members(9, &[1, 2]).miss(&lost()), "two of five");
        assert!(members(9, &[1, 4, 5]).miss(&lost()));
        assert!(!members(9, &[5, 6, 7, 8]).miss(&lost()), "only one of them has a say");
        assert!(members(9, &[]).has_vote("l5", "l0") && !members(9, &[]).has_vote("l6", "l0"));
    }

    #[test]
    fn members_without_a_seat_former_members_and_earlier_epochs_do_not_count() {
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
