//! Attribution: from logs, exits and kernel lines to an explained diagnosis of whose fault a failure was.
//!
//! Pure: takes text and returns an [`Attribution`]. `docs/reference/attribution.md` describes the method.
//!
//! In reading order: [`class`], `signature`, [`catalog`] (signatures as data), [`lines`], [`level`], `healthy`, [`progress`], [`traceback`],
//! [`scan`] (one pass over the text), [`exit`], `structure`, `raised`, `ranks`, [`vote`], [`fuse`], [`root`], [`explain`]. [`score`] evaluates it on labelled cases ([`case`]).

mod automaton;
pub mod case;
pub mod catalog;
pub mod class;
mod confidence;
mod current;
pub mod dumps;
pub mod exit;
pub mod explain;
#[cfg(test)]
mod files;
pub mod fuse;
mod healthy;
pub mod level;
pub mod lines;
pub mod progress;
mod raised;
mod ranks;
pub mod root;
pub mod scan;
pub mod score;
mod shared;
mod signature;
mod structure;
pub mod traceback;
pub mod vote;
pub mod votes;
mod xids;

use std::collections::{BTreeMap, BTreeSet};

use catalog::{Catalog, Determinism, Role};
use class::{Class, Restart};
use exit::Exit;
use fuse::{JobSoFar, Posterior};
use root::Root;
use scan::{Findings, RelevantLine};
use vote::Vote;

use mainstay_model::verdict::FaultDomain;

/// Below this probability no domain is named.
const MIN_PROBABILITY: f64 = 0.5;
/// Exception: a domain with at least this probability that leads the next one by this factor. On 611 failures, each judged without
/// memory of its source, these values make 1 % more right than 0.38 and 1.4, and 14 % abstentions instead of 16 %.
const MIN_LEADING_PROBABILITY: f64 = 0.34;
const MIN_LEAD_FACTOR: f64 = 1.1;

/// The log-odds of a signal for "unknown" when its sender is unknown.
const UNKNOWN_SIGNAL_LOG_ODDS: f64 = 0.6;
/// From this weight on, a possible cause is shown as the root of an unknown one.
const MIN_HINT_WEIGHT: f64 = 1.5;
/// Below this confidence the advice is never "do not restart".
const MIN_CONFIDENCE_TO_STOP: f64 = 0.6;
/// The same without deterministic evidence. On 809 failures, each judged without memory of its source, the advice is wrong in 11 cases.
/// With one limit for both it is wrong in 15, and 34 more would be right. Limits higher by 0.05 avoid no error and lose 15 right ones.
const MIN_CONFIDENCE_TO_STOP_WITHOUT_REASON: f64 = 0.7;

/// All evidence of a failure.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Findings in logs of ranks and launchers and in kernel lines.
    pub findings: Vec<Findings>,
    /// How ranks ended.
    pub exits: Vec<Exit>,
    /// Other observations: health of devices, verdicts of other judges, notices.
    pub observations: Vec<Observation>,
    /// Facts about the job, which determine the prior.
    pub job: Option<JobSoFar>,
    /// PyTorch's flight records, if any.
    pub dumps: dumps::Dumps,
    /// The ranks ran under the launcher, so how and when each of them ended is known.
    pub live: bool,
}

/// An observation outside the logs that supports a class.
#[derive(Clone, Debug)]
pub struct Observation {
    /// Evidence of one family counts once. May be a family of the catalog.
    pub family: String,
    /// What was observed, in words.
    pub text: String,
    /// The class it supports.
    pub class: Class,
    /// Its log-odds.
    pub weight: f64,
    /// Other classes it supports, with their log-odds.
    pub also: Vec<(Class, f64)>,
}

/// The result of attribution.
#[derive(Clone, Debug)]
pub struct Attribution {
    /// What went wrong.
    pub class: Class,
    /// Whose fault it is. Unknown is an abstention.
    pub domain: FaultDomain,
    /// The confidence in the domain, from 0 to 1. For an abstention, the confidence that the cause cannot be determined.
    pub confidence: f64,
    /// What to do now.
    pub restart: Restart,
    /// Whether the failure repeats in the same place.
    pub determinism: Determinism,
    /// Where it started and which ranks followed.
    pub root: Root,
    /// All classes with their probabilities.
    pub posterior: Posterior,
    /// The evidence for the class, heaviest first.
    pub evidence: Vec<Vote>,
    /// The evidence for other classes, heaviest first.
    pub against: Vec<Vote>,
    /// The consequences of the failure.
    pub consequences: Vec<Vote>,
    /// Lines that would be a cause and are none, by source and line: the exception was caught, or healthy steps came after it.
    pub set_aside: BTreeMap<(usize, u64), RelevantLine>,
}

