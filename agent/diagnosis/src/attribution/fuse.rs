//! Turns votes into a probability for each class. Log-odds are added, one vote per family of evidence, so that ten lines of one fault
//! do not count as ten faults.

use std::collections::BTreeMap;

use super::catalog::Role;
use super::class::Class;
use super::vote::Vote;

/// Prior log-odds per class, in the order of [`Class::ALL`]: the share of each class among job failures that were reported. "Unknown"
/// is what remains without evidence.
const PRIOR_LOG_ODDS: [f64; 11] = [0.0, 0.1, -0.5, 0.0, -0.6, -0.3, -0.3, -0.2, -0.6, 0.0, 0.9];
/// The exposure of the job that [`PRIOR_LOG_ODDS`] describes, in rank-hours.
const USUAL_EXPOSURE_RANK_HOURS: f64 = 64.0 * 6.0;
/// Log-odds added to machine faults when the exposure grows by a factor of e.
const EXPOSURE_LOG_ODDS: f64 = 0.25;
/// Log-odds added to program faults if no step was completed. A completed step subtracts half of it.
const NO_STEP_LOG_ODDS: f64 = 0.8;
/// The limit of the job's influence on a class: evidence for a cause outweighs any job.
const MAX_CONTEXT_LOG_ODDS: f64 = 0.8;
/// Added for each of a second and a third signature of one family for one class.
const CORROBORATION_LOG_ODDS: f64 = 0.3;
/// Below this weight a cause is a hint, and consequences keep their full doubt.
const MIN_CAUSE_WEIGHT: f64 = 2.0;
/// The share of a consequence's weight that remains as doubt next to a cause of weight.
const DOUBT_SHARE: f64 = 0.15;
/// Bonus for the earliest cause: the others tend to follow from it.
const EARLIEST_LOG_ODDS: f64 = 0.4;
/// Log-odds are divided by this. Undivided, attributions with a confidence of at least 0.8 were right in 94 % of 393 unseen failures,
/// and those with 0.6 to 0.8 in 85 % (`agent/catalog/failures/README.md`); of 714 judged without memory of their source, in 96 and 90
/// %: too modest. With 0.8, confidence and share of right answers differ by 0.05 on average instead of 0.11. The named domain does not
/// change.
const TEMPERATURE: f64 = 0.8;

/// A probability for each class, in the order of [`Class::ALL`].
#[derive(Clone, Debug, PartialEq)]
pub struct Posterior(pub [f64; 11]);

impl Posterior {
    /// The probability of one class.
    pub fn probability(&self, class: Class) -> f64 {
        self.0[class.index()]
    }

    /// The likeliest class.
    pub fn best(&self) -> Class {
        Class::ALL.into_iter().fold(Class::Unknown, |best, class| {
            if self.probability(class) > self.probability(best) { class } else { best }
        })
    }

    /// Classes by probability, likeliest first.
    pub fn ranked(&self) -> Vec<(Class, f64)> {
        let mut all: Vec<(Class, f64)> =
            Class::ALL.into_iter().map(|class| (class, self.probability(class))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }
}

/// Facts about the job other than its failure.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct JobSoFar {
    /// The number of ranks.
    pub ranks: u32,
    /// How long the attempt ran, in hours.
    pub hours: f64,
    /// Whether it completed a step. `None` if unknown.
    pub stepped: Option<bool>,
}

/// Prior log-odds for a job. Machine faults grow with the number of machines and hours; programs fail early.
fn prior(job: Option<&JobSoFar>) -> [f64; 11] {
    let mut odds = PRIOR_LOG_ODDS;
    let Some(job) = job else { return odds };
    let exposure = f64::from(job.ranks.max(1)) * job.hours.max(1.0 / 60.0);
    let machines = EXPOSURE_LOG_ODDS * (exposure / USUAL_EXPOSURE_RANK_HOURS).ln();
    let early = match job.stepped {
        Some(true) => -0.5 * NO_STEP_LOG_ODDS,
        Some(false) => NO_STEP_LOG_ODDS,
        None => 0.0,
    };
    for (class, odds) in Class::ALL.into_iter().zip(&mut odds) {
        *odds += match class {
            Class::HardwareGpu | Class::HardwareHost | Class::Fabric | Class::Storage | Class::Preemption => {
                (machines - 0.5 * early).clamp(-MAX_CONTEXT_LOG_ODDS, MAX_CONTEXT_LOG_ODDS)
            }
            Class::UserCode | Class::UserConfig | Class::SoftwarePlatform => {
                early.clamp(-MAX_CONTEXT_LOG_ODDS, MAX_CONTEXT_LOG_ODDS)
            }
            // Without evidence, the job alone names no culprit.
            Class::Unknown => early.clamp(0.0, MAX_CONTEXT_LOG_ODDS),
            Class::Data | Class::HostResource => 0.0,
        };
    }
    odds
}

