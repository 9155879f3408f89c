//! Decides which step all hosts of a job restore: one decision for all, fenced by a number that only grows.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::inventory::StepKey;
use crate::owner::owner;

/// The step that a job is restored to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// The job, by its run id.
    pub run: String,
    /// The number of the decision within the job; a decision with a lower number is out of date.
    pub fence: u64,
    /// The step; `None` if there is no whole step and the job starts from scratch.
    pub step: Option<StepKey>,
    /// The host that decided.
    pub by: String,
}

/// An agent's reply to a decision that it receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionReply {
    /// The decision is in force.
    Accepted,
    /// Another decision with this number or a higher one is in force.
    Refused(Decision),
}

/// Maximum number of jobs whose decisions are stored; any user may ask for any name.
const MAX_RUNS: usize = 1024;

/// The decisions that an agent stores, the newest of each job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    newest: BTreeMap<String, Decision>,
    /// The hosts that received the newest one.
    taken: BTreeMap<String, BTreeSet<String>>,
    /// The order in which they were stored: the value of `reported` at that time.
    stored_at: BTreeMap<String, u64>,
    stores: u64,
    forgotten: u64,
}

impl Decisions {
    /// The newest decision for the job with this run id.
    pub fn newest(&self, run: &str) -> Option<&Decision> {
        self.newest.get(run)
    }

    /// Stores a decision, unless a newer one or a different one with the same number is in force.
    pub fn store(&mut self, decision: &Decision) -> DecisionReply {
        match self.newest.get(&decision.run) {
            Some(held)
                if held.fence > decision.fence || (held.fence == decision.fence && held != decision) =>
            {
                DecisionReply::Refused(held.clone())
            }
            Some(held) if held == decision => DecisionReply::Accepted,
            _ => {
                self.newest.insert(decision.run.clone(), decision.clone());
                self.taken.remove(&decision.run);
                self.stores += 1;
                self.stored_at.insert(decision.run.clone(), self.stores);
                self.evict();
                DecisionReply::Accepted
            }
        }
    }

    /// Number of decisions that were removed because there were too many.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Removes the decision that was stored first, of the user with the most: one user's jobs do not evict another's.
    fn evict(&mut self) {
        if self.newest.len() <= MAX_RUNS {
            return;
        }
        let mut of_users: BTreeMap<Option<u32>, usize> = BTreeMap::new();
        for run in self.newest.keys() {
            *of_users.entry(owner(run)).or_default() += 1;
        }
        let most = of_users.into_iter().max_by_key(|(_, count)| *count).map(|(user, _)| user);
        let of_most = self.newest.keys().filter(|run| Some(owner(run)) == most);
        let Some(run) = of_most.min_by_key(|run| self.stored_at.get(*run).copied()).cloned() else { return };
        self.newest.remove(&run);
        self.taken.remove(&run);
        self.stored_at.remove(&run);
        self.forgotten += 1;
    }

    /// The decision for `asker`. `newest` is the current newest whole step.
    ///
    /// All hosts that ask in one round receive the same decision. A new round starts when a host asks again, when there
    /// is a newer whole step, or when the decided one was lost.
    pub fn decide(&mut self, me: &str, run: &str, asker: &str, newest: Option<&StepKey>) -> Decision {
        let has_taken = self.taken.get(run).is_some_and(|taken| taken.contains(asker));
        let held = self.newest.get(run).filter(|held| !has_taken && held.step.as_ref() == newest);
        let decision = held.cloned().unwrap_or_else(|| {
            let fence = self.newest.get(run).map_or(1, |held| held.fence.saturating_add(1));
            Decision { run: run.to_owned(), fence, step: newest.cloned(), by: me.to_owned() }
        });
        // Never refused: the number is higher than that of the stored decision, or it is the stored decision.
        let _ = self.store(&decision);
        self.taken.entry(run.to_owned()).or_default().insert(asker.to_owned());
        decision
    }
}

#[cfg(test)]
mod tests {
    use super::{Decisions, MAX_RUNS};
    use crate::owner::owned;

    #[test]
    fn the_jobs_of_one_user_do_not_evict_the_decisions_of_another() {
        let mut decisions = Decisions::default();
        let of_a = owned(1, "train");
        decisions.decide("host", &of_a, "host", None);
        for number in 0..2 * MAX_RUNS {
            decisions.decide("host", &owned(2, &number.to_string()), "host", None);
        }
        assert!(decisions.newest(&of_a).is_some());
        assert_eq!((decisions.newest.len(), decisions.stored_at.len()), (MAX_RUNS, MAX_RUNS));
        assert_eq!(decisions.forgotten(), MAX_RUNS as u64 + 1);
        assert!(
            decisions.newest(&owned(2, &(2 * MAX_RUNS - 1).to_string())).is_some(),
            "the newest was removed"
        );
    }
}
