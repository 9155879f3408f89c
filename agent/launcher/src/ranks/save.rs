//! Requests to ranks about saving: "save now", before they end, and that a save is due.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use mainstay_heartbeat::{SaveRequest, write_save_due};
use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::Span;
use mainstay_recovery::job::{ORDERS, SAVE_ORDERED};
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::clock;

use super::stop::Grace;
use super::{Ranks, Reports};

/// Upper limit for the time between this launcher's look at the steps and the ranks' look at the request.
const MEANWHILE: Span = Span::millis(200);

/// A signal asks for a save: ranks that check for requests save and end by themselves. It stops none.
pub(crate) fn requested_by(ranks: &mut Ranks, signal: i32, to: &mut Reports<'_>) {
    if ranks.stopping.save_by.is_some() {
        return;
    }
    ranks.stopping.save_by = Some((signal, None));
    pass_on(ranks, to);
    if ranks.stopping.save_by == Some((signal, None)) {
        let by = ExitStatus::Signal(signal);
        to.output.terminal.print(format!(
            "{by}: no rank checks for save requests (mainstay.save_requested()); it is asked to save when it does"
        ));
    }
}

/// Passes on a signal's request, once for each attempt, as soon as a rank checks for requests.
pub(crate) fn pass_on(ranks: &mut Ranks, to: &mut Reports<'_>) {
    let attempt = ranks.attempt;
    let Some((signal, passed_on)) = ranks.stopping.save_by else { return };
    if passed_on == Some(attempt) || ranks.stopping.stop.is_some() || !is_listened_for(ranks) {
        return;
    }
    ranks.stopping.save_by = Some((signal, Some(attempt)));
    if ranks.stopping.asked_to_save.is_some_and(|(asked, _)| asked == attempt) {
        // Another host got the same signal.
        return;
    }
    let by = ExitStatus::Signal(signal).to_string();
    to.group.fact(Fact::Observed(Observation {
        component: ORDERS.to_owned(),
        event: SAVE_ORDERED.to_owned(),
        weight: Weight::Info,
        detail: format!("{by}: the ranks are asked to save and to end"),
        values: BTreeMap::from([("by".to_owned(), by), ("exit".to_owned(), (128 + signal).to_string())]),
    }));
}

/// Carries out an order to save. A repeated one changes nothing. Returns the line about it.
pub(crate) fn ordered(ranks: &mut Ranks) -> Option<String> {
    if ranks.stopping.asked_to_save.is_some_and(|(attempt, _)| attempt == ranks.attempt) {
        return None;
    }
    let by = ranks.stopping.save_by.map_or_else(
        || "another host got a request to save".to_owned(),
        |(signal, _)| ExitStatus::Signal(signal).to_string(),
    );
    let at = request(ranks).map_or(String::new(), |step| format!(" after step {step}"));
    Some(format!("{by}: the ranks are asked to save{at} and to end"))
}

/// Asks all living ranks to save after the same step, which is returned: the one that was named first in this attempt, as
/// a rank may have saved it already; else the leader's, else one that none of them has completed.
pub(super) fn request(ranks: &mut Ranks) -> Option<u64> {
    let named = ranks.stopping.asked_to_save.filter(|(attempt, _)| *attempt == ranks.attempt);
    let leaders = ranks.stopping.save_after.take();
    let at_step = match named {
        Some((_, step)) => step,
        None => leaders.or_else(|| after_step(ranks)),
    };
    ranks.stopping.asked_to_save = Some((ranks.attempt, at_step));
    let within = Grace::to_save(ranks.stopping.grace().requested);
    let request = SaveRequest { at_step, by_ns: clock::mono().after(within).0 };
    for rank in ranks.living() {
        let Some((path, file)) = &rank.page else { continue };
        if let Err(error) = request.write(|at, bytes| file.write_all_at(bytes, at)) {
            tracing::warn!(path = %path.display(), %error, "cannot ask a rank to save");
        }
    }
    let at = at_step.map_or(String::new(), |step| format!(" after step {step}"));
    tracing::info!(%within, "the ranks are asked to save{at}");
    if let Some(signal) = ranks.stopping.save_signal {
        ranks.living().for_each(|rank| rank.signal(signal));
    }
    at_step
}

/// Whether any living rank checks for requests.
pub(super) fn is_listened_for(ranks: &Ranks) -> bool {
    ranks.living().any(|rank| ranks.pages.get(rank.rank).is_some_and(PageReader::listens_for_saves))
}

/// Reports to all living ranks that a save is due, after the same step. Ranks that check for it save; nothing waits for them.
pub(crate) fn is_due(ranks: &Ranks, step: u64) {
    for rank in ranks.living() {
        let Some((path, file)) = &rank.page else { continue };
        if let Err(error) = write_save_due(step, |at, bytes| file.write_all_at(bytes, at)) {
            tracing::warn!(path = %path.display(), %error, "cannot notify a rank that a save is due");
        }
    }
    tracing::debug!(step, "a save is due");
}

/// The first step that no living rank completes before it checks; none if no rank has completed any.
pub(crate) fn after_step(ranks: &Ranks) -> Option<u64> {
    let beats = ranks.living().filter_map(|rank| ranks.pages.get(rank.rank)?.beat());
    beats.filter_map(|beat| Some(beat.step?.saturating_add(ahead(beat.median_step)))).max()
}

/// How many steps ahead the ranks save: the fewest that none of them has completed before it checks.
fn ahead(median: Option<Span>) -> u64 {
    // Without a median there was at most one step, of unknown length.
    median.map_or(2, |step| MEANWHILE.0.div_ceil(step.0.max(1)).max(1))
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
