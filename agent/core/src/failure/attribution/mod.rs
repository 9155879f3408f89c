//! Whose fault was it: from logs, exits and the kernel's lines to a judgement that explains itself.
//!
//! Pure: text comes in, an [`Attribution`] comes out. `docs/reference/attribution.md` tells how the judgement is made.
//!
//! In reading order: [`class`], `signature`, [`catalog`] (signatures as data), [`lines`], [`level`], [`progress`], [`traceback`], [`scan`] (one pass
//! over the text), [`exit`], `structure`, `raised`, `ranks`, `words` (learned by the build script, `learn`, from `lessons`), [`vote`], [`fuse`], [`root`], [`explain`]; [`score`] holds it against
//! labelled cases ([`case`]).

mod automaton;
pub mod case;
pub mod catalog;
pub mod class;
#[cfg_attr(not(test), allow(dead_code, reason = "the build script uses the rest"))]
mod common;
mod confidence;
mod current;
pub mod dumps;
pub mod exit;
pub mod explain;
mod fit;
pub mod fuse;
#[cfg(test)]
mod learn;
#[cfg(test)]
mod lessons;
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
#[cfg_attr(not(test), allow(dead_code, reason = "the build script uses the rest"))]
mod wording;
mod words;

use std::collections::BTreeSet;

use catalog::{Catalog, Determinism, Role};
use class::{Class, Restart};
use exit::Exit;
use fuse::{JobSoFar, Posterior};
use root::Root;
use scan::Findings;
use vote::Vote;

use crate::model::verdict::FaultDomain;

/// Below this probability no domain is named.
const COMMIT: f64 = 0.5;
/// Unless it has at least this and is so many times as likely as the next. Of 611 failures, each judged without memory of its
/// source, one in a hundred more is right with these than with 0.38 and 1.4, and 14 % are abstained on instead of 16 %.
const LEADS_FROM: f64 = 0.34;
const LEADS_BY: f64 = 1.1;

/// What a signal says for "unknown" of which nobody knows who sent it.
const SIGNAL: f64 = 0.6;
/// From this weight on what may be a cause is shown as the root of an unknown one.
const HINT: f64 = 1.5;
/// Below this confidence "do not restart" is not said.
const SURE_TO_STOP: f64 = 0.6;
/// The same where nothing that was seen comes again by its nature. Of 809 failures, each judged without memory of its source, it is said
/// in error in 11 so; with one limit for both in 15, and 34 advices more would be right. Limits higher by 0.05 spare no error and cost 15 advices.
const SURE_WITHOUT_REASON: f64 = 0.7;

/// All that is known of a failure.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// What was found in logs of ranks and launchers and in the kernel's lines.
    pub findings: Vec<Findings>,
    /// How ranks ended.
    pub exits: Vec<Exit>,
    /// What else was observed: health of devices, verdicts of other judges, notices.
    pub observations: Vec<Observation>,
    /// What is known of the job; it moves what is held likely before anything is seen.
    pub job: Option<JobSoFar>,
    /// PyTorch's flight records, where there are any.
    pub dumps: dumps::Dumps,
    /// The ranks ran under the launcher: how and when each of them ended is known.
    pub live: bool,
}

/// Something observed beside the logs that speaks for a class.
#[derive(Clone, Debug)]
pub struct Observation {
    /// Evidence of one family counts once; families of the catalogue may be named.
    pub family: String,
    /// What was observed, in words.
    pub text: String,
    /// What it speaks for.
    pub class: Class,
    /// With which log-odds.
    pub weight: f64,
    /// Other classes that it speaks for as well, with theirs.
    pub also: Vec<(Class, f64)>,
}

/// The judgement.
#[derive(Clone, Debug)]
pub struct Attribution {
    /// What went wrong.
    pub class: Class,
    /// Whose fault it is; unknown is an abstention.
    pub domain: FaultDomain,
    /// How sure of the domain, from 0 to 1; of an abstention, how sure that nothing can be told.
    pub confidence: f64,
    /// What to do now.
    pub restart: Restart,
    /// Whether it comes again in the same place.
    pub determinism: Determinism,
    /// Where it began and who followed.
    pub root: Root,
    /// All classes with their probabilities.
    pub posterior: Posterior,
    /// The evidence for the class, heaviest first.
    pub evidence: Vec<Vote>,
    /// The evidence for other classes, heaviest first.
    pub against: Vec<Vote>,
    /// What only followed.
    pub consequences: Vec<Vote>,
}

