//! Steps of a recorded trace that were repeated after a restart, if only their times show it.

use std::collections::BTreeMap;

use super::score::median;
use super::times::Times;

/// A gap within a step that is longer than this many typical steps is not a pause.
const TYPICAL_STEPS: f64 = 2.0;

/// This many other steps of the rank must be within the gap.
const BETWEEN: usize = 2;

/// A trace by attempt and step, then by rank.
type Steps = BTreeMap<(u64, u64), BTreeMap<u32, Times>>;

/// If a rank did a step twice, with others in between, keeps the last one. Returns how many there were.
pub(super) fn keep_the_last(steps: &mut Steps) -> usize {
    let mut extents: Vec<f32> = steps.values().flat_map(BTreeMap::values).filter_map(extent).collect();
    let long = f64::from(median(&mut extents)) * TYPICAL_STEPS;
    if !long.is_finite() || long <= 0.0 {
        return 0;
    }
    let mut starts: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for (rank, times) in steps.values().flatten() {
        starts.entry(*rank).or_default().extend(first(times));
    }
    starts.values_mut().for_each(|starts| starts.sort_unstable_by(f64::total_cmp));
    let mut again = 0;
    for (rank, times) in steps.values_mut().flatten() {
        let Some(starts) = starts.get(rank) else { continue };
        let Some(from) = last_begin(times, long, starts) else { continue };
        for spans in [&mut times.work, &mut times.wait, &mut times.pause] {
            spans.retain(|(begin, _)| *begin >= from);
        }
        again += 1;
    }
    again
}

/// Where the step started for the last time. `None` if it was done once.
fn last_begin(times: &Times, long: f64, starts: &[f64]) -> Option<f64> {
    let mut spans: Vec<(f64, f64)> = spans(times).collect();
    spans.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut until, mut last) = (f64::INFINITY, None);
    for (begin, end) in spans {
        if begin - until > long {
            let within = starts.partition_point(|at| *at < begin) - starts.partition_point(|at| *at <= until);
            if within >= BETWEEN {
                last = Some(begin);
            }
        }
        until = if until.is_finite() { until.max(end) } else { end };
    }
    last
}

fn spans(times: &Times) -> impl Iterator<Item = (f64, f64)> + '_ {
    times.work.iter().chain(&times.wait).chain(&times.pause).copied()
}

fn first(times: &Times) -> Option<f64> {
    spans(times).map(|(begin, _)| begin).min_by(f64::total_cmp)
}

fn extent(times: &Times) -> Option<f32> {
    let last = spans(times).map(|(_, end)| end).max_by(f64::total_cmp)?;
    Some((last - first(times)?) as f32)
}