impl Attribution {
    /// Whether Mainstay's own client failed.
    pub fn is_of_client(&self) -> bool {
        self.evidence.iter().any(|vote| vote.id == structure::CLIENT_FAILED)
    }
}

/// Attributes a failure.
pub fn attribute(catalog: &Catalog, evidence: &Evidence) -> Attribution {
    let set_aside = current::set_aside(catalog, evidence);
    let evidence = &*current::current(catalog, evidence);
    let mut votes = votes::votes(catalog, evidence);
    let mut posterior = fuse::fuse(&votes, evidence.job.as_ref());
    let likeliest = Class::ALL.into_iter().filter(|class| *class != Class::Unknown);
    let likeliest = likeliest.max_by(|a, b| posterior.probability(*a).total_cmp(&posterior.probability(*b)));
    if likeliest.is_some_and(|class| names_only_a_signal(&votes, class)) {
        drop_votes_about_the_sender(&mut votes);
        posterior = fuse::fuse(&votes, evidence.job.as_ref());
    }
    let domains = domains(&votes);
    let class = committed(&posterior, &domains);
    let (mut for_it, mut against, mut consequences) = (Vec::new(), Vec::new(), Vec::new());
    for vote in votes {
        let speaks = vote.classes().any(|(other, weight)| other == class && weight > 0.0);
        match vote.role {
            Role::Primary if speaks => for_it.push(vote),
            Role::Primary => against.push(vote),
            Role::Secondary | Role::Benign => consequences.push(vote),
        }
    }
    let weight =
        |vote: &Vote| vote.classes().filter(|(other, _)| *other == class).map(|(_, w)| w).fold(0.0, f64::max);
    for_it.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(starts(a).cmp(&starts(b))));
    against.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    consequences.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    // With nothing but consequences, these decide.
    let decisive = for_it.first().or_else(|| consequences.iter().find(|vote| vote.class == class));
    let determinism = decisive.map_or(Determinism::Either, |vote| vote.determinism);
    let domain = domains[class.index()];
    let agreed = for_it.iter().chain(&against).chain(&consequences).find(|vote| vote.family == "exit");
    let sure =
        confidence::calibrated(domain_probability(&posterior, &domains, domain), class, &for_it, evidence);
    let of_the_cause = decisive.filter(|vote| vote.class == class).and_then(|vote| vote.restart);
    // One crash may be transient. Crashes on several ranks are not.
    let together = of_the_cause == Some(Restart::RestartSameNodes) && ranks::crashed_together(for_it.iter());
    let usual = of_the_cause.filter(|_| !together).unwrap_or_else(|| advice(class, determinism));
    // A job that is stopped by mistake costs more than a useless restart, which policies bound.
    let reasoned = together || comes_again(&for_it, class);
    let unsure = usual == Restart::DoNotRestart && (!may_stop(sure, reasoned) || only_hints(&for_it));
    let usual = if unsure { Restart::RestartSameNodes } else { usual };
    let restart = agreed.and_then(|vote| vote.restart).unwrap_or(usual);
    let pointers = root::Pointers {
        laggard: structure::laggard(catalog, evidence),
        named: ranks::named_by_others(catalog, evidence),
        held_up_by: evidence.dumps.culprit(),
        waiting: evidence.dumps.waiting(),
        cause_known: class != Class::Unknown,
        hints: if class == Class::Unknown { hints(for_it.iter().chain(&against)) } else { Vec::new() },
    };
    Attribution {
        class,
        domain,
        confidence: confidence::afterwards(sure, class, &for_it, evidence),
        restart,
        determinism,
        root: root::root(evidence, &for_it, &consequences, pointers),
        posterior,
        evidence: for_it,
        against,
        consequences,
        set_aside,
    }
}