/// Judges.
pub fn attribute(catalog: &Catalog, evidence: &Evidence) -> Attribution {
    let evidence = &*current::current(catalog, evidence);
    let mut votes = votes::votes(catalog, evidence);
    let mut posterior = fuse::fuse(&votes, evidence.job.as_ref());
    let likeliest = Class::ALL.into_iter().filter(|class| *class != Class::Unknown);
    let likeliest = likeliest.max_by(|a, b| posterior.of(*a).total_cmp(&posterior.of(*b)));
    if likeliest.is_some_and(|class| names_only_a_signal(&votes, class)) {
        say_nothing_of_the_sender(&mut votes);
        posterior = fuse::fuse(&votes, evidence.job.as_ref());
    }
    let domains = domains(&votes);
    let class = committed(&posterior, &domains);
    let (mut for_it, mut against, mut consequences) = (Vec::new(), Vec::new(), Vec::new());
    for vote in votes {
        // Words alone name no line, and where nothing is known no cause.
        let says_more = class != Class::Unknown || !vote.spots.is_empty();
        let speaks = vote.classes().any(|(of, weight)| of == class && weight > 0.0) && says_more;
        match vote.role {
            Role::Primary if speaks => for_it.push(vote),
            Role::Primary => against.push(vote),
            Role::Secondary | Role::Benign => consequences.push(vote),
        }
    }
    let weight =
        |vote: &Vote| vote.classes().filter(|(of, _)| *of == class).map(|(_, w)| w).fold(0.0, f64::max);
    for_it.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(starts(a).cmp(&starts(b))));
    against.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    consequences.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    // With nothing but consequences, they are what the judgement rests on.
    let decisive = for_it.first().or_else(|| consequences.iter().find(|vote| vote.class == class));
    let determinism = decisive.map_or(Determinism::Either, |vote| vote.determinism);
    let domain = domains[class.index()];
    let agreed = for_it.iter().chain(&against).chain(&consequences).find(|vote| vote.family == "exit");
    let confidence =
        confidence::of(domain_probability(&posterior, &domains, domain), class, &for_it, evidence);
    let reported = decisive.filter(|vote| vote.class == class).and_then(|vote| vote.restart);
    // One crash may pass; what crashes on several ranks comes again.
    let together = reported == Some(Restart::RestartSameNodes) && ranks::crashed_together(for_it.iter());
    let usual = reported.filter(|_| !together).unwrap_or_else(|| advice(class, determinism));
    // A job that is stopped in error costs more than one restart in vain, which policies bound.
    let reasoned = together || comes_again(&for_it, class);
    let unsure =
        usual == Restart::DoNotRestart && (!may_stop(confidence, reasoned) || only_by_words(&for_it));
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
        confidence,
        restart,
        determinism,
        root: root::root(evidence, &for_it, &consequences, pointers),
        posterior,
        evidence: for_it,
        against,
        consequences,
    }
}

/// Whether nothing but the signal that ended a process, and words, speaks for the class: a signal does not say who sent it.
/// Several ranks that crash in native code are more than that.
fn names_only_a_signal(votes: &[Vote], class: Class) -> bool {
    let for_it = || {
        votes
            .iter()
            .filter(|vote| vote.role == Role::Primary && vote.classes().any(|(of, w)| of == class && w > 0.0))
    };
    let only = |vote: &Vote| vote.signal || vote.hint || vote.is_of_words();
    votes.iter().any(|vote| vote.signal) && for_it().all(only) && !ranks::crashed_together(for_it())
}

/// Leaves of signals that they ended something, and takes what they are said to speak for.
fn say_nothing_of_the_sender(votes: &mut Vec<Vote>) {
    for vote in votes.iter_mut().filter(|vote| vote.signal) {
        (vote.role, vote.class, vote.weight) = (Role::Secondary, Class::Unknown, SIGNAL);
        vote.also.clear();
    }
    // What words resemble is no reason for a signal either.
    votes.retain(|vote| !vote.hint && !vote.is_of_words());
}

/// Whether any of the evidence for the class is of what comes again by its nature.
fn comes_again(evidence: &[Vote], class: Class) -> bool {
    evidence.iter().any(|vote| vote.class == class && vote.determinism == Determinism::Deterministic)
}

/// Whether nothing but words and hints speaks for the class: they say of what kind a failure is, not that it comes again.
fn only_by_words(evidence: &[Vote]) -> bool {
    evidence.iter().all(|vote| vote.hint || vote.is_of_words())
}

