//! From votes to a probability for each class: log-odds are added, one vote for each family of evidence, so that
//! ten lines of one fault do not count as ten faults.

use std::collections::BTreeMap;

use super::catalog::Role;
use super::class::Class;
use super::vote::Vote;

/// Log-odds before anything is seen, per class in the order of [`Class::ALL`]. The share of each class among
/// failures of jobs that were worth a report; "unknown" is what stays when nothing speaks.
const PRIOR: [f64; 11] = [0.0, 0.1, -0.5, 0.0, -0.6, -0.3, -0.3, -0.2, -0.6, 0.0, 0.9];
/// A second and a third signature of one family for one class add this much each.
const CORROBORATION: f64 = 0.3;
/// Below this weight a cause is a hint; consequences beside it keep their doubt.
const CAUSE: f64 = 2.0;
/// How much of a consequence's weight stays as doubt beside a cause of weight.
const DOUBT: f64 = 0.15;
/// The earliest cause tends to be the one that the others follow from.
const EARLIEST: f64 = 0.4;
/// Log-odds are divided by this: votes of different families are not fully independent. Fitted on labelled
/// cases by cross-validation over their sources.
const TEMPERATURE: f64 = 1.0;

/// A probability for each class, in the order of [`Class::ALL`].
#[derive(Clone, Debug, PartialEq)]
pub struct Posterior(pub [f64; 11]);

impl Posterior {
    /// Of one class.
    pub fn of(&self, class: Class) -> f64 {
        self.0[class.index()]
    }

    /// The likeliest class.
    pub fn best(&self) -> Class {
        Class::ALL.into_iter().fold(
            Class::Unknown,
            |best, class| {
                if self.of(class) > self.of(best) { class } else { best }
            },
        )
    }

    /// Classes by probability, likeliest first.
    pub fn ranked(&self) -> Vec<(Class, f64)> {
        let mut all: Vec<(Class, f64)> =
            Class::ALL.into_iter().map(|class| (class, self.of(class))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }
}

/// Adds the votes up.
pub fn fuse(votes: &[Vote]) -> Posterior {
    let mut odds = PRIOR;
    for ((_, class), weight) in by_family(votes) {
        odds[class.index()] += weight;
    }
    let strongest = causes(votes).map(|vote| vote.weight).fold(0.0, f64::max);
    let consequence = votes
        .iter()
        .filter(|vote| vote.role == Role::Secondary)
        .flat_map(|vote| vote.classes().filter(|(class, _)| *class == Class::Unknown))
        .map(|(_, weight)| weight)
        .fold(0.0, f64::max);
    odds[Class::Unknown.index()] += if strongest < CAUSE { consequence } else { DOUBT * consequence };
    if let Some(first) = earliest(votes) {
        odds[first.index()] += EARLIEST;
    }
    softmax(odds)
}

fn causes(votes: &[Vote]) -> impl Iterator<Item = &Vote> {
    votes.iter().filter(|vote| vote.role == Role::Primary)
}

/// The heaviest vote of each family for each class, with a little for what corroborates it. A consequence speaks
/// here only for the classes that it names beside "unknown"; that one is weighed once for all consequences.
fn by_family(votes: &[Vote]) -> BTreeMap<(&str, Class), f64> {
    let mut heaviest: BTreeMap<(&str, Class), (f64, u32)> = BTreeMap::new();
    for vote in votes {
        for (class, weight) in vote.classes() {
            if vote.role == Role::Secondary && class == Class::Unknown {
                continue;
            }
            let entry = heaviest.entry((vote.family.as_str(), class)).or_insert((0.0, 0));
            entry.0 = entry.0.max(weight);
            entry.1 += u32::from(vote.role == Role::Primary && weight >= 1.0);
        }
    }
    heaviest
        .into_iter()
        .map(|(key, (weight, count))| {
            (key, weight + CORROBORATION * f64::from(count.saturating_sub(1).min(2)))
        })
        .collect()
}

/// The class of the earliest cause of weight, when all causes stand in one source.
fn earliest(votes: &[Vote]) -> Option<Class> {
    causes(votes)
        .filter(|vote| vote.weight >= CAUSE)
        .filter_map(|vote| vote.spots.first().map(|(source, spot)| ((*source, spot.line), vote.class)))
        .min_by_key(|(place, _)| *place)
        .map(|(_, class)| class)
}

fn softmax(odds: [f64; 11]) -> Posterior {
    let highest = odds.into_iter().fold(f64::NEG_INFINITY, f64::max);
    let mut likelihood = odds.map(|of| ((of - highest) / TEMPERATURE).exp());
    let sum: f64 = likelihood.iter().sum();
    likelihood.iter_mut().for_each(|of| *of /= sum);
    Posterior(likelihood)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::catalog::Determinism;

    fn vote(family: &str, id: &str, class: Class, weight: f64, role: Role) -> Vote {
        Vote {
            family: family.into(),
            id: id.into(),
            meaning: String::new(),
            role,
            class,
            weight,
            also: Vec::new(),
            determinism: Determinism::Either,
            restart: None,
            domain: None,
            reporter: false,
            hint: false,
            spots: Vec::new(),
            count: 1,
        }
    }

    #[test]
    fn nothing_seen_is_unknown() {
        assert_eq!(fuse(&[]).best(), Class::Unknown);
    }

    #[test]
    fn one_family_counts_once_and_two_count_twice() {
        let one = vote("a", "1", Class::Fabric, 2.0, Role::Primary);
        let same = vote("a", "2", Class::Fabric, 2.0, Role::Primary);
        let other = vote("b", "3", Class::Fabric, 2.0, Role::Primary);
        let single = fuse(std::slice::from_ref(&one)).of(Class::Fabric);
        let together = fuse(&[one.clone(), same]).of(Class::Fabric);
        let independent = fuse(&[one, other]).of(Class::Fabric);
        assert!(single < together && together < independent);
    }

    #[test]
    fn a_lone_victim_is_unknown_and_a_cause_beside_it_decides() {
        let victim = vote("nccl", "v", Class::Unknown, 2.0, Role::Secondary);
        let cause = vote("xid", "c", Class::HardwareGpu, 5.0, Role::Primary);
        assert_eq!(fuse(std::slice::from_ref(&victim)).best(), Class::Unknown);
        assert_eq!(fuse(&[victim, cause]).best(), Class::HardwareGpu);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let posterior = fuse(&[vote("a", "1", Class::Data, 50.0, Role::Primary)]);
        assert!((posterior.0.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }
}
