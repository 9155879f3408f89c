//! How many steps completed after each relevant line.

use super::super::lines;
use super::findings::{Findings, Kind, Progress};
use mainstay_model::entry::LineTime;

/// Sets for each relevant line how many steps completed after it.
pub(super) fn place_in_progress(findings: &mut Findings, times: &[LineTime]) {
    let Findings { progress, sightings, exceptions, .. } = findings;
    let spots = sightings.iter_mut().flat_map(|sighting| &mut sighting.spots);
    let spots = spots.chain(exceptions.iter_mut().map(|exception| &mut exception.spot));
    spots.for_each(|spot| {
        spot.line_time = time_of_line(times, spot.line);
        spot.steps_after = steps_after(progress, times, spot.line);
        spot.stepped = match spot.line_time.and_then(|time| time.steps_after) {
            Some(steps) => steps > 0,
            None => {
                let rank = lines::prefix(&spot.text).rank;
                let after = &progress[progress.partition_point(|step| step.line <= spot.line)..];
                after.iter().any(|step| step.rank == rank)
            }
        };
    });
}

/// Steps that certainly started and completed after a line: as the launcher saw it, else by the lines of the same source that report
/// steps.
pub(super) fn steps_after(progress: &[Progress], times: &[LineTime], line: u64) -> Option<u64> {
    if let Some(steps) = time_of_line(times, line).and_then(|time| time.steps_after) {
        return Some(steps);
    }
    let last = progress.last()?;
    let after = &progress[progress.partition_point(|step| step.line <= line)..];
    let by_number = match (after.first().and_then(|first| first.step), last.step) {
        (Some(first), Some(last)) => last.saturating_sub(first),
        _ => 0,
    };
    Some((after.len() as u64).max(by_number))
}

/// Relates sources to each other by time of day: a source without its own step reports was healthy while another reported steps.
pub fn relate(findings: &mut [Findings]) {
    let mut steps: Vec<f64> =
        findings.iter().flat_map(|source| source.progress.iter().filter_map(|step| step.time)).collect();
    if steps.is_empty() || !lines::spans_less_than_half_a_day(&steps) {
        return;
    }
    steps.sort_by(f64::total_cmp);
    let after = |time: f64| (steps.len() - steps.partition_point(|step| *step <= time)) as u64;
    let silent = findings.iter_mut().filter(|source| source.kind == Kind::Log && source.progress.is_empty());
    for source in silent {
        let spots = source.sightings.iter_mut().flat_map(|sighting| &mut sighting.spots);
        for spot in spots.chain(source.exceptions.iter_mut().map(|exception| &mut exception.spot)) {
            spot.steps_after = spot.steps_after.or_else(|| spot.time.map(after));
        }
    }
}

/// When the launcher saw a line, by its number from 1.
fn time_of_line(times: &[LineTime], line: u64) -> Option<LineTime> {
    let at = usize::try_from(line).ok()?.checked_sub(1)?;
    times.get(at).copied()
}

#[cfg(test)]
mod tests {
    use super::super::super::catalog::Catalog;
    use super::super::Scan;
    use super::*;

    const ERROR: &str = "ValueError: the batch has no samples\n";

    /// Steps after the error line, with this many steps reported before and after it.
    fn steps_after_error(before: u64, after: u64) -> Option<u64> {
        let step =
            |step: u64| format!("iteration {step:8}/ 900000 | lm loss: 2.{step:06} | grad norm: 1.0 |\n");
        let mut text: String = (0..before).map(step).collect();
        text.push_str(ERROR);
        text.extend((before..before + after).map(step));
        let catalog = Catalog::built_in().expect("the catalog");
        let findings = Scan::of_text(catalog, "log", None, Kind::Log, text.as_bytes());
        findings.exceptions[0].spot.steps_after
    }

    #[test]
    fn the_last_steps_of_a_long_log_are_counted_though_most_lines_are_skipped() {
        assert_eq!(steps_after_error(20_000, 0), Some(0));
        assert_eq!(steps_after_error(20_000, 1), Some(1));
        assert!(steps_after_error(20_000, 3).is_some_and(|steps| steps >= 2));
        assert!(steps_after_error(300, 20_000).is_some_and(|steps| steps > 19_000));
    }

    #[test]
    fn the_last_steps_are_kept_when_a_log_has_more_than_fit() {
        let step = |step: u64| format!("iteration {step:8}/ 900000 | lm loss: 2.0 |\n");
        let catalog = Catalog::built_in().expect("the catalog");
        let mut scan = Scan::new(catalog, "log", None, Kind::Log);
        // Each piece is a block, of which the last lines are recorded.
        for piece in 0..4_000 {
            scan.feed((0..40).map(|at| step(piece * 40 + at)).collect::<String>().as_bytes());
        }
        let findings = scan.finish();
        assert_eq!(findings.progress.last().and_then(|last| last.step), Some(159_999));
        assert!(findings.progress.is_sorted_by(|one, next| one.line < next.line));
    }
}
