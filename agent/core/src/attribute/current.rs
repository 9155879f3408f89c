//! What of the evidence can be the cause of this failure: not what came before healthy steps, nor what was only warned of.
//!
//! A signature may speak all the same: of what lies in wait (`latent`), and from a warning (`warning`). The catalogue says so
//! of each.

use std::borrow::Cow;

use super::Evidence;
use super::catalog::{Catalog, Signature};
use super::scan::{Findings, Kind, Spot};

/// The evidence without what cannot be the cause.
pub fn current<'e>(catalog: &Catalog, evidence: &'e Evidence) -> Cow<'e, Evidence> {
    let all_speak = evidence.findings.iter().all(|of| every_spot_speaks(catalog, of));
    if all_speak {
        return Cow::Borrowed(evidence);
    }
    let mut evidence = evidence.clone();
    for findings in &mut evidence.findings {
        keep_current(catalog, findings);
    }
    Cow::Owned(evidence)
}

fn every_spot_speaks(catalog: &Catalog, findings: &Findings) -> bool {
    let signature = |of: usize| catalog.signatures().get(of);
    findings.kind == Kind::Kernel
        || findings.sightings.iter().all(|of| of.spots.iter().all(|spot| speaks(signature(of.signature), spot)))
            && findings.exceptions.iter().all(|of| speaks(None, &of.spot))
}

fn keep_current(catalog: &Catalog, findings: &mut Findings) {
    // The kernel's lines come with a time of their own, and not with the ranks' progress.
    if findings.kind == Kind::Kernel {
        return;
    }
    for sighting in &mut findings.sightings {
        let signature = catalog.signatures().get(sighting.signature);
        sighting.spots.retain(|spot| speaks(signature, spot));
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    findings.exceptions.retain(|of| speaks(None, &of.spot));
}

/// Whether a line can be a cause of the failure, by what its signature says of warnings and of what lies in wait.
fn speaks(signature: Option<&Signature>, spot: &Spot) -> bool {
    let from_a_warning = signature.is_some_and(|of| of.warning);
    let lies_in_wait = signature.is_some_and(|of| of.latent.is_some());
    (!spot.mild || from_a_warning) && (!spot.is_past() || lies_in_wait)
}
