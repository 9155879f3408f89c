//! How many steps were completed after each line that matters.

use super::super::lines;
use super::findings::{Findings, Kind, Progress};
use crate::entry::LineTime;

/// Says of each line that matters how many steps were done after it.
pub(super) fn place_in_progress(findings: &mut Findings, times: &[LineTime]) {
    let Findings { progress, sightings, exceptions, words, .. } = findings;
    let spots = sightings.iter_mut().flat_map(|of| &mut of.spots);
    let spots = spots
        .chain(exceptions.iter_mut().map(|of| &mut of.spot))
        .chain(words.iter_mut().map(|(spot, _)| spot));
    spots.for_each(|spot| spot.steps_after = steps_after(progress, times, spot.line));
}

/// Steps that were surely begun and completed after a line: as the launcher saw it, else by the lines of the same source
/// that report steps.
pub(super) fn steps_after(progress: &[Progress], times: &[LineTime], line: u64) -> Option<u64> {
    let at = usize::try_from(line).unwrap_or(usize::MAX).saturating_sub(1);
    if let Some(steps) = times.get(at).and_then(|time| time.steps_after) {
        return Some(steps);
    }
    let last = progress.last()?;
    let after = &progress[progress.partition_point(|of| of.line <= line)..];
    let by_number = match (after.first().and_then(|first| first.step), last.step) {
        (Some(first), Some(last)) => last.saturating_sub(first),
        _ => 0,
    };
    Some((after.len() as u64).max(by_number))
}

/// Relates sources to each other by time of day: a source that reports no steps itself was healthy when another was.
pub fn relate(findings: &mut [Findings]) {
    let mut steps: Vec<f64> =
        findings.iter().flat_map(|of| of.progress.iter().filter_map(|of| of.time)).collect();
    if steps.is_empty() || !lines::spans_less_than_half_a_day(&steps) {
        return;
    }
    steps.sort_by(f64::total_cmp);
    let after = |time: f64| (steps.len() - steps.partition_point(|of| *of <= time)) as u64;
    let silent = findings.iter_mut().filter(|of| of.kind == Kind::Log && of.progress.is_empty());
    for of in silent {
        let spots = of.sightings.iter_mut().flat_map(|of| &mut of.spots);
        for spot in spots.chain(of.exceptions.iter_mut().map(|of| &mut of.spot)) {
            spot.steps_after = spot.steps_after.or_else(|| spot.time.map(after));
        }
    }
}
