//! Requests to ranks about saving: "save now", before they end, and that a save is due.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use mainstay_heartbeat::{SaveRequest, write_save_due};
use mainstay_model::entry::{ExitStatus, Fact};
use mainstay_model::id::Rank;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Mono, Span};
use mainstay_recovery::job::{ORDERS, SAVE_ORDERED};

use crate::ranks::process::RankProcess;
use crate::ranks::stop::Grace;
use crate::run::Launcher;
use mainstay_sensors::source::pages::PageReader;
use mainstay_sys::clock;

/// Upper limit for the time between this launcher's look at the steps and the ranks' look at the request.
const MEANWHILE: Span = Span::millis(200);

impl Launcher {
    /// A signal asks for a save: ranks that check for requests save and end by themselves. It stops none.
    pub(crate) fn save_requested_by(&mut self, signal: i32) {
        if self.stopping.save_by.is_some() {
            return;
        }
        self.stopping.save_by = Some((signal, None));
        self.pass_on_save_request();
        if self.stopping.save_by == Some((signal, None)) {
            let by = ExitStatus::Signal(signal);
            self.output.terminal.print(format!(
                "{by}: no rank checks for save requests (mainstay.save_requested()); it is asked to save when it does"
            ));
        }
    }

    /// Passes on a signal's request, once for each attempt, as soon as a rank checks for requests.
    pub(crate) fn pass_on_save_request(&mut self) {
        let attempt = self.ranks.attempt;
        let Some((signal, _)) = self.stopping.save_by.filter(|(_, passed_on)| *passed_on != Some(attempt))
        else {
            return;
        };
        if self.stopping.stop.is_some() || !is_listened_for(&self.ranks.processes, &self.ranks.pages) {
            return;
        }
        self.stopping.save_by = Some((signal, Some(attempt)));
        if self.stopping.asked_to_save.is_some_and(|(asked, _)| asked == attempt) {
            // Another host got the same signal.
            return;
        }
        let by = ExitStatus::Signal(signal).to_string();
        self.fact(Fact::Observed(Observation {
            component: ORDERS.to_owned(),
            event: SAVE_ORDERED.to_owned(),
            weight: Weight::Info,
            detail: format!("{by}: the ranks are asked to save and to end"),
            values: BTreeMap::from([("by".to_owned(), by), ("exit".to_owned(), (128 + signal).to_string())]),
        }));
    }

    /// Carries out an order to save. A repeated one changes nothing.
    pub(crate) fn ask_to_save(&mut self) {
        if self.stopping.asked_to_save.is_some_and(|(attempt, _)| attempt == self.ranks.attempt) {
            return;
        }
        let by = self.stopping.save_by.map_or_else(
            || "another host got a request to save".to_owned(),
            |(signal, _)| ExitStatus::Signal(signal).to_string(),
        );
        let at = self.request_save().map_or(String::new(), |step| format!(" after step {step}"));
        self.output.terminal.print(format!("{by}: the ranks are asked to save{at} and to end"));
    }

    /// Asks all living ranks to save after the same step, which is returned: the one that was named first in this
    /// attempt, as a rank may have saved it already; else the leader's, else one that none of them has completed.
    pub(crate) fn request_save(&mut self) -> Option<u64> {
        let named = self.stopping.asked_to_save.filter(|(attempt, _)| *attempt == self.ranks.attempt);
        let leaders = self.stopping.save_after.take();
        let at_step = match named {
            Some((_, step)) => step,
            None => leaders.or_else(|| after_step(&self.ranks.processes, &self.ranks.pages)),
        };
        self.stopping.asked_to_save = Some((self.ranks.attempt, at_step));
        let now = clock::mono();
        ask(&self.ranks.processes, at_step, now, now.after(Grace::to_save(self.grace().requested)));
        if let Some(signal) = self.settings.save_signal {
            self.ranks.processes.iter().for_each(|rank| self::signal(rank, signal));
        }
        at_step
    }
}

/// Whether any living rank checks for requests.
pub(crate) fn is_listened_for(ranks: &[RankProcess], pages: &BTreeMap<Rank, PageReader>) -> bool {
    let mut living = ranks.iter().filter(|rank| rank.exit.is_none());
    living.any(|rank| pages.get(&rank.rank).is_some_and(PageReader::listens_for_saves))
}

/// Asks all living ranks to save by `by`, after this step.
fn ask(ranks: &[RankProcess], at_step: Option<u64>, now: Mono, by: Mono) {
    let request = SaveRequest { at_step, by_ns: by.0 };
    for rank in ranks.iter().filter(|rank| rank.exit.is_none()) {
        let Some((path, file)) = &rank.page else { continue };
        if let Err(error) = request.write(|at, bytes| file.write_all_at(bytes, at)) {
            tracing::warn!(path = %path.display(), %error, "cannot ask a rank to save");
        }
    }
    let at = at_step.map_or(String::new(), |step| format!(" after step {step}"));
    tracing::info!(within = %by.since(now), "the ranks are asked to save{at}");
}

/// Reports to all living ranks that a save is due, after the same step. Ranks that check for it save; nothing waits for them.
pub(crate) fn request_save_after(ranks: &[RankProcess], step: u64) {
    for rank in ranks.iter().filter(|rank| rank.exit.is_none()) {
        let Some((path, file)) = &rank.page else { continue };
        if let Err(error) = write_save_due(step, |at, bytes| file.write_all_at(bytes, at)) {
            tracing::warn!(path = %path.display(), %error, "cannot notify a rank that a save is due");
        }
    }
    tracing::debug!(step, "a save is due");
}

/// The first step that no living rank completes before it checks; none if no rank has completed any.
pub(crate) fn after_step(ranks: &[RankProcess], pages: &BTreeMap<Rank, PageReader>) -> Option<u64> {
    let living = ranks.iter().filter(|rank| rank.exit.is_none());
    let beats = living.filter_map(|rank| pages.get(&rank.rank)?.beat());
    beats.filter_map(|beat| Some(beat.step?.saturating_add(ahead(beat.median_step)))).max()
}

/// How many steps ahead the ranks save: the fewest that none of them has completed before it checks.
fn ahead(median: Option<Span>) -> u64 {
    // Without a median there was at most one step, of unknown length.
    median.map_or(2, |step| MEANWHILE.0.div_ceil(step.0.max(1)).max(1))
}

/// Sends a signal to a rank.
pub(crate) fn signal(rank: &RankProcess, signal: i32) {
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
