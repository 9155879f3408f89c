//! What was found wrong with the job while it ran: told at once, and remembered as long as it lasts, since it may say why the job
//! fails.

use crate::model::entry::Body;
use crate::model::finding::{Finding, FindingKind};
use crate::model::verdict::Verdict;

use super::{Job, Output};

/// Findings that a testimony carries, the surest.
const TESTIFIED: usize = 8;

impl Job {
    /// Records findings; those that stand are kept until they are over.
    pub(super) fn report_found(&mut self, found: Vec<Finding>, out: &mut Vec<Output>) {
        for finding in found {
            self.standing.retain(|stood| stood.finding != finding.finding);
            if !finding.over {
                self.standing.push(finding.clone());
            }
            out.push(Output::Record(Body::Finding(finding)));
        }
    }

    /// What still was wrong with the failed attempt, and may have to do with the failure: who is slow says nothing of who
    /// fails elsewhere.
    pub(super) fn standing_at(&self, verdict: &Verdict) -> Vec<Finding> {
        let concerns = |finding: &&Finding| {
            let is_of_a_place = matches!(finding.what, FindingKind::SlowRank | FindingKind::SlowHost);
            let of_the_culprit = || verdict.culprit.is_some_and(|rank| finding.ranks.contains(&rank));
            finding.attempt == verdict.attempt && (!is_of_a_place || of_the_culprit())
        };
        let mut standing: Vec<Finding> = self.standing.iter().filter(concerns).cloned().collect();
        standing.sort_by(|one, other| other.confidence.total_cmp(&one.confidence));
        standing.truncate(TESTIFIED);
        standing
    }
}
