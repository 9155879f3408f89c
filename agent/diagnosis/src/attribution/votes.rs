//! Turns findings into votes: each piece of evidence supports some classes, with log-odds.

use std::collections::{BTreeMap, BTreeSet};

use super::catalog::{Catalog, Role};
use super::class::Class;
use super::exit::Status;
use super::raised;
use super::scan::{Findings, Kind};
use super::structure;
use super::vote::Vote;
use super::{Evidence, Observation};
use mainstay_model::verdict::FaultDomain;

/// Evidence of at least this weight replaces hints.
const MIN_WEIGHT_OVER_HINTS: f64 = 1.5;

/// Log-odds of a GPU on which several programs met XIDs, and of one on which processes of one program did.
const SEVERAL_PROGRAMS_LOG_ODDS: f64 = 3.2;
const SEVERAL_PROCESSES_LOG_ODDS: f64 = 2.2;

/// All votes, in the order of sources and lines.
pub fn votes(catalog: &Catalog, evidence: &Evidence) -> Vec<Vote> {
    let mut votes = Vec::new();
    for (source, findings) in evidence.findings.iter().enumerate() {
        of_signatures(catalog, source, findings, &mut votes);
        for exception in &findings.exceptions {
            if !raised::is_known(catalog, exception, findings) {
                add(&mut votes, raised::vote(catalog, (source, findings), exception));
            }
        }
    }
    votes.extend(of_exits(evidence));
    if let Some(repeated) = of_repeated_xids(catalog, evidence) {
        // One device that fails several programs outweighs what each of them could have done.
        if repeated.weight >= SEVERAL_PROGRAMS_LOG_ODDS {
            votes.iter_mut().filter(|vote| vote.family == "xid").for_each(demote_application);
        }
        votes.push(repeated);
    }
    votes.extend(structure::votes(catalog, evidence));
    structure::demote_stopped_ranks(catalog, evidence, &mut votes);
    structure::demote_followers(&mut votes);
    structure::fold_library_kernels(&mut votes);
    structure::fold_calls_of_libraries(&mut votes);
    structure::blame_settings(catalog, evidence, &mut votes);
    structure::lower_devices_beside_the_program(catalog, &mut votes);
    structure::name_client(evidence, &mut votes);
    votes.extend(evidence.observations.iter().map(|observation| {
        let Observation { family, text, class, weight, also } = observation;
        Vote { also: also.clone(), ..Vote::new(family, family, text, (*class, *weight)) }
    }));
    // Hints count only without better evidence: a cause, or a report that is surely a victim's.
    if votes
        .iter()
        .any(|vote| !vote.hint && vote.weight >= MIN_WEIGHT_OVER_HINTS && !raised::is_general(catalog, vote))
    {
        votes.retain(|vote| !vote.hint);
    }
    let hinted: BTreeSet<(usize, u64)> =
        votes.iter().filter(|vote| vote.hint).flat_map(Vote::lines).collect();
    // A type that says little counts less than what its message says.
    votes.retain(|vote| {
        !raised::is_general(catalog, vote) || !vote.lines().any(|source| hinted.contains(&source))
    });
    votes
}

fn of_signatures(catalog: &Catalog, source: usize, findings: &Findings, votes: &mut Vec<Vote>) {
    for sighting in &findings.sightings {
        let Some(signature) = catalog.signatures().get(sighting.signature) else { continue };
        if signature.role == Role::Benign {
            continue;
        }
        let vote = Vote {
            family: signature.family.clone(),
            id: signature.id.clone(),
            meaning: signature.meaning.clone(),
            role: signature.role,
            class: signature.class,
            weight: signature.weight,
            also: signature.also.iter().map(|(class, weight)| (*class, *weight)).collect(),
            determinism: signature.determinism,
            restart: signature.restart,
            domain: signature.domain,
            reporter: signature.reporter,
            signal: signature.signal,
            hint: signature.fallback,
            // Exit information and kernel lines are no lines of the log.
            spots: sighting.spots.iter().map(|spot| (source, spot.clone())).collect(),
            count: sighting.count,
        };
        add(votes, vote);
    }
}