/// Whether only the signal that ended a process, and hints, support the class: a signal does not reveal its sender. Crashes in native
/// code on several ranks are stronger evidence.
fn names_only_a_signal(votes: &[Vote], class: Class) -> bool {
    let for_it = || {
        votes.iter().filter(|vote| {
            vote.role == Role::Primary && vote.classes().any(|(other, w)| other == class && w > 0.0)
        })
    };
    let only = |vote: &Vote| vote.signal || vote.hint;
    votes.iter().any(|vote| vote.signal) && for_it().all(only) && !ranks::crashed_together(for_it())
}

/// Keeps signals as consequences and removes the causes that they support.
fn drop_votes_about_the_sender(votes: &mut Vec<Vote>) {
    for vote in votes.iter_mut().filter(|vote| vote.signal) {
        (vote.role, vote.class, vote.weight) = (Role::Secondary, Class::Unknown, UNKNOWN_SIGNAL_LOG_ODDS);
        vote.also.clear();
    }
    // Hints do not explain a signal either.
    votes.retain(|vote| !vote.hint);
}

/// Whether any evidence for the class is deterministic.
fn comes_again(evidence: &[Vote], class: Class) -> bool {
    evidence.iter().any(|vote| vote.class == class && vote.determinism == Determinism::Deterministic)
}

/// Whether only hints support the class: they show the kind of a failure, not that it repeats.
fn only_hints(evidence: &[Vote]) -> bool {
    evidence.iter().all(|vote| vote.hint)
}

/// Whether a job may be stopped with this confidence. `reasoned`: with deterministic evidence.
fn may_stop(confidence: f64, reasoned: bool) -> bool {
    confidence >= if reasoned { MIN_CONFIDENCE_TO_STOP } else { MIN_CONFIDENCE_TO_STOP_WITHOUT_REASON }
}

fn starts(vote: &Vote) -> (usize, u64) {
    vote.spots.first().map_or((usize::MAX, u64::MAX), |(source, spot)| (*source, spot.line))
}

/// The fault domain of each class here: that of its heaviest cause, else the default. A full disk belongs to storage, and also to the
/// run that filled it.
fn domains(votes: &[Vote]) -> [FaultDomain; Class::ALL.len()] {
    Class::ALL.map(|class| {
        let causes = votes.iter().filter(|vote| vote.role == Role::Primary && vote.class == class);
        let heaviest = causes.max_by(|a, b| a.weight.total_cmp(&b.weight));
        heaviest.and_then(|vote| vote.domain).unwrap_or(class.domain())
    })
}

/// The likeliest class of the likeliest domain. `Unknown` if no domain is likely enough.
fn committed(posterior: &Posterior, domains: &[FaultDomain; Class::ALL.len()]) -> Class {
    let probability = |domain| domain_probability(posterior, domains, domain);
    let likeliest = posterior.best();
    // A domain of many classes must not win by their number.
    let alone = posterior.probability(likeliest) > MIN_PROBABILITY;
    let best = FaultDomain::ALL.into_iter().max_by(|a, b| probability(*a).total_cmp(&probability(*b)));
    let domain = if alone { domains[likeliest.index()] } else { best.unwrap_or(FaultDomain::Unknown) };
    // Replacing a host because of a program's bug costs more than an abstention.
    let may_lead = domain != FaultDomain::Hardware && leads(posterior, domains, domain);
    if probability(domain) < MIN_PROBABILITY && !may_lead {
        return Class::Unknown;
    }
    let mut classes = posterior.ranked().into_iter().map(|(class, _)| class);
    classes.find(|class| domains[class.index()] == domain).unwrap_or(Class::Unknown)
}

/// Whether a domain leads all others by far and contains the likeliest class.
fn leads(posterior: &Posterior, domains: &[FaultDomain; Class::ALL.len()], domain: FaultDomain) -> bool {
    let probability = |domain| domain_probability(posterior, domains, domain);
    let others =
        FaultDomain::ALL.into_iter().filter(|other| *other != domain).map(probability).fold(0.0, f64::max);
    probability(domain) >= MIN_LEADING_PROBABILITY
        && probability(domain) > MIN_LEAD_FACTOR * others
        && domains[posterior.best().index()] == domain
}

