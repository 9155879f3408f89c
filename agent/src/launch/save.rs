//! Requests to ranks about saving: "save now", before they end, and that a save is due.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use mainstay_core::base::id::Rank;
use mainstay_core::base::time::{Mono, Span};
use mainstay_heartbeat::{SaveRequest, write_save_due};

use crate::act::rank_processes::RankProcess;
use crate::source::pages::PageReader;

/// Upper limit for the time between this launcher's look at the steps and the ranks' look at the request.
const MEANWHILE: Span = Span::millis(200);

/// Asks all living ranks to save by `by`, after the same step: the given one, or one that none of them has completed.
/// Returns whether any of them checks for requests.
pub(super) fn ask(
    ranks: &[RankProcess],
    pages: &BTreeMap<Rank, PageReader>,
    after: Option<u64>,
    now: Mono,
    by: Mono,
) -> bool {
    let living = || ranks.iter().filter(|rank| rank.exit.is_none());
    if !living().any(|rank| pages.get(&rank.rank).is_some_and(PageReader::listens_for_saves)) {
        return false;
    }
    let at_step = after.or_else(|| after_step(ranks, pages));
    let request = SaveRequest { at_step, by_ns: by.0 };
    for rank in living() {
        let Some((path, file)) = &rank.page else { continue };
        if let Err(error) = request.write(|at, bytes| file.write_all_at(bytes, at)) {
            tracing::warn!(path = %path.display(), %error, "cannot ask a rank to save");
        }
    }
    let at = at_step.map_or(String::new(), |step| format!(" after step {step}"));
    tracing::info!(within = %by.since(now), "the ranks are asked to save{at}");
    true
}

/// Reports to all living ranks that a save is due, after the same step. Ranks that check for it save; nothing waits for them.
pub(super) fn request_save_if_due(ranks: &[RankProcess], pages: &BTreeMap<Rank, PageReader>) {
    if let Some(step) = after_step(ranks, pages) {
        request_save_after(ranks, step);
    }
}

/// The same with a step that was chosen for the ranks of all hosts.
pub(super) fn request_save_after(ranks: &[RankProcess], step: u64) {
    for rank in ranks.iter().filter(|rank| rank.exit.is_none()) {
        let Some((path, file)) = &rank.page else { continue };
        if let Err(error) = write_save_due(step, |at, bytes| file.write_all_at(bytes, at)) {
            tracing::warn!(path = %path.display(), %error, "cannot notify a rank that a save is due");
        }
    }
    tracing::debug!(step, "a save is due");
}

/// The first step that no living rank completes before it checks; none if no rank has completed any.
pub(super) fn after_step(ranks: &[RankProcess], pages: &BTreeMap<Rank, PageReader>) -> Option<u64> {
    let living = ranks.iter().filter(|rank| rank.exit.is_none());
    let beats = living.filter_map(|rank| pages.get(&rank.rank)?.beat());
    beats.filter_map(|beat| Some(beat.step?.saturating_add(ahead(beat.median_step)))).max()
}

/// How many steps ahead the ranks save: the fewest that none of them has completed before it checks.
fn ahead(median: Option<Span>) -> u64 {
    // Without a median there was at most one step, of unknown length.
    median.map_or(2, |step| MEANWHILE.0.div_ceil(step.0.max(1)).max(1))
}

/// Sends the signal that the user named for saving.
pub(super) fn signal(rank: &RankProcess, signal: i32) {
    if rank.exit.is_none()
        && let Err(error) = rank.pidfd.signal(signal)
    {
        tracing::error!(rank = rank.rank.0, signal, %error, "could not signal a rank");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_steps_are_named_further_ahead_than_slow_ones() {
        assert_eq!(ahead(None), 2);
        assert_eq!(ahead(Some(Span::seconds(30))), 1);
        assert_eq!(ahead(Some(Span::millis(10))), 20);
        assert_eq!(ahead(Some(Span(0))), MEANWHILE.0);
    }
}