/// Adds the votes up.
pub fn fuse(votes: &[Vote], job: Option<&JobSoFar>) -> Posterior {
    let mut odds = prior(job);
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
    odds[Class::Unknown.index()] +=
        if strongest < MIN_CAUSE_WEIGHT { consequence } else { DOUBT_SHARE * consequence };
    if let Some(first) = earliest(votes) {
        odds[first.index()] += EARLIEST_LOG_ODDS;
    }
    softmax(odds)
}

fn causes(votes: &[Vote]) -> impl Iterator<Item = &Vote> {
    votes.iter().filter(|vote| vote.role == Role::Primary)
}

/// The heaviest vote of each family for each class, plus a bonus for corroboration. A consequence counts here only for the classes that
/// it names in addition to "unknown"; "unknown" is weighed once for all consequences.
fn by_family(votes: &[Vote]) -> BTreeMap<(&str, Class), f64> {
    let mut heaviest: BTreeMap<(&str, Class), (f64, u32)> = BTreeMap::new();
    for vote in votes {
        for (class, weight) in vote.classes() {
            if vote.role == Role::Secondary && class == Class::Unknown {
                continue;
            }
            let entry = heaviest.entry((vote.family.as_str(), class)).or_insert((f64::NEG_INFINITY, 0));
            entry.0 = entry.0.max(weight);
            entry.1 += u32::from(vote.role == Role::Primary && weight >= 1.0);
        }
    }
    heaviest
        .into_iter()
        .map(|(key, (weight, count))| {
            (key, weight + CORROBORATION_LOG_ODDS * f64::from(count.saturating_sub(1).min(2)))
        })
        .collect()
}

/// The class of the earliest cause of weight, ordered by source, then by line.
fn earliest(votes: &[Vote]) -> Option<Class> {
    causes(votes)
        .filter(|vote| vote.weight >= MIN_CAUSE_WEIGHT)
        .filter_map(|vote| vote.spots.first().map(|(source, spot)| ((*source, spot.line), vote.class)))
        .min_by_key(|(position, _)| *position)
        .map(|(_, class)| class)
}

fn softmax(odds: [f64; 11]) -> Posterior {
    let highest = odds.into_iter().fold(f64::NEG_INFINITY, f64::max);
    let mut likelihood = odds.map(|log_odds| ((log_odds - highest) / TEMPERATURE).exp());
    let sum: f64 = likelihood.iter().sum();
    likelihood.iter_mut().for_each(|probability| *probability /= sum);
    Posterior(likelihood)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(family: &str, id: &str, class: Class, weight: f64, role: Role) -> Vote {
        Vote { role, ..Vote::new(family, id, "", (class, weight)) }
    }

    #[test]
    fn nothing_seen_is_unknown() {
        assert_eq!(fuse(&[], None).best(), Class::Unknown);
    }

    #[test]
    fn one_family_counts_once_and_two_count_twice() {
        let one = vote("a", "1", Class::Fabric, 2.0, Role::Primary);
        let same = vote("a", "2", Class::Fabric, 2.0, Role::Primary);
        let other = vote("b", "3", Class::Fabric, 2.0, Role::Primary);
        let single = fuse(std::slice::from_ref(&one), None).probability(Class::Fabric);
        let together = fuse(&[one.clone(), same], None).probability(Class::Fabric);
        let independent = fuse(&[one, other], None).probability(Class::Fabric);
        assert!(single < together && together < independent);
    }

    #[test]
    fn a_lone_victim_is_unknown_and_an_additional_cause_decides() {
        let victim = vote("nccl", "v", Class::Unknown, 2.0, Role::Secondary);
        let cause = vote("xid", "c", Class::HardwareGpu, 5.0, Role::Primary);
        assert_eq!(fuse(std::slice::from_ref(&victim), None).best(), Class::Unknown);
        assert_eq!(fuse(&[victim, cause], None).best(), Class::HardwareGpu);
    }

    #[test]
    fn long_large_runs_point_to_machines_and_young_ones_to_programs() {
        let weak = |class| vote("a", "1", class, 1.5, Role::Primary);
        let votes = [weak(Class::UserCode), vote("b", "2", Class::HardwareHost, 1.5, Role::Primary)];
        let posterior_of =
            |ranks, hours, stepped| fuse(&votes, Some(&JobSoFar { ranks, hours, stepped: Some(stepped) }));
        let (young, old) = (posterior_of(8, 0.01, false), posterior_of(4096, 48.0, true));
        assert!(young.probability(Class::UserCode) > young.probability(Class::HardwareHost));
        assert!(old.probability(Class::HardwareHost) > old.probability(Class::UserCode));
        // Evidence for a cause outweighs any job.
        let lost = vote("xid", "79", Class::HardwareGpu, 5.5, Role::Primary);
        let first_second = JobSoFar { ranks: 1, hours: 0.0, stepped: Some(false) };
        assert_eq!(fuse(&[lost], Some(&first_second)).best(), Class::HardwareGpu);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let posterior = fuse(&[vote("a", "1", Class::Data, 50.0, Role::Primary)], None);
        assert!((posterior.0.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }
}
