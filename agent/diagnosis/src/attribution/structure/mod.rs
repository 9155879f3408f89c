//! Evidence from several lines together: ranks that wait in different collectives, ranks that never entered one, the order of deaths in
//! the launcher's table, the library whose frames show a GPU fault.

mod client;
mod collectives;
mod devices;
mod followers;
mod frames;
mod http_frames;
mod settings;

use super::Evidence;
use super::catalog::Catalog;
use super::class::Class;
use super::scan::{Exception, Findings, RelevantLine, SignatureMatch};
use super::traceback::Frame;
use super::vote::Vote;

pub use client::{CLIENT_FAILED, name_client};
pub use collectives::laggard;
pub use devices::lower_devices_beside_the_program;
pub use followers::{demote_followers, demote_stopped_ranks};
pub use frames::{fold_calls_of_libraries, fold_library_kernels};
pub use settings::blame_settings;

/// Votes based on several lines.
pub fn votes(catalog: &Catalog, evidence: &Evidence) -> Vec<Vote> {
    collectives::disagreement(catalog, evidence)
        .into_iter()
        .chain(collectives::busy_elsewhere(catalog, evidence))
        .chain(frames::library_kernel(catalog, evidence))
        .chain(frames::in_engine(catalog, evidence))
        .chain(frames::between_libraries(evidence))
        .chain(frames::in_compiler(evidence))
        .chain(frames::own_state(evidence))
        .chain(frames::not_implemented(evidence))
        .chain(frames::in_launcher(evidence))
        .chain(http_frames::gave_up(evidence))
        .collect()
}

pub(super) fn number_after(text: &str, names: &[&str]) -> Option<u64> {
    let rest = names.iter().find_map(|name| text.split_once(name))?.1;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[..digits].parse().ok()
}

fn is(catalog: &Catalog, sighting: &SignatureMatch, id: &str) -> bool {
    catalog.signatures().get(sighting.signature).is_some_and(|signature| signature.id == id)
}

pub(super) fn spots_of<'e>(
    catalog: &'e Catalog,
    evidence: &'e Evidence,
    id: &'static str,
) -> impl Iterator<Item = (usize, &'e RelevantLine)> {
    let sources = evidence.findings.iter().enumerate();
    sources
        .flat_map(move |(source, findings)| spots_in(catalog, findings, id).map(move |spot| (source, spot)))
}

fn spots_in<'e>(
    catalog: &'e Catalog,
    findings: &'e Findings,
    id: &'static str,
) -> impl Iterator<Item = &'e RelevantLine> {
    findings
        .sightings
        .iter()
        .filter(move |sighting| is(catalog, sighting, id))
        .flat_map(|sighting| sighting.spots.iter())
}

fn vote(
    id: &str,
    meaning: String,
    votes: (Class, f64),
    spots: Vec<(usize, RelevantLine)>,
    family: &str,
) -> Vote {
    Vote { spots, ..Vote::new(family, id, meaning, votes) }
}

/// The exceptions whose innermost frame is known, with their source, in the order of sources and lines.
fn framed(evidence: &Evidence) -> impl Iterator<Item = (usize, &Exception, &Frame)> {
    evidence.findings.iter().enumerate().flat_map(|(source, findings)| {
        let exceptions = findings.exceptions.iter();
        exceptions.filter_map(move |exception| Some((source, exception, exception.frame.as_ref()?)))
    })
}
