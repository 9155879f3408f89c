//! Evidence from exceptions that no signature matches: their type, parts of its name, and the frame that raised them.

use super::catalog::{Catalog, Determinism, Role};
use super::class::Class;
use super::scan::{Exception, Findings, RelevantLine, SignatureMatch};
use super::vote::Vote;
use mainstay_model::verdict::FaultDomain;

/// The classes for an exception type without a rule.
const UNKNOWN_EXCEPTION: [(Class, f64); 3] =
    [(Class::UserCode, 1.6), (Class::UserConfig, 1.3), (Class::SoftwarePlatform, 0.8)];
/// The classes for the most general exception when native code below Python created its message.
const NATIVE_EXCEPTION: [(Class, f64); 4] = [
    (Class::SoftwarePlatform, 2.2),
    (Class::UserCode, 1.3),
    (Class::UserConfig, 0.6),
    (Class::HardwareGpu, 0.6),
];
/// The factor for an exception inside another message.
const EMBEDDED_FACTOR: f64 = 0.6;
/// Added to the user's code if the training program's own frames raised the exception.
const OWN_FRAMES_LOG_ODDS: f64 = 0.6;

/// Added if the program's own frames raised it and it is known to have ended its rank.
const ENDED_ITS_RANK_LOG_ODDS: f64 = 0.8;

/// From this weight on even an exception of a general type is conclusive: the program's own frames raised it.
const MIN_CONCLUSIVE_WEIGHT: f64 = 2.0;

/// Whether the vote comes from an exception whose type is unknown or too general; then its message is better evidence.
pub fn is_general(catalog: &Catalog, vote: &Vote) -> bool {
    let Some(name) = vote.id.strip_prefix("exception.") else { return false };
    vote.weight < MIN_CONCLUSIVE_WEIGHT && catalog.exception(name).is_none_or(|rule| rule.general)
}

/// Whether a signature explains the exception's line, or that line joined with the next.
pub fn is_known(catalog: &Catalog, exception: &Exception, findings: &Findings) -> bool {
    let line = exception.spot.line;
    let at_line = |spot: &RelevantLine| spot.line == line;
    let explains = |sighting: &&SignatureMatch| catalog.explains(sighting.signature);
    exception.known
        || findings.sightings.iter().filter(explains).any(|sighting| sighting.spots.iter().any(at_line))
}

/// The classes that an exception supports by its type and by the frame that raised it.
pub fn vote(catalog: &Catalog, (source, findings): (usize, &Findings), exception: &Exception) -> Vote {
    let rule = catalog.exception(&exception.name);
    let (role, mut classes) = match rule {
        Some(rule) => {
            let also = rule.also.iter().map(|(class, weight)| (*class, *weight));
            (rule.role, std::iter::once((rule.class, rule.weight)).chain(also).collect())
        }
        None => (Role::Primary, UNKNOWN_EXCEPTION.to_vec()),
    };
    let own = exception.frame.as_ref().is_some_and(|frame| !frame.in_library());
    let any_message = rule.is_some_and(|rule| rule.names.iter().any(|name| name == "RuntimeError"));
    if any_message && !own && is_raised_by_native_code(&exception.spot.text) {
        classes = NATIVE_EXCEPTION.to_vec();
    }
    for (class, weight) in &mut classes {
        *weight += if own && *class == Class::UserCode { OWN_FRAMES_LOG_ODDS } else { 0.0 };
        *weight += if own && findings.ended && class.domain() == FaultDomain::User {
            ENDED_ITS_RANK_LOG_ODDS
        } else {
            0.0
        };
        *weight *= if exception.embedded { EMBEDDED_FACTOR } else { 1.0 };
    }
    classes.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (class, weight) = classes.first().copied().unwrap_or((Class::Unknown, 0.0));
    let also = classes.split_off(1.min(classes.len()));
    let raised_by = match &exception.frame {
        Some(frame) if own => format!(", raised by {} of the training program", frame.path),
        Some(frame) => format!(", raised inside {}", frame.path),
        None => String::new(),
    };
    let id = format!("exception.{}", exception.name);
    let meaning = format!("a {}{raised_by}", exception.name);
    Vote {
        role,
        also,
        determinism: rule.map_or(Determinism::Either, |rule| rule.determinism),
        spots: vec![(source, exception.spot.clone())],
        ..Vote::new("python", &id, meaning, (class, weight))
    }
}

/// Whether native code created the message: it contains a C++ source location, or a status that only libraries use.
fn is_raised_by_native_code(text: &str) -> bool {
    const SOURCES: [&str; 6] = [".cpp:", ".cc:", ".cu:", ".cxx:", ".hpp:", ".cuh:"];
    const STATUS: [&str; 6] =
        ["synStatus", "error code is", "failed with error: ", "FATAL ERROR", "backend failed", "MODULE:"];
    SOURCES.iter().chain(&STATUS).any(|mark| text.contains(mark))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::judged;

    fn class_of(log: &str) -> Class {
        judged(log).class
    }

    #[test]
    fn a_general_exception_from_native_code_points_to_the_platform() {
        let native = "RuntimeError: frobnicate(h, n) in lib/frob/core.cpp:281 returned 26\n";
        assert_eq!(class_of(native), Class::SoftwarePlatform);
        let own = format!("  File \"/home/a/train.py\", line 3, in step\n    frob(h)\n{native}");
        assert_eq!(class_of(&own), Class::UserCode, "the program raised it itself");
        assert_eq!(class_of("ValueError: 26 of core.cpp:281 is too many\n").domain(), FaultDomain::User);
    }

    #[test]
    fn an_unknown_exception_type_is_classified_by_a_part_of_its_name() {
        assert_eq!(class_of("acme.errors.SpotEvictedError: gone\n"), Class::Preemption);
        assert_eq!(class_of("acme.BlobUploadError: part 7 of 9\n"), Class::Storage);
        assert_eq!(class_of("acme.CorruptShardError: part 7 of 9\n"), Class::Data);
        assert_eq!(class_of("acme.FrobError: 7\n").domain(), FaultDomain::User);
    }

    #[test]
    fn a_general_exception_type_is_classified_by_its_message() {
        let words = "RuntimeError: GPU 4 is degraded, unhealthy\n";
        assert_eq!(class_of(words), Class::HardwareGpu);
        let own = format!("  File \"/home/a/train.py\", line 3, in step\n    step()\n{words}");
        assert_eq!(class_of(&own), Class::UserCode, "the program raised it itself");
    }
}
