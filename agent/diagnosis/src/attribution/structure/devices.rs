//! Faults that the kernel log reports about devices, beside an error of the program that no device can cause.

use crate::attribution::catalog::{Catalog, Role};
use crate::attribution::class::Class;
use crate::attribution::lines;
use crate::attribution::scan::RelevantLine;
use crate::attribution::traceback;
use crate::attribution::vote::Vote;
use mainstay_model::verdict::FaultDomain;

/// The most that such a report adds for the device: it may fail next time.
const MAX_LOG_ODDS_BESIDE_A_FAULT: f64 = 0.3;

/// Errors of Python that depend only on the program, and the memory that a model needs.
const OF_PROGRAMS: [&str; 9] = [
    "NameError",
    "UnboundLocalError",
    "SyntaxError",
    "IndentationError",
    "KeyError",
    "AttributeError",
    "TypeError",
    "ModuleNotFoundError",
    "OutOfMemoryError",
];
/// Evidence of less weight may be of a minor event.
const MIN_SERIOUS_WEIGHT: f64 = 2.0;

/// Lowers what the kernel log says about devices where the program ended with an error that no device can cause, and nothing shows that
/// the program met a fault of a device.
pub fn lower_devices_beside_the_program(catalog: &Catalog, votes: &mut [Vote]) {
    let raised = |(_, spot): &(usize, RelevantLine)| {
        traceback::raised(&spot.text[lines::prefix(&spot.text).len..]).is_some_and(|raised| {
            !raised.embedded && OF_PROGRAMS.contains(&raised.name.rsplit('.').next().unwrap_or(raised.name))
        })
    };
    let is_programs = |vote: &Vote| {
        vote.role == Role::Primary
            && vote.weight >= MIN_SERIOUS_WEIGHT
            && vote.class.domain() == FaultDomain::User
            && vote.spots.iter().any(raised)
    };
    if !votes.iter().any(is_programs) {
        return;
    }
    let of_device =
        |vote: &Vote| vote.classes().any(|(class, weight)| class == Class::HardwareGpu && weight > 0.0);
    let is_of_driver = |(_, spot): &(usize, RelevantLine)| {
        spot.text.get(lines::prefix(&spot.text).len..).is_some_and(|text| text.starts_with("NVRM:"))
    };
    let of_kernel = |vote: &Vote| !vote.spots.is_empty() && vote.spots.iter().all(is_of_driver);
    let met = |vote: &Vote| of_device(vote) && !of_kernel(vote) && catalog.named(&vote.id).is_some();
    if votes.iter().any(met) {
        return;
    }
    for vote in votes.iter_mut().filter(|vote| of_kernel(vote)) {
        vote.weight = vote.weight.min(MAX_LOG_ODDS_BESIDE_A_FAULT);
        vote.also.clear();
    }
}
