//! A launcher that waits as a spare gets ready: its template imports what ranks import, and it keeps copies of checkpoints
//! for the hosts with ranks. The terminal, the journal and `mainstay status` show what it has.

use std::time::{Duration, Instant};

use mainstay_group::spare_ready::SpareReady;

/// How often a copy of a newer step is written to the journal.
const RECORDED_EVERY: Duration = Duration::from_secs(10);

/// What was reported about a spare.
#[derive(Debug, Default)]
pub(crate) struct SpareReports {
    /// What the journal has, and since when.
    recorded: Option<(SpareReady, Instant)>,
}

impl SpareReports {
    /// Whether to write this down now, and whether to show it to people: not each newer step is shown.
    fn is_due(&self, now: &SpareReady) -> (bool, bool) {
        let Some((before, at)) = &self.recorded else { return (true, now.has_something()) };
        let whole = |of: &SpareReady| of.copy.is_some_and(|copy| copy.shards == copy.ranks as usize);
        let kind = |of: &SpareReady| (of.imports, of.copy.is_some(), whole(of));
        let is_news = kind(before) != kind(now);
        let is_newer = before != now && at.elapsed() >= RECORDED_EVERY;
        (is_news || is_newer, is_news)
    }

    /// Takes in what a spare has now. Returns whether to show it to people; none if it is not to be written down.
    pub(crate) fn take(&mut self, now: &SpareReady) -> Option<bool> {
        let (is_due, is_news) = self.is_due(now);
        is_due.then(|| {
            self.recorded = Some((now.clone(), Instant::now()));
            is_news
        })
    }

    /// The launcher is no longer a spare.
    pub(crate) fn forget(&mut self) {
        self.recorded = None;
    }
}

#[cfg(test)]
mod tests {
    use mainstay_group::spare_ready::SpareCopy;

    use super::*;

    #[test]
    fn people_see_what_becomes_ready_and_not_each_newer_step() {
        let copy = |step| Some(SpareCopy { attempt: 0, step, shards: 2, ranks: 2 });
        let mut ready = SpareReports::default();
        let mut see = |imports, copy| ready.take(&SpareReady { imports: Some(imports), copy });
        assert_eq!(see(false, None), Some(false), "the leader has said that it waits");
        assert_eq!(see(false, None), None);
        assert_eq!(see(true, None), Some(true));
        assert_eq!(see(true, copy(5)), Some(true));
        assert_eq!(see(true, copy(6)), None, "it was written down a moment ago");
    }
}