/// Merges evidence with the same id and class from several sources.
fn add(votes: &mut Vec<Vote>, vote: Vote) {
    match votes.iter_mut().find(|earlier| earlier.id == vote.id && earlier.class == vote.class) {
        Some(same) => {
            same.spots.extend(vote.spots);
            same.count += vote.count;
            same.weight = same.weight.max(vote.weight);
        }
        None => votes.push(vote),
    }
}

/// What a program can do to its own context: it counts no more.
fn demote_application(vote: &mut Vote) {
    if vote.class.domain() != FaultDomain::Hardware {
        (vote.role, vote.class, vote.weight) = (Role::Secondary, Class::Unknown, 0.5);
        vote.also.clear();
    }
}

/// Faults that a program can cause itself point to the GPU when several programs have them on one device, less so when one program has
/// them in several processes.
fn of_repeated_xids(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    let mut met: BTreeMap<&str, (BTreeSet<&str>, BTreeSet<&str>)> = BTreeMap::new();
    let mut spots = Vec::new();
    for (source, findings) in evidence.findings.iter().enumerate() {
        for sighting in &findings.sightings {
            let is_xid = catalog
                .signatures()
                .get(sighting.signature)
                .is_some_and(|signature| signature.family == "xid");
            for spot in sighting.spots.iter().filter(|_| is_xid) {
                if let (Some(device), Some(pid)) =
                    (between(&spot.text, "(PCI:", ")"), between(&spot.text, "pid=", ","))
                {
                    let (pids, names) = met.entry(device).or_default();
                    pids.insert(pid);
                    names.extend(between(&spot.text, "name=", ",").filter(|name| !name.contains("unknown")));
                    spots.push((source, spot.clone()));
                }
            }
        }
    }
    let (device, (pids, names)) = met
        .into_iter()
        .filter(|(_, (pids, _))| pids.len() > 1)
        .max_by_key(|(_, (pids, names))| (names.len(), pids.len()))?;
    let (programs, weight) = if names.len() > 1 {
        (names.len(), SEVERAL_PROGRAMS_LOG_ODDS)
    } else {
        (pids.len(), SEVERAL_PROCESSES_LOG_ODDS)
    };
    let meaning = format!("{programs} programs met an XID on GPU {device}");
    Some(Vote { spots, ..Vote::new("history", "xid.repeated", meaning, (Class::HardwareGpu, weight)) })
}

fn between<'t>(text: &'t str, before: &str, after: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

fn of_exits(evidence: &Evidence) -> impl Iterator<Item = Vote> + '_ {
    evidence.exits.iter().filter_map(|exit| {
        let meaning = exit.status.meaning()?;
        let who = exit.rank.map_or_else(|| "a rank".to_owned(), |rank| format!("rank {rank}"));
        let mut classes = meaning.classes.iter().copied();
        let (class, weight) = classes.next().unwrap_or((Class::Unknown, 0.1));
        Some(Vote {
            signal: matches!(exit.status.normal(), Status::Signal(_)),
            role: if class == Class::Unknown { Role::Secondary } else { Role::Primary },
            also: classes.collect(),
            restart: meaning.restart,
            ..Vote::new("exit", "exit", format!("{who}: {}", meaning.text), (class, weight))
        })
    })
}

/// Whether a spot of this source is a log line that can be shown as the root.
pub fn is_log(evidence: &Evidence, source: usize) -> bool {
    evidence.findings.get(source).is_some_and(|findings| findings.kind == Kind::Log)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::attribute;
    use crate::attribution::scan::Scan;

    fn class_of(log: &str) -> Class {
        let catalog = Catalog::built_in().expect("the catalog is compiled in");
        let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
        attribute(catalog, &Evidence { findings, ..Evidence::default() }).class
    }

    #[test]
    fn a_signature_of_only_the_origin_does_not_explain_a_line() {
        let caught = |name: &str| format!("{name}: Caught {name} in DataLoader worker process 1.\n");
        assert_eq!(class_of(&caught("fsspec.exceptions.FSTimeoutError")), Class::Storage);
        assert_eq!(class_of(&caught("IndexError")), Class::UserCode);
    }
}
