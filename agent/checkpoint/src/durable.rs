//! Selects the steps to upload to durable storage and those to delete from it. Agents that know the same steps reach
//! the same result. An agent that is late joins an upload that others started: a step is useless there until all its
//! shards are there.

use crate::inventory::StepKey;

/// A step of one run, as far as durable storage is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The step.
    pub key: StepKey,
    /// When its newest shard was sealed, seconds since 1970.
    pub created: i64,
    /// Whether every shard of it is on some host.
    pub here: bool,
    /// Whether a host has started to upload it.
    pub started: bool,
    /// Whether the whole step is in durable storage.
    pub durable: bool,
}

impl Candidate {
    fn age(&self) -> (u64, i64, &StepKey) {
        (self.key.step, self.created, &self.key)
    }
}

/// The step of a run to upload next: the newest that is due. One whose upload has started comes first, so that hosts of
/// different speeds finish the same step.
///
/// A step is due if it is newer than all steps there and the first in its interval of `every` training steps. For 1000,
/// a step from 2000 to 2999 is due while storage has none of them.
#[must_use]
pub fn next(steps: &[Candidate], every: u64) -> Option<&Candidate> {
    let every = every.max(1);
    let newest = steps.iter().filter(|step| step.durable).max_by_key(|step| step.age());
    let due = |step: &&Candidate| {
        let is_newer = newest.is_none_or(|newest| {
            step.age() > newest.age() && step.key.step / every > newest.key.step / every
        });
        step.here && !step.durable && is_newer
    };
    steps.iter().filter(due).max_by_key(|step| (step.started, step.age()))
}

/// The steps of a run that may be deleted from durable storage, oldest first: whole steps beyond the `keep` newest, and
/// incomplete uploads that are older than all kept steps.
#[must_use]
pub fn expired(steps: &[Candidate], keep: usize) -> Vec<&Candidate> {
    let mut whole: Vec<&Candidate> = steps.iter().filter(|step| step.durable).collect();
    whole.sort_by_key(|step| std::cmp::Reverse(step.age()));
    let Some(oldest) = whole.get(keep.max(1) - 1).or(whole.last()) else { return Vec::new() };
    let mut gone: Vec<&Candidate> =
        steps.iter().filter(|step| (step.durable || step.started) && step.age() < oldest.age()).collect();
    gone.sort_by_key(|step| step.age());
    gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(step: u64) -> Candidate {
        let key = StepKey { step, job: "j".into(), run: "r".into(), attempt: 0, world: 2 };
        Candidate { key, created: 0, here: true, started: false, durable: false }
    }

    fn there(step: u64) -> Candidate {
        Candidate { durable: true, started: true, ..candidate(step) }
    }

    fn step(found: Option<&Candidate>) -> Option<u64> {
        found.map(|found| found.key.step)
    }

    #[test]
    fn the_newest_whole_step_is_uploaded_first_unless_an_upload_has_started() {
        let mut steps = vec![candidate(10), candidate(20), candidate(30)];
        assert_eq!(step(next(&steps, 1)), Some(30));
        steps[1].started = true;
        assert_eq!(step(next(&steps, 1)), Some(20));
        steps[1].here = false;
        assert_eq!(step(next(&steps, 1)), Some(30), "a step without all its shards was selected");
        assert_eq!(next(&[], 1), None);
    }

    #[test]
    fn one_step_in_each_interval_is_due() {
        let mut steps = vec![there(1000), candidate(1100), candidate(1900)];
        assert_eq!(next(&steps, 1000), None);
        steps.push(candidate(2050));
        assert_eq!(step(next(&steps, 1000)), Some(2050));
        assert_eq!(next(&[there(2050), candidate(1900)], 1), None, "an older step was selected");
    }

    #[test]
    fn the_newest_steps_are_kept_and_older_incomplete_uploads_are_deleted() {
        let half = |step| Candidate { started: true, here: false, ..candidate(step) };
        let steps = [there(1), half(2), there(3), there(4), half(5)];
        let gone: Vec<u64> = expired(&steps, 2).iter().map(|gone| gone.key.step).collect();
        assert_eq!(gone, [1, 2]);
        assert!(expired(&steps[..1], 0).is_empty(), "the newest was deleted");
        assert!(expired(&[half(2)], 1).is_empty(), "an upload that may be in progress was deleted");
    }

    proptest! {
        /// Hosts need different times for their shards while a step is saved at every tick. Steps still complete.
        #[test]
        fn hosts_of_different_speed_finish_steps(speeds in proptest::collection::vec(1_u64..9, 1..5), every in 1_u64..4) {
            let mut done: Vec<std::collections::BTreeSet<u64>> = vec![Default::default(); speeds.len()];
            let mut busy: Vec<Option<(u64, u64)>> = vec![None; speeds.len()];
            let mut started = std::collections::BTreeSet::new();
            for now in 1..200_u64 {
                for host in 0..speeds.len() {
                    if let Some((step, until)) = busy[host] {
                        if until > now { continue }
                        done[host].insert(step);
                        busy[host] = None;
                    }
                    // The last 20 steps are still on the hosts' disks.
                    let steps: Vec<Candidate> = (now.saturating_sub(20).max(1)..=now)
                        .map(|step| Candidate {
                            started: started.contains(&step),
                            durable: done.iter().all(|done| done.contains(&step)),
                            ..candidate(step)
                        })
                        .collect();
                    if let Some(step) = next(&steps, every).map(|next| next.key.step)
                        && !done[host].contains(&step)
                    {
                        started.insert(step);
                        busy[host] = Some((step, now + speeds[host]));
                    }
                }
            }
            let whole = done[0].iter().filter(|step| done.iter().all(|done| done.contains(step))).count();
            prop_assert!(whole >= 3, "only {whole} steps completed with speeds {speeds:?}");
        }
    }
}
