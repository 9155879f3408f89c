//! Removes output of a failed rank that is no evidence of its end: exceptions that it caught or survived, and what the kernel's OOM
//! count contradicts.

use std::collections::BTreeSet;

use crate::attribution::catalog::Catalog;
use crate::attribution::class::Class;
use crate::attribution::scan::{Findings, RelevantLine};
use mainstay_model::time::{Mono, Span};
use mainstay_model::verdict::FaultDomain;

/// A program that still runs this long after an exception has survived it. An interpreter that exits takes less, even on a busy host.
const MIN_SURVIVAL: Span = Span::seconds(5);

/// A program that exits because of an exception does so soon after printing it. It survived what it printed long before.
pub(super) fn forget_what_it_survived(catalog: &Catalog, findings: &mut Findings, ended: Mono) {
    let survived =
        |spot: &RelevantLine| spot.line_time.is_some_and(|time| ended.since(time.at) > MIN_SURVIVAL);
    let is_latent =
        |index: usize| catalog.signatures().get(index).is_some_and(|signature| signature.latent.is_some());
    for sighting in &mut findings.sightings {
        let keeps = is_latent(sighting.signature);
        sighting.spots.retain(|spot| keeps || !survived(spot));
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    findings.exceptions.retain(|exception| !survived(&exception.spot));
}

/// A rank that ended by an exception caught those that it printed before. Program faults among them ended nothing; what a device or a
/// service reported may still be the cause.
pub(super) fn forget_what_it_caught(catalog: &Catalog, findings: &mut Findings) {
    let lines: BTreeSet<u64> = findings.exceptions.iter().map(|exception| exception.spot.line).collect();
    let of_user = |index: usize| {
        let signature = catalog.signatures().get(index);
        signature.is_some_and(|signature| {
            signature.class.domain() == FaultDomain::User && signature.latent.is_none()
        })
    };
    for sighting in &mut findings.sightings {
        if of_user(sighting.signature) {
            sighting.spots.retain(|spot| !lines.contains(&spot.line));
        }
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    let is_users = |class: Class| class.domain() == FaultDomain::User;
    findings
        .exceptions
        .retain(|exception| catalog.exception(&exception.name).is_some_and(|rule| !is_users(rule.class)));
}

/// In the output of a rank that was killed only reasons for the kill count: out of memory, preemption of the machine, a failing device.
pub(super) fn keep_what_is_latent(catalog: &Catalog, findings: &mut Findings) {
    let is_latent =
        |index: usize| catalog.signatures().get(index).is_some_and(|signature| signature.latent.is_some());
    findings.sightings.retain(|sighting| is_latent(sighting.signature));
    findings.exceptions.clear();
}

/// A process of the job, such as a DataLoader worker, that SIGKILL ended indicates that memory ran out, unless the kernel counted no OOM
/// kill. In that case another process sent the signal, and neither memory nor the program explains it. Returns whether there was such a
/// line: one with the phrase that a signature of the catalog has as `needs_oom_kill`.
pub(super) fn forget_unexplained_kills(catalog: &Catalog, all: &mut [Findings]) -> bool {
    let mut found = false;
    for findings in all {
        found |= forget_kills_in(catalog, findings);
    }
    found
}

fn forget_kills_in(catalog: &Catalog, findings: &mut Findings) -> bool {
    let mut unexplained = BTreeSet::new();
    for sighting in &mut findings.sightings {
        let signature = catalog.signatures().get(sighting.signature);
        let Some(phrase) = signature.and_then(|signature| signature.needs_oom_kill.as_deref()) else {
            continue;
        };
        let is_kill = |spot: &RelevantLine| spot.text.to_ascii_lowercase().contains(phrase);
        unexplained.extend(sighting.spots.iter().filter(|spot| is_kill(spot)).map(|spot| spot.line));
        sighting.spots.retain(|spot| !is_kill(spot));
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    findings.exceptions.retain(|exception| !unexplained.contains(&exception.spot.line));
    if unexplained.is_empty() {
        return false;
    }
    true
}
