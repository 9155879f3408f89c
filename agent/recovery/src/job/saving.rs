//! When the job last saved, the advice on how often to save, and whether a save is due.

use mainstay_checkpoint::advice::{self, Advised};
use mainstay_model::entry::{Fact, StepDone};
use mainstay_model::time::Mono;

/// A job's saves, as far as the advice needs them.
#[derive(Clone, Debug, Default)]
pub(super) struct Saving {
    /// The newest advice.
    advised: Option<Advised>,
    /// The advice that was last recorded in the journal.
    reported: Option<Advised>,
    /// The last save, or the time at which a save was last due. `None` while the ranks do not step.
    last: Option<Mono>,
    /// The newest step that all ranks have saved and sealed in any attempt.
    pub(super) newest: Option<u64>,
    /// The same at the start of this attempt.
    pub(super) newest_before: Option<u64>,
}

impl Saving {
    /// All ranks step: from now on a failure would cost time.
    pub(super) fn begin(&mut self, at: Mono) {
        self.last = Some(at);
    }

    /// A step was saved.
    pub(super) fn saved(&mut self, at: Mono) {
        self.last = self.last.max(Some(at));
    }

    /// Sets new advice. Returns the fact to record if it has changed enough.
    pub(super) fn advise(&mut self, advised: Option<Advised>) -> Option<Fact> {
        self.advised = advised.or(self.advised);
        let news = advised.filter(|advised| advised.is_news_after(self.reported.as_ref()))?;
        self.reported = Some(news);
        Some(news.fact())
    }

    pub(super) fn is_due(&mut self, at: Mono) -> bool {
        let due =
            self.last.is_some_and(|last| advice::is_due(self.advised.as_ref(), at.since(last).as_seconds()));
        if due {
            self.last = Some(at);
        }
        due
    }

    /// The newest step that a restart returns to, if known: the newest step that was saved here, if this attempt may
    /// have started from what had been saved before. An attempt that started with a later step has it from elsewhere.
    /// If steps are counted from zero in each process, the start is unknown.
    pub(super) fn committed(&self, mut first_steps: impl Iterator<Item = StepDone>) -> Option<u64> {
        let before = self.newest_before;
        let goes_on_from_there = |first: StepDone| {
            !first.counted && before.is_none_or(|before| first.step <= before.saturating_add(1))
        };
        self.newest.filter(|_| first_steps.all(goes_on_from_there))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_is_due_once_each_time_and_counts_from_the_last_one() {
        let at = |seconds: u64| Mono(seconds * 1_000_000_000);
        let mut saving = Saving::default();
        assert!(!saving.is_due(at(1000)), "no rank steps");
        saving.begin(at(1000));
        assert!(!saving.is_due(at(1059)) && saving.is_due(at(1060)) && !saving.is_due(at(1061)));
        // The trainer also saves for its own reasons.
        saving.saved(at(1100));
        assert!(!saving.is_due(at(1120)) && saving.is_due(at(1160)));
        // A save that is reported late does not turn the time back.
        saving.saved(at(1090));
        assert!(!saving.is_due(at(1161)));
    }
}