/// Whether a job may be stopped with such a confidence, where what was seen comes again by its nature or not.
fn may_stop(confidence: f64, reasoned: bool) -> bool {
    confidence >= if reasoned { SURE_TO_STOP } else { SURE_WITHOUT_REASON }
}

fn starts(vote: &Vote) -> (usize, u64) {
    vote.spots.first().map_or((usize::MAX, u64::MAX), |(source, spot)| (*source, spot.line))
}

/// Whose fault each class is here: what its heaviest cause says, else what it is in general. A full disk is a matter of
/// storage, and of the run that filled it.
fn domains(votes: &[Vote]) -> [FaultDomain; Class::ALL.len()] {
    Class::ALL.map(|class| {
        let causes = votes.iter().filter(|vote| vote.role == Role::Primary && vote.class == class);
        let heaviest = causes.max_by(|a, b| a.weight.total_cmp(&b.weight));
        heaviest.and_then(|vote| vote.domain).unwrap_or(class.domain())
    })
}

/// The likeliest class of the likeliest domain; unknown when no domain is likely enough.
fn committed(posterior: &Posterior, domains: &[FaultDomain; Class::ALL.len()]) -> Class {
    let of = |domain| domain_probability(posterior, domains, domain);
    let likeliest = posterior.best();
    // A domain of many classes must not win by their number alone.
    let alone = posterior.of(likeliest) > COMMIT;
    let best = FaultDomain::ALL.into_iter().max_by(|a, b| of(*a).total_cmp(&of(*b)));
    let domain = if alone { domains[likeliest.index()] } else { best.unwrap_or(FaultDomain::Unknown) };
    // To exchange a host for a program's bug costs more than to abstain.
    let may_lead = domain != FaultDomain::Hardware && leads(posterior, domains, domain);
    if of(domain) < COMMIT && !may_lead {
        return Class::Unknown;
    }
    let mut classes = posterior.ranked().into_iter().map(|(class, _)| class);
    classes.find(|class| domains[class.index()] == domain).unwrap_or(Class::Unknown)
}

/// Whether a domain is likelier than all others by far, and its likeliest class the likeliest of all.
fn leads(posterior: &Posterior, domains: &[FaultDomain; Class::ALL.len()], domain: FaultDomain) -> bool {
    let of = |domain| domain_probability(posterior, domains, domain);
    let others = FaultDomain::ALL.into_iter().filter(|other| *other != domain).map(of).fold(0.0, f64::max);
    of(domain) >= LEADS_FROM && of(domain) > LEADS_BY * others && domains[posterior.best().index()] == domain
}

/// The probability of all classes of a domain together.
fn domain_probability(
    posterior: &Posterior,
    domains: &[FaultDomain; Class::ALL.len()],
    domain: FaultDomain,
) -> f64 {
    let its = Class::ALL.into_iter().filter(|class| domains[class.index()] == domain);
    its.map(|class| posterior.of(class)).sum()
}

/// What a class and its determinism say about a restart, when the evidence itself says nothing.
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

/// What may be the cause of a failure of which none is known, heaviest first.
fn hints<'v>(votes: impl Iterator<Item = &'v Vote>) -> Vec<Vote> {
    let most = |vote: &Vote| vote.classes().map(|(_, weight)| weight).fold(0.0, f64::max);
    let mut hints: Vec<Vote> =
        votes.filter(|vote| !vote.hint && !vote.spots.is_empty() && most(vote) >= HINT).cloned().collect();
    hints.sort_by(|a, b| most(b).total_cmp(&most(a)).then(starts(a).cmp(&starts(b))));
    hints
}

/// All ranks that any line names.
fn ranks_named(evidence: &Evidence) -> BTreeSet<u32> {
    evidence
        .findings
        .iter()
        .flat_map(|findings| findings.sightings.iter().flat_map(|s| s.ranks.iter().copied()))
        .collect()
}

/// What is judged of one log: for the tests of the parts.
#[cfg(test)]
fn judged(log: &str) -> Attribution {
    let catalog = Catalog::built_in().expect("the catalogue is compiled in");
    let findings = vec![scan::Scan::of_text(catalog, "log", None, scan::Kind::Log, log.as_bytes())];
    attribute(catalog, &Evidence { findings, ..Evidence::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_comes_again_stops_a_job_of_which_little_is_known() {
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