/// The summed probability of a domain's classes.
fn domain_probability(
    posterior: &Posterior,
    domains: &[FaultDomain; Class::ALL.len()],
    domain: FaultDomain,
) -> f64 {
    let its = Class::ALL.into_iter().filter(|class| domains[class.index()] == domain);
    its.map(|class| posterior.probability(class)).sum()
}

/// The default advice for a class and its determinism.
fn advice(class: Class, determinism: Determinism) -> Restart {
    match (class, determinism) {
        (Class::UserCode | Class::UserConfig | Class::Data | Class::HostResource, Determinism::Transient) => {
            Restart::RestartSameNodes
        }
        (Class::UserCode | Class::UserConfig | Class::Data | Class::HostResource, _) => Restart::DoNotRestart,
        (Class::HardwareGpu | Class::HardwareHost, _) => Restart::RestartExcludeNode,
        (Class::Fabric | Class::Storage | Class::SoftwarePlatform, Determinism::Deterministic) => {
            Restart::DoNotRestart
        }
        (Class::Fabric, Determinism::Transient) => Restart::RestartSameNodes,
        (Class::Fabric, Determinism::Either) => Restart::RestartExcludeNode,
        (Class::Storage, Determinism::Transient | Determinism::Either) => Restart::RestartAfterWait,
        (Class::SoftwarePlatform, Determinism::Transient) => Restart::RestartSameNodes,
        (Class::SoftwarePlatform, Determinism::Either) => Restart::DoNotRestart,
        (Class::Preemption, _) => Restart::RestartAfterWait,
        (Class::Unknown, _) => Restart::RestartSameNodes,
    }
}

/// Possible causes of a failure with unknown cause, heaviest first.
fn hints<'v>(votes: impl Iterator<Item = &'v Vote>) -> Vec<Vote> {
    let most = |vote: &Vote| vote.classes().map(|(_, weight)| weight).fold(0.0, f64::max);
    let mut hints: Vec<Vote> = votes
        .filter(|vote| !vote.hint && !vote.spots.is_empty() && most(vote) >= MIN_HINT_WEIGHT)
        .cloned()
        .collect();
    hints.sort_by(|a, b| most(b).total_cmp(&most(a)).then(starts(a).cmp(&starts(b))));
    hints
}

/// All ranks mentioned in any line.
fn ranks_named(evidence: &Evidence) -> BTreeSet<u32> {
    evidence
        .findings
        .iter()
        .flat_map(|findings| findings.sightings.iter().flat_map(|s| s.ranks.iter().copied()))
        .collect()
}

/// Attributes a single log. For the tests of the modules.
#[cfg(test)]
fn judged(log: &str) -> Attribution {
    let catalog = Catalog::built_in().expect("the catalog is compiled in");
    let findings = vec![scan::Scan::of_text(catalog, "log", None, scan::Kind::Log, log.as_bytes())];
    attribute(catalog, &Evidence { findings, ..Evidence::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_could_not_be_written_is_the_users_only_if_a_line_shows_that_the_disk_is_full() {
        let failed =
            |message| format!("RuntimeError: [enforce fail at inline_container.cc:603] . {message}\n");
        let unnamed = failed("PytorchStreamWriter failed writing file data/4: file write failed");
        let unsure = judged(&unnamed);
        assert_eq!((unsure.class, unsure.domain), (Class::Storage, FaultDomain::Infrastructure));
        assert_eq!(unsure.restart, Restart::RestartAfterWait);
        assert!(unsure.confidence < 0.8, "{}", unsure.confidence);
        let status = format!("OSError: [Errno 28] No space left on device\n{unnamed}");
        for full in [status, failed("unexpected pos 64 vs 10")] {
            let judged = judged(&full);
            assert_eq!((judged.class, judged.domain), (Class::Storage, FaultDomain::User), "{full}");
        }
    }

    #[test]
    fn at_low_confidence_only_deterministic_evidence_stops_a_job() {
        assert!(may_stop(0.65, true) && may_stop(0.75, false));
        assert!(!may_stop(0.65, false) && !may_stop(0.55, true));
        let reasoned = |log: &str| {
            let judged = judged(log);
            assert_eq!(judged.domain, FaultDomain::User, "{log}");
            comes_again(&judged.evidence, judged.class)
        };
        assert!(reasoned("ValueError: frobnication of 7 by 3\n"));
        assert!(!reasoned("RuntimeError: frobnication of 7 by 3\n"));
    }
}
